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
    g = jnp.maximum(g, _strongest(g.dtype))
    units = jnp.floor(g / COARSE_UNIT)
    coarse = units * COARSE_UNIT
    fine = g - coarse
    return DecaySums(running_sum(coarse), running_sum(fine))


def _strongest(dtype: DTypeLike) -> float:
    """The log decay that stronger ones are clipped to.

    As a decay it is 0 already. The coarse sum of a chunk of still stronger ones would not be exact, and that of -inf
    would make every difference not a number.
    """
    smallest = np.finfo(dtype).smallest_subnormal
    return float(np.log(smallest)) - 1


def log_decay_between(late: DecaySums, early: DecaySums) -> Tokens:
    """The sum of the decays behind `early`'s tokens, up to `late`'s; the shapes broadcast."""
    coarse = late.coarse - early.coarse
    fine = late.fine - early.fine
    return coarse + fine


def decay_between(late: DecaySums, early: DecaySums) -> Tokens:
    """exp(log_decay_between)."""
    return jnp.exp(log_decay_between(late, early))


def decay_from_start(sums: DecaySums) -> Tokens:
    """From before the chunk's first token up to and including each token."""
    return jnp.exp(sums.coarse + sums.fine)


def decay_to_end(sums: DecaySums) -> Tokens:
    """From behind each token to the chunk's end."""
    end = sums.at(slice(-1, None))
    return decay_between(end, sums)


# Sums over tokens are matmuls with ones: one operation, where doubling takes six and as many copies.


def running_sum(x: Tokens) -> Tokens:
    """Inclusive: over the tokens up to and including each."""
    return _matmul(jnp.tri(x.shape[-2], dtype=x.dtype), x)


def reverse_running_sum(x: Tokens) -> Tokens:
    """Inclusive: over each token and those behind it. The adjoint of decays from the start of these tokens."""
    return _matmul(jnp.tri(x.shape[-2], dtype=x.dtype).T, x)


def exclusive_running_sum(x: Tokens) -> Tokens:
    """Over the tokens before each. The adjoint of decays to the end of these tokens."""
    return _matmul(jnp.tri(x.shape[-2], k=-1, dtype=x.dtype), x)


def _matmul(ones: Float[Array, "C C"], x: Tokens) -> Tokens:
    # At the highest precision whatever the call's: a rounded coarse part would not be exact.
    return jnp.matmul(ones, x, precision="highest")
