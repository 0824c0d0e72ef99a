"""Layers of a block: delta-rule mixers, causal attention, and what they are made of."""
