"""The Hopper kernels that share nothing with other machines: KDA inside a chunk, and the gradients of chunks."""
