"""Sums of decays over spans of a chunk, from log decays to differences of running sums that lose no digit.

The sum over the tokens j + 1 .. i is the difference of two running sums, G_i - G_j. Of floats it loses the digits of
weak gates behind strong ones. So a running sum has two parts, of multiples of 2^-8, whose sums and differences are
exact, and of what is left of every gate, less than 2^-8, whose sums are small.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float

Tokens = Float[Array, "*batch C G"]

COARSE_UNIT = 2.0**-8


class DecaySums(NamedTuple):
    """Running sums of log decays, up to and including each token, in two parts: [*batch, C, G]."""

    coarse: Tokens
    fine: Tokens

    def at(self, tokens: slice) -> "DecaySums":
        """Of some of the tokens."""
        return DecaySums(self.coarse[..., tokens, :], self.fine[..., tokens, :])


def decay_sums(g: Tokens) -> DecaySums:
    """Of natural-log decays from 0 to -inf."""
    g = jnp.maximum(g, _nothing_left(g.dtype))
    coarse = jnp.floor(g / COARSE_UNIT) * COARSE_UNIT
    return DecaySums(running_sum(coarse), running_sum(g - coarse))


def _nothing_left(dtype: DTypeLike) -> float:
    """A log decay that is 0 as a decay: with what is stronger, sums of a chunk would not be exact."""
    return float(np.log(np.finfo(dtype).smallest_subnormal)) - 1


def log_decay_between(late: DecaySums, early: DecaySums) -> Tokens:
    """The sum of the decays behind `early`'s tokens, up to `late`'s; the shapes broadcast."""
    return (late.coarse - early.coarse) + (late.fine - early.fine)


def decay_between(late: DecaySums, early: DecaySums) -> Tokens:
    """exp(log_decay_between)."""
    return jnp.exp(log_decay_between(late, early))


def decay_from_start(sums: DecaySums) -> Tokens:
    """From before the chunk's first token up to and including each token."""
    return jnp.exp(sums.coarse + sums.fine)


def decay_to_end(sums: DecaySums) -> Tokens:
    """From behind each token to the chunk's end."""
    return decay_between(sums.at(slice(-1, None)), sums)


# Sums over tokens are matmuls with ones: one operation, where doubling takes six and as many copies.


def running_sum(x: Tokens) -> Tokens:
    """Over the tokens up to and including each."""
    return _sum_where(jnp.tri(x.shape[-2], dtype=x.dtype), x)


def sum_of_later(x: Tokens) -> Tokens:
    """Over each token and those behind it: the adjoint of a decay from the start of these tokens."""
    return _sum_where(jnp.tri(x.shape[-2], dtype=x.dtype).T, x)


def sum_of_earlier(x: Tokens) -> Tokens:
    """Over the tokens before each: the adjoint of a decay to the end of these tokens."""
    return _sum_where(jnp.tri(x.shape[-2], k=-1, dtype=x.dtype), x)


def _sum_where(ones: Float[Array, "C C"], x: Tokens) -> Tokens:
    return jnp.matmul(ones, x, precision="highest")
