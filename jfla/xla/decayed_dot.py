"""The decayed dot product inside a chunk and its adjoint: the one place of "xla" where KDA and GDN differ.

    A[i, j] = sum_d a_id k_jd exp(g_(j+1)d + ... + g_id)          for j <= i, 0 above the diagonal

Every exponent is a sum of decays over a span of tokens (see decay_sums.py): it is <= 0 for any gate, it is right for
-inf, and a strong gate costs the weak gates after it no digit.
"""

import functools

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jfla.xla.decay_sums import (
    DecaySums,
    decay_between,
    exclusive_running_sum,
    log_decay_between,
    reverse_running_sum,
)
from jfla.xla.triangular import halves, halving_sizes, join, join_diagonal, off_diagonal


def rowwise_dot(
    a: Float[Array, "*#batch D"],
    b: Float[Array, "*#batch D"],
) -> Float[Array, "*#batch"]:
    """Over the last axis, as a matmul: a reduction takes a CPU more than twice as long."""
    return (a * b) @ jnp.ones(a.shape[-1], a.dtype)


def decayed_dot(
    rows: Float[Array, "*batch R C K"],
    k: Float[Array, "*batch C K"],
    sums: DecaySums,
    scalar_gate: bool,
) -> Float[Array, "*batch R C C"]:
    """A for each of R sets of rows against the same k and g. A scalar gate has one decay per token, G = 1."""
    form = _scalar if scalar_gate else _per_channel
    return form(rows, k, sums)


def decayed_dot_adjoint(
    rows: Float[Array, "*batch R C K"],
    k: Float[Array, "*batch C K"],
    sums: DecaySums,
    d_dot: Float[Array, "*batch R C C"],
    scalar_gate: bool,
) -> tuple[
    Float[Array, "*batch R C K"], Float[Array, "*batch C K"], Float[Array, "*batch C G"]
]:
    """(drows, dk, dg) from the cotangent of A, which must be 0 above the diagonal.

    The gate needs no pass over pairs of its own: where a row meets exp(+x) its cotangent is row * drow, where a key
    meets exp(+y) it is k * dk. A gate gets the sum of those whose decays span it, and never a difference of sums: under
    a strong gate that would be the rounding of large numbers in the place of a small one.
    """
    form = _scalar_adjoint if scalar_gate else _per_channel_adjoint
    return form(rows, k, sums, d_dot)


# One decay per pair of tokens multiplies an ordinary dot product.


def _pair_decay(sums: DecaySums) -> Float[Array, "*batch C C"]:
    exponent = log_decay_between(sums, DecaySums(*(x.mT for x in sums)))
    return jnp.exp(jnp.where(_lower(exponent, k=0), exponent, -jnp.inf))


def _lower(x: Float[Array, "*batch C C"], k: int) -> Bool[Array, "*ones C C"]:
    """True up to diagonal k."""
    mask = jnp.tri(x.shape[-1], k=k, dtype=bool)
    return mask.reshape((1,) * (x.ndim - 2) + mask.shape)


def _scalar(rows: Array, k: Array, sums: DecaySums) -> Array:
    dots = jnp.einsum("...rid,...jd->...rij", rows, k)
    return dots * _pair_decay(sums)[..., None, :, :]


def _scalar_adjoint(
    rows: Array,
    k: Array,
    sums: DecaySums,
    d_dot: Array,
) -> tuple[Array, Array, Array]:
    d_dot = d_dot * _pair_decay(sums)[..., None, :, :]
    drows = jnp.einsum("...rij,...jd->...rid", d_dot, k)
    dk = jnp.einsum("...rij,...rid->...jd", d_dot, rows)
    path = [(1, 2), (0, 1)]
    pairs = jnp.einsum("...rij,...rid,...jd->...ij", d_dot, rows, k, optimize=path)
    dg = jnp.where(_lower(pairs, k=-1), reverse_running_sum(pairs), 0)
    return drows, dk, jnp.sum(dg, axis=-1, keepdims=True)


# A decay per channel. A block of 2s tokens is two blocks of s tokens and the square between them, where everything
# decays through the boundary: exp(sum from the boundary to i) * exp(sum from j to the boundary).


def _per_channel(rows: Array, k: Array, sums: DecaySums) -> Array:
    diagonal = rowwise_dot(rows, k[..., None, :, :])
    blocks = diagonal[..., None, None]
    for size in halving_sizes(k.shape[-2]):
        early, late, _ = _through_boundary(rows, k, sums, size)
        square = _unstack_rows(_stack_rows(late) @ early.mT, size)
        blocks = join_diagonal(blocks, square)
    return blocks[..., 0, :, :]


def _per_channel_adjoint(
    rows: Array,
    k: Array,
    sums: DecaySums,
    d_dot: Array,
) -> tuple[Array, Array, Array]:
    diagonal = jnp.diagonal(d_dot, axis1=-2, axis2=-1)[..., None]
    drows = diagonal * k[..., None, :, :]
    dk = _sum_rows(diagonal * rows, axis=-3)
    dg = jnp.zeros_like(k)
    for size in halving_sizes(k.shape[-2]):
        early, late, (e_early, e_late) = _through_boundary(rows, k, sums, size)
        d_square = _stack_rows(off_diagonal(d_dot, size))
        dlate = _unstack_rows(d_square @ early, size)
        dearly = d_square.mT @ _stack_rows(late)
        drows = drows + join(jnp.zeros_like(dlate), dlate * e_late[..., None, :, :, :])
        dk = dk + join(dearly * e_early, jnp.zeros_like(dearly))
        dg_early = exclusive_running_sum(early * dearly)
        dg_late = reverse_running_sum(_sum_rows(late * dlate, axis=-4))
        dg = dg + join(dg_early, dg_late)
    return drows, dk, dg


def _through_boundary(
    rows: Array,
    k: Array,
    sums: DecaySums,
    size: int,
) -> tuple[Array, Array, tuple[Array, Array]]:
    """k of the early and rows of the late halves, decayed to the boundary between them, and these decays."""
    early_sums, late_sums = (
        DecaySums(*half) for half in zip(*(halves(x, size) for x in sums))
    )
    boundary = early_sums.at(slice(-1, None))
    k_early, _ = halves(k, size)
    _, late = halves(rows, size)
    e_early = decay_between(boundary, early_sums)
    e_late = decay_between(late_sums, boundary)
    return k_early * e_early, late * e_late[..., None, :, :, :], (e_early, e_late)


def _stack_rows(x: Float[Array, "*batch R M s D"]) -> Float[Array, "*batch M Rs D"]:
    """The sets of rows that meet the same keys, one below the other: one larger matmul."""
    x = jnp.moveaxis(x, -4, -3)
    return x.reshape(*x.shape[:-3], -1, x.shape[-1])


def _unstack_rows(
    x: Float[Array, "*batch M Rs D"], size: int
) -> Float[Array, "*batch R M s D"]:
    """The way back from `_stack_rows`."""
    return jnp.moveaxis(x.reshape(*x.shape[:-2], -1, size, x.shape[-1]), -3, -4)


def _sum_rows(x: Array, axis: int) -> Array:
    """Over the few sets of rows, term by term: a reduction takes a CPU longer."""
    return functools.reduce(jnp.add, jnp.moveaxis(x, axis, 0))
