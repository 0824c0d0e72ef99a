"""The decayed dot product inside a chunk and its adjoint: the one place where KDA and GDN differ.

    A[i, j] = sum_d a_id k_jd exp(g_(j+1)d + ... + g_id)          for j <= i, 0 above the diagonal

Every exponent is a sum of decays over a stretch of tokens, added up and never subtracted: it is <= 0 for any gate, it
is right for -inf, and a strong gate costs the weak gates after it no digit.
"""

import functools

import jax.numpy as jnp
from jaxtyping import Array, Float

from jfla.blocks import double, halves, join, levels, squares

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
    """By doubling: of two blocks, the later gets the sum of the earlier (the earlier that of the later)."""
    for size in levels(x.shape[-2]):
        early, late = halves(x, size)
        x = join(early + late[..., :1, :], late) if reverse else join(early, late + early[..., -1:, :])
    return x


def _previous(x: Tokens) -> Tokens:
    return jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(1, 0), (0, 0)])[..., :-1, :]


def _next(x: Tokens) -> Tokens:
    return jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, 1), (0, 0)])[..., 1:, :]


def dot(a: Float[Array, "*#batch D"], b: Float[Array, "*#batch D"]) -> Float[Array, "*#batch"]:
    """Over the last axis, as a matmul: a reduction takes a CPU more than twice as long."""
    return (a * b) @ jnp.ones(a.shape[-1], a.dtype)


def decayed_dot(
    rows: Float[Array, "*batch R C K"], k: Float[Array, "*batch C K"], g: Float[Array, "*batch C G"]
) -> Float[Array, "*batch R C C"]:
    """A for each of R sets of rows against the same k and g. G = K: a decay per channel; G = 1: one per token."""
    return _scalar(rows, k, g) if _is_scalar(k, g) else _vector(rows, k, g)


def decayed_dot_adjoint(
    rows: Float[Array, "*batch R C K"],
    k: Float[Array, "*batch C K"],
    g: Float[Array, "*batch C G"],
    d_dot: Float[Array, "*batch R C C"],
) -> tuple[Float[Array, "*batch R C K"], Float[Array, "*batch C K"], Float[Array, "*batch C G"]]:
    """(drows, dk, dg) from the cotangent of A, which must be 0 above the diagonal.

    The gate needs no pass over pairs of its own: where a row meets exp(+x) its cotangent is row * drow, where a key
    meets exp(+y) it is k * dk.
    """
    return (_scalar_adjoint if _is_scalar(k, g) else _vector_adjoint)(rows, k, g, d_dot)


def _is_scalar(k: Array, g: Array) -> bool:
    return g.shape[-1] != k.shape[-1]


# GDN: one decay per pair of tokens, so the decay multiplies an ordinary dot product.


def _pair_decay(g: Float[Array, "*batch C 1"]) -> Float[Array, "*batch C C"]:
    size = g.shape[-2]
    between = sum_before(jnp.where(jnp.tri(size, k=-1, dtype=bool), g, 0))
    return jnp.exp(jnp.where(jnp.tri(size, dtype=bool), between, -jnp.inf))


def _scalar(rows, k, g):
    return jnp.einsum("...rid,...jd->...rij", rows, k) * _pair_decay(g)[..., None, :, :]


def _scalar_adjoint(rows, k, g, d_dot):
    d_dot = d_dot * _pair_decay(g)[..., None, :, :]
    drows = jnp.einsum("...rij,...jd->...rid", d_dot, k)
    dk = jnp.einsum("...rij,...rid->...jd", d_dot, rows)
    pairs = jnp.einsum("...rij,...rid,...jd->...ij", d_dot, rows, k, optimize=[(1, 2), (0, 1)])
    pairs = jnp.where(jnp.tri(g.shape[-2], k=-1, dtype=bool), sum_before_adjoint(pairs), 0)
    return drows, dk, jnp.sum(pairs, axis=-1, keepdims=True)


# KDA: a decay per channel. A block of 2s tokens is two blocks of s tokens and the square between them, where everything
# decays through the boundary: exp(sum from the boundary to i) * exp(sum from j to the boundary).


def _vector(rows, k, g):
    out = dot(rows, k[..., None, :, :])[..., None, None]
    for size in levels(k.shape[-2]):
        early, late, _ = _level(rows, k, g, size)
        square = _unstack(_stack(late) @ early.mT, size)
        out = double(out, square)
    return out[..., 0, :, :]


def _vector_adjoint(rows, k, g, d_dot):
    diagonal = jnp.diagonal(d_dot, axis1=-2, axis2=-1)[..., None]
    drows, dk, dg = diagonal * k[..., None, :, :], _sum(diagonal * rows, axis=-3), jnp.zeros_like(g)
    for size in levels(k.shape[-2]):
        early, late, (e_early, e_late) = _level(rows, k, g, size)
        d_square = _stack(squares(d_dot, size))
        dlate = _unstack(d_square @ early, size)
        dearly = d_square.mT @ _stack(late)
        drows = drows + join(jnp.zeros_like(dlate), dlate * e_late[..., None, :, :, :])
        dk = dk + join(dearly * e_early, jnp.zeros_like(dearly))
        dg = dg + join(sum_after_adjoint(early * dearly), sum_before_adjoint(_sum(late * dlate, axis=-4)))
    return drows, dk, dg


def _level(rows, k, g, size: int):
    """k of the early and rows of the late halves, decayed to the boundary between them, and these decays."""
    (g_early, g_late), (k_early, _), (_, late) = (halves(x, size) for x in (g, k, rows))
    e_early, e_late = jnp.exp(sum_after(g_early)), jnp.exp(sum_before(g_late))
    return k_early * e_early, late * e_late[..., None, :, :, :], (e_early, e_late)


def _stack(x: Float[Array, "*batch R M s D"]) -> Float[Array, "*batch M Rs D"]:
    """The rows that meet the same keys, one below the other: one larger matmul."""
    x = jnp.moveaxis(x, -4, -3)
    return x.reshape(*x.shape[:-3], -1, x.shape[-1])


def _unstack(x: Float[Array, "*batch M Rs D"], size: int) -> Float[Array, "*batch R M s D"]:
    """The way back from `_stack`."""
    return jnp.moveaxis(x.reshape(*x.shape[:-2], -1, size, x.shape[-1]), -3, -4)


def _sum(x: Array, axis: int) -> Array:
    """Over the few sets of rows, term by term: a reduction takes a CPU longer."""
    return functools.reduce(jnp.add, jnp.moveaxis(x, axis, 0))
