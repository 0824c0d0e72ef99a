"""Times, errors and memory of the ops and of their peers, on named sets of shapes.

`jfla bench` and `python -m benchmarks` run from a clone; the second needs JAX, NumPy and jaxtyping
alone.
"""
