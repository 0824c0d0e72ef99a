"""`jfla bench`: times, errors and memory of the ops and of their peers, on named sets of shapes.

`python -m jfla.bench` is the same command for machines that have JAX, NumPy and jaxtyping alone.
"""
