"""The intra-chunk kernel of KDA: `kernel.intra_kda`."""
