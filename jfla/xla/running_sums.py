"""Sums of decays over the tokens of a chunk, added up and never subtracted, and their adjoints.

A sum that is the difference of two others loses the digits of weak gates beside strong ones, and is NaN for -inf. By
doubling: of two blocks, the later one gets the sum of the earlier.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from jfla.xla.triangular import halves, halving_sizes, join

Tokens = Float[Array, "*batch C G"]


def sum_before(x: Tokens) -> Tokens:
    """Inclusive running sum over the tokens of a block: sum of x_m for m <= i."""
    return _running_sum(x, reverse=False)


def sum_after(x: Tokens) -> Tokens:
    """Exclusive running sum from the end: sum of x_m for m > i."""
    return _running_sum(_next(x), reverse=True)


def sum_before_adjoint(dx: Tokens) -> Tokens:
    """Adjoint of `sum_before`: sum of dx_i for i >= m."""
    return _running_sum(dx, reverse=True)


def sum_after_adjoint(dx: Tokens) -> Tokens:
    """Adjoint of `sum_after`: sum of dx_i for i < m."""
    return _running_sum(_previous(dx), reverse=False)


def _running_sum(x: Tokens, reverse: bool) -> Tokens:
    for size in halving_sizes(x.shape[-2]):
        early, late = halves(x, size)
        if reverse:
            x = join(early + late[..., :1, :], late)
        else:
            x = join(early, late + early[..., -1:, :])
    return x


def _previous(x: Tokens) -> Tokens:
    first = jnp.zeros_like(x[..., :1, :])
    return jnp.concatenate([first, x[..., :-1, :]], axis=-2)


def _next(x: Tokens) -> Tokens:
    last = jnp.zeros_like(x[..., :1, :])
    return jnp.concatenate([x[..., 1:, :], last], axis=-2)
