"""The decayed dot product inside a chunk and its adjoint: the one place of "xla" where KDA and GDN differ.

    A[i, j] = sum_d a_id k_jd exp(g_(j+1)d + ... + g_id)          for j <= i, 0 above the diagonal

Every exponent is a sum of decays over a span of tokens (see decay_sums.py): it is <= 0 for any gate, it is right for
-inf, and a strong gate costs the weak gates after it no digit.
"""

import functools

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jfla.xla.boundaries import (
    boundaries,
    boundary_of_columns,
    places_of_columns,
    places_of_pairs,
    places_of_rows,
    spans_of_columns,
    spans_of_rows,
)
from jfla.xla.decay_sums import (
    DecaySums,
    decay_between,
    log_decay_between,
    reverse_running_sum,
)


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


# A decay per channel. A pair meets at a boundary, and everything decays through it (boundaries.py):
# exp(sum from the boundary to i) * exp(sum from j to the boundary).


def _per_channel(rows: Array, k: Array, sums: DecaySums) -> Array:
    *batch, num_sets, chunk, _ = rows.shape
    late, early, _ = _through_boundaries(rows, k, sums)
    # With `columns.mT` for it XLA would write `early` transposed, on a CPU and on a GPU.
    dots = [
        jnp.einsum("...id,...jd->...ij", late[..., n, :, :], columns)
        for n, columns in enumerate(_of_boundaries(early, axis=-2))
    ]
    dots = jnp.concatenate(dots, axis=-1).reshape(*batch, -1)
    places = places_of_pairs(chunk, num_sets)
    pairs = _take(dots, np.maximum(places, 0), axis=-1)
    diagonal = rowwise_dot(rows, k[..., None, :, :])[..., None]
    diagonal = jnp.where(_of_rank(np.eye(chunk, dtype=bool), rows.ndim), diagonal, 0)
    return jnp.where(_of_rank(places < 0, rows.ndim), diagonal, pairs)


def _per_channel_adjoint(
    rows: Array,
    k: Array,
    sums: DecaySums,
    d_dot: Array,
) -> tuple[Array, Array, Array]:
    *batch, num_sets, chunk, key_dim = rows.shape
    late, early, (to_row, from_column) = _through_boundaries(rows, k, sums)
    d_pairs = _of_boundaries(_at_boundaries(d_dot), axis=-1)
    columns = _of_boundaries(early, axis=-2)
    of_rows = [pairs @ tile for pairs, tile in zip(d_pairs, columns)]
    of_columns = [pairs.mT @ late[..., n, :, :] for n, pairs in enumerate(d_pairs)]
    dlate = jnp.stack(of_rows, axis=-3)
    dearly = jnp.concatenate(of_columns, axis=-2)

    diagonal = jnp.diagonal(d_dot, axis1=-2, axis2=-1)[..., None]
    flat = (*batch, -1, key_dim)
    by_set = (*late.shape[:-2], num_sets, -1, key_dim)
    d_rows = (dlate.reshape(by_set) * to_row[..., None, :, :]).reshape(flat)
    drows = _at_tokens(d_rows, places_of_rows(chunk, num_sets))
    d_columns = (dearly * from_column).reshape(flat)
    dk = _at_tokens(d_columns, places_of_columns(chunk))

    # A decay gets row * drow of the rows from it on, and k * dk of the columns before it, as far as the boundary.
    at_rows = _sum_terms((late * dlate).reshape(by_set), axis=-3).reshape(flat)
    at_columns = (early * dearly).reshape(flat)
    row_spans = jnp.asarray(spans_of_rows(chunk), k.dtype)
    column_spans = jnp.asarray(spans_of_columns(chunk), k.dtype)
    return (
        drows + diagonal * k[..., None, :, :],
        dk + _sum_terms(diagonal * rows, axis=-3),
        row_spans @ at_rows + column_spans @ at_columns,
    )


def _through_boundaries(
    rows: Float[Array, "*batch R C K"],
    k: Float[Array, "*batch C K"],
    sums: DecaySums,
) -> tuple[
    Float[Array, "*batch sizes 3 RI K"],
    Float[Array, "*batch sizes J K"],
    tuple[Float[Array, "*batch sizes 3 I K"], Float[Array, "*batch sizes J K"]],
]:
    """Rows decayed from their boundary on, columns of k decayed to it, and these decays."""
    *batch, num_sets, chunk, key_dim = rows.shape
    tables = boundaries(chunk)
    at = lambda tokens: DecaySums(*(_take(x, tokens, axis=-2) for x in sums))
    to_row = decay_between(at(tables.rows), at(tables.row_boundary))
    from_column = decay_between(at(tables.column_boundary), at(tables.columns))
    row_of_set = tables.rows[:, :, None] + chunk * np.arange(num_sets)[:, None]
    late = _take(rows.reshape(*batch, -1, key_dim), row_of_set, axis=-2)
    late = late * to_row[..., None, :, :]
    early = _take(k, tables.columns, axis=-2) * from_column
    # All sets of rows as one matrix: XLA's CPU takes longer for a matmul of more dimensions.
    return late.reshape(*late.shape[:-3], -1, key_dim), early, (to_row, from_column)


def _of_boundaries(x: Array, axis: int) -> list[Array]:
    """What stands at the columns of the first boundary, the second and the third: at one, two and three quarters."""
    quarter = x.shape[axis] // (1 + 2 + 3)
    return jnp.split(x, (quarter, 3 * quarter), axis)


def _at_boundaries(
    d_dot: Float[Array, "*batch R C C"],
) -> Float[Array, "*batch sizes RI J"]:
    """The cotangent of every pair where it meets, and 0 where a row and a column do not."""
    *batch, num_sets, chunk, _ = d_dot.shape
    tables = boundaries(chunk)
    row = tables.rows[:, boundary_of_columns(chunk)].swapaxes(-1, -2)
    pair = chunk * row + tables.columns[:, None]
    pair_of_set = pair[:, None] + chunk**2 * np.arange(num_sets)[:, None, None]
    pairs = _take(d_dot.reshape(*batch, -1), pair_of_set, axis=-1)
    pairs = jnp.where(_of_rank(tables.meet[:, None], pairs.ndim), pairs, 0)
    return pairs.reshape(*pairs.shape[:-3], -1, pairs.shape[-1])


def _at_tokens(
    x: Float[Array, "*batch N K"], places: Int[np.ndarray, "*sets n C"]
) -> Float[Array, "... C K"]:
    """The sum of what a token has at its n places, or fewer: -1 is none."""
    terms = _take(x, np.maximum(places, 0), axis=-2)
    terms = jnp.where(_of_rank((places < 0)[..., None], terms.ndim), 0, terms)
    return _sum_terms(terms, axis=-3)


def _take(x: Array, places: Int[np.ndarray, "..."], axis: int) -> Array:
    """Those elements along the axis, which may become several."""
    # NumPy's 64-bit indices are 64-bit within jax.enable_x64 and 32-bit outside. What is traced within it and lowered
    # outside would have both, and JAX would refuse the program.
    return jnp.take(x, places.astype(np.int32), axis=axis, mode="clip")


def _of_rank(table: Bool[np.ndarray, "..."], ndim: int) -> Bool[np.ndarray, "..."]:
    """With leading axes of 1, which JAX asks for where rank promotion is refused."""
    return table.reshape((1,) * (ndim - table.ndim) + table.shape)


def _sum_terms(x: Array, axis: int) -> Array:
    """Over an axis of few, term by term: a reduction takes a CPU longer."""
    return functools.reduce(jnp.add, jnp.moveaxis(x, axis, 0))
