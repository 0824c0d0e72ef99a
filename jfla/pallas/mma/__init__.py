"""Kernels of mma.sync with a counterpart in `jfla.pallas.sm90`: KDA inside a chunk, and the gradients of chunks."""
