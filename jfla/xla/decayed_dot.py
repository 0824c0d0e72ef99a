"""The decayed dot product inside a chunk and its adjoint: the one place of "xla" where KDA and GDN differ.

    A[i, j] = sum_d a_id k_jd exp(g_(j+1)d + ... + g_id)          for j <= i, 0 above the diagonal

Every exponent is a sum of decays over a span of tokens (see running_sums.py): it is <= 0 for any gate, it is right for
-inf, and a strong gate costs the weak gates after it no digit.
"""

import functools

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jfla.xla.running_sums import sum_after, sum_after_adjoint, sum_before, sum_before_adjoint
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
    g: Float[Array, "*batch C G"],
    scalar_gate: bool,
) -> Float[Array, "*batch R C C"]:
    """A for each of R sets of rows against the same k and g. A scalar gate has one decay per token, G = 1."""
    form = _scalar if scalar_gate else _per_channel
    return form(rows, k, g)


def decayed_dot_adjoint(
    rows: Float[Array, "*batch R C K"],
    k: Float[Array, "*batch C K"],
    g: Float[Array, "*batch C G"],
    d_dot: Float[Array, "*batch R C C"],
    scalar_gate: bool,
) -> tuple[Float[Array, "*batch R C K"], Float[Array, "*batch C K"], Float[Array, "*batch C G"]]:
    """(drows, dk, dg) from the cotangent of A, which must be 0 above the diagonal.

    The gate needs no pass over pairs of its own: where a row meets exp(+x) its cotangent is row * drow, where a key
    meets exp(+y) it is k * dk.
    """
    form = _scalar_adjoint if scalar_gate else _per_channel_adjoint
    return form(rows, k, g, d_dot)


# One decay per pair of tokens multiplies an ordinary dot product.


def _pair_decay(g: Float[Array, "*batch C 1"]) -> Float[Array, "*batch C C"]:
    strictly_lower = _lower(g.ndim, g.shape[-2], k=-1)
    lower = _lower(g.ndim, g.shape[-2], k=0)
    sums = sum_before(jnp.where(strictly_lower, g, 0))
    return jnp.exp(jnp.where(lower, sums, -jnp.inf))


def _lower(ndim: int, size: int, k: int) -> Bool[Array, "*ones C C"]:
    """True up to diagonal k."""
    mask = jnp.tri(size, k=k, dtype=bool)
    return mask.reshape((1,) * (ndim - 2) + mask.shape)


def _scalar(rows: Array, k: Array, g: Array) -> Array:
    return jnp.einsum("...rid,...jd->...rij", rows, k) * _pair_decay(g)[..., None, :, :]


def _scalar_adjoint(rows: Array, k: Array, g: Array, d_dot: Array) -> tuple[Array, Array, Array]:
    d_dot = d_dot * _pair_decay(g)[..., None, :, :]
    drows = jnp.einsum("...rij,...jd->...rid", d_dot, k)
    dk = jnp.einsum("...rij,...rid->...jd", d_dot, rows)
    path = [(1, 2), (0, 1)]
    pairs = jnp.einsum("...rij,...rid,...jd->...ij", d_dot, rows, k, optimize=path)
    strictly_lower = _lower(pairs.ndim, g.shape[-2], k=-1)
    dg = jnp.where(strictly_lower, sum_before_adjoint(pairs), 0)
    return drows, dk, jnp.sum(dg, axis=-1, keepdims=True)


# A decay per channel. A block of 2s tokens is two blocks of s tokens and the square between them, where everything
# decays through the boundary: exp(sum from the boundary to i) * exp(sum from j to the boundary).


def _per_channel(rows: Array, k: Array, g: Array) -> Array:
    diagonal = rowwise_dot(rows, k[..., None, :, :])
    blocks = diagonal[..., None, None]
    for size in halving_sizes(k.shape[-2]):
        early, late, _ = _through_boundary(rows, k, g, size)
        square = _unstack_rows(_stack_rows(late) @ early.mT, size)
        blocks = join_diagonal(blocks, square)
    return blocks[..., 0, :, :]


def _per_channel_adjoint(
    rows: Array,
    k: Array,
    g: Array,
    d_dot: Array,
) -> tuple[Array, Array, Array]:
    diagonal = jnp.diagonal(d_dot, axis1=-2, axis2=-1)[..., None]
    drows = diagonal * k[..., None, :, :]
    dk = _sum_rows(diagonal * rows, axis=-3)
    dg = jnp.zeros_like(g)
    for size in halving_sizes(k.shape[-2]):
        early, late, (e_early, e_late) = _through_boundary(rows, k, g, size)
        d_square = _stack_rows(off_diagonal(d_dot, size))
        dlate = _unstack_rows(d_square @ early, size)
        dearly = d_square.mT @ _stack_rows(late)
        drows = drows + join(jnp.zeros_like(dlate), dlate * e_late[..., None, :, :, :])
        dk = dk + join(dearly * e_early, jnp.zeros_like(dearly))
        dg_early = sum_after_adjoint(early * dearly)
        dg_late = sum_before_adjoint(_sum_rows(late * dlate, axis=-4))
        dg = dg + join(dg_early, dg_late)
    return drows, dk, dg


def _through_boundary(
    rows: Array,
    k: Array,
    g: Array,
    size: int,
) -> tuple[Array, Array, tuple[Array, Array]]:
    """k of the early and rows of the late halves, decayed to the boundary between them, and these decays."""
    g_early, g_late = halves(g, size)
    k_early, _ = halves(k, size)
    _, late = halves(rows, size)
    e_early = jnp.exp(sum_after(g_early))
    e_late = jnp.exp(sum_before(g_late))
    return k_early * e_early, late * e_late[..., None, :, :, :], (e_early, e_late)


def _stack_rows(x: Float[Array, "*batch R M s D"]) -> Float[Array, "*batch M Rs D"]:
    """The sets of rows that meet the same keys, one below the other: one larger matmul."""
    x = jnp.moveaxis(x, -4, -3)
    return x.reshape(*x.shape[:-3], -1, x.shape[-1])


def _unstack_rows(x: Float[Array, "*batch M Rs D"], size: int) -> Float[Array, "*batch R M s D"]:
    """The way back from `_stack_rows`."""
    return jnp.moveaxis(x.reshape(*x.shape[:-2], -1, size, x.shape[-1]), -3, -4)


def _sum_rows(x: Array, axis: int) -> Array:
    """Over the few sets of rows, term by term: a reduction takes a CPU longer."""
    return functools.reduce(jnp.add, jnp.moveaxis(x, axis, 0))
