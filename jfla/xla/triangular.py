"""A chunk's lower triangle by halves: a block of 2s tokens is two blocks of s and the square between them."""

import jax.numpy as jnp
from jaxtyping import Array, Float


def halving_sizes(chunk: int) -> list[int]:
    """The sizes s of the squares of a chunk, small ones first."""
    if chunk & (chunk - 1):
        raise ValueError(
            f"{chunk=} must be a power of two: it is halved down to single tokens"
        )
    return [1 << level for level in range(chunk.bit_length() - 1)]


def off_diagonal(
    x: Float[Array, "*batch C C"], size: int
) -> Float[Array, "*batch M s s"]:
    """The squares below the diagonal blocks of 2 * size tokens: late rows, early columns."""
    *batch, rows, columns = x.shape
    halved_rows = (rows // (2 * size), 2, size)
    halved_columns = (columns // (2 * size), 2, size)
    x = x.reshape(*batch, *halved_rows, *halved_columns)
    late_rows_early_columns = x[..., 1, :, :, 0, :]
    squares = jnp.diagonal(late_rows_early_columns, axis1=-4, axis2=-2)
    return jnp.moveaxis(squares, -1, -3)


def join_diagonal(
    blocks: Float[Array, "*batch M2 s s"],
    squares: Float[Array, "*batch M s s"],
) -> Float[Array, "*batch M s2 s2"]:
    """Diagonal blocks of 2s tokens from those of s tokens and the squares below them; 0 above."""
    zeros = jnp.zeros_like(squares)
    early = blocks[..., 0::2, :, :]
    late = blocks[..., 1::2, :, :]
    return jnp.block([[early, zeros], [squares, late]])


def unit_lower_inverse(lower: Float[Array, "*batch C C"]) -> Float[Array, "*batch C C"]:
    """(I + L)^-1 for strictly lower L, by doubling blocks: as stable as substitution, no power of L is formed."""
    inverse = jnp.ones((*lower.shape[:-1], 1, 1), lower.dtype)
    for size in halving_sizes(lower.shape[-1]):
        early = inverse[..., 0::2, :, :]
        late = inverse[..., 1::2, :, :]
        squares = -late @ (off_diagonal(lower, size) @ early)
        inverse = join_diagonal(inverse, squares)
    return inverse[..., 0, :, :]
