"""The intra-chunk kernel of GDN: `kernel.intra_gdn`."""
