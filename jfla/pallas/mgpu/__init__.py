"""Idioms of Pallas' Mosaic GPU backend: launches, tile schedulers, matmuls, masks. Nothing here knows of attention."""
