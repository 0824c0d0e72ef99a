"""Kernels, and the math of a chunk, that are the same on Hopper's tensor cores and on those of every GPU since Ampere.

What differs is behind `jfla.pallas.mgpu`: see `jfla.pallas.machine`.
"""
