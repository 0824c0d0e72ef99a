"""The decayed dot product inside a chunk and its adjoint: the one place where KDA and GDN differ.

    A[i, j] = sum_d a_id k_jd exp(g_(j+1)d + ... + g_id)          for j <= i, 0 above the diagonal

Every exponent is a sum of decays over a stretch of tokens, added up and never subtracted: it is <= 0 for any gate, it
is right for -inf, and a strong gate costs the weak gates after it no digit.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

Tokens = Float[Array, "*batch C G"]


def sum_before(x: Tokens) -> Tokens:
    """Inclusive running sum over the tokens of a block: sum of x_m for m <= i."""
    return jnp.cumsum(x, axis=-2)


def sum_after(x: Tokens) -> Tokens:
    """Exclusive running sum from the end: sum of x_m for m > i."""
    return jnp.flip(_shifted(jnp.cumsum(jnp.flip(x, -2), axis=-2)), -2)


def sum_before_adjoint(dx: Tokens) -> Tokens:
    """Adjoint of `sum_before`: sum of dx_i for i >= m."""
    return jnp.flip(jnp.cumsum(jnp.flip(dx, -2), axis=-2), -2)


def sum_after_adjoint(dx: Tokens) -> Tokens:
    """Adjoint of `sum_after`: sum of dx_i for i < m."""
    return _shifted(jnp.cumsum(dx, axis=-2))


def _shifted(x: Tokens) -> Tokens:
    return jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(1, 0), (0, 0)])[..., :-1, :]


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
    between = jnp.cumsum(jnp.where(jnp.tri(size, k=-1, dtype=bool), g, 0), axis=-2)
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


def _halves(x: Float[Array, "*batch C D"], size: int) -> tuple[Array, Array]:
    x = x.reshape(*x.shape[:-2], -1, 2, size, x.shape[-1])
    return x[..., 0, :, :], x[..., 1, :, :]


def _join(early: Float[Array, "*batch M s D"], late: Float[Array, "*batch M s D"]) -> Float[Array, "*batch C D"]:
    x = jnp.stack([early, late], axis=-3)
    return x.reshape(*x.shape[:-4], -1, x.shape[-1])


def _levels(chunk: int) -> list[int]:
    return [1 << level for level in range(chunk.bit_length() - 1)]


def _vector(rows, k, g):
    out = jnp.sum(rows * k[..., None, :, :], axis=-1)[..., None, None]
    for size in _levels(k.shape[-2]):
        (g_early, g_late), (k_early, _), (_, late) = (_halves(x, size) for x in (g, k, rows))
        early = k_early * jnp.exp(sum_after(g_early))
        late = late * jnp.exp(sum_before(g_late))[..., None, :, :, :]
        square = jnp.einsum("...rmid,...mjd->...rmij", late, early)
        top, bottom = out[..., 0::2, :, :], out[..., 1::2, :, :]
        out = jnp.block([[top, jnp.zeros_like(square)], [square, bottom]])
    return out[..., 0, :, :]


def _vector_adjoint(rows, k, g, d_dot):
    diagonal = jnp.diagonal(d_dot, axis1=-2, axis2=-1)[..., None]
    drows, dk, dg = diagonal * k[..., None, :, :], jnp.sum(diagonal * rows, axis=-3), jnp.zeros_like(g)
    for size in _levels(k.shape[-2]):
        (g_early, g_late), (k_early, _), (_, late) = (_halves(x, size) for x in (g, k, rows))
        e_early, e_late = jnp.exp(sum_after(g_early)), jnp.exp(sum_before(g_late))
        d_square = _squares(d_dot, size)
        dlate = jnp.einsum("...rmij,...mjd->...rmid", d_square, k_early * e_early) * e_late[..., None, :, :, :]
        dearly = jnp.einsum("...rmij,...rmid->...mjd", d_square, late * e_late[..., None, :, :, :]) * e_early
        drows = drows + _join(jnp.zeros_like(dlate), dlate)
        dk = dk + _join(dearly, jnp.zeros_like(dearly))
        dg_late = sum_before_adjoint(jnp.sum(late * dlate, axis=-4))
        dg = dg + _join(sum_after_adjoint(k_early * dearly), dg_late)
    return drows, dk, dg


def _squares(x: Float[Array, "*batch C C"], size: int) -> Float[Array, "*batch M s s"]:
    """The squares below the diagonal blocks of 2 * size tokens: late rows, early columns."""
    x = x.reshape(*x.shape[:-2], -1, 2, size, x.shape[-1] // (2 * size), 2, size)[..., 1, :, :, 0, :]
    return jnp.moveaxis(jnp.diagonal(x, axis1=-4, axis2=-2), -1, -3)
