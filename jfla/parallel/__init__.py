"""Several devices: how an op meets meshes and shardings."""
