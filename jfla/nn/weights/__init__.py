"""Checkpoints: safetensors files, names and layouts of their tensors, and parameters from them."""
