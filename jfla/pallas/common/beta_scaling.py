"""beta around the inverse: (I + diag(beta) L)^-1 diag(beta) = t (I + s L t)^-1 s with s t = beta and |s| = |t|.

Split evenly, a small beta makes neither rows nor columns alone small, and what belongs to it keeps its digits in
float16.
"""

import jax.numpy as jnp

from jfla.pallas.mgpu.copies import commit_smem, load_with_layout, write
from jfla.pallas.mgpu.iota import per_column, per_row
from jfla.pallas.mgpu.layouts import COLS, ROWS
from jfla.pallas.mgpu.smem import F16
from jfla.pallas.mgpu.triangular import TriangularInverse
from jfla.pallas.mgpu.types import Index, Reg, Smem
from jfla.types import CHUNK

# Of a buffer [3, C]: s, t, and beta. beta has a line of its own: four threads of a warp read the same element of it,
# and the first one that stored s there would race with the loads of the three others.
BETA_LINE = 2


def write_beta_scaling(beta_smem: Smem, scaling_smem: Smem) -> None:
    """s and t, the first lines of [2 or 3, C], from beta [C]."""
    beta = load_with_layout(beta_smem, ROWS)
    root = jnp.sqrt(jnp.abs(beta))
    write(scaling_smem.at[0], jnp.where(beta < 0.0, -root, root))
    write(scaling_smem.at[1], root)


def scale_rows_and_columns(
    x: Reg, scaling_smem: Smem, zero: Index, inverse: bool = False
) -> Reg:
    """s x t of x [C, C]; or t x s, for the inverse."""
    left, right = (1, 0) if inverse else (0, 1)
    rows = load_with_layout(scaling_smem.at[zero + left], ROWS)
    columns = load_with_layout(scaling_smem.at[zero + right], COLS)
    x = x * per_row(rows, CHUNK)
    return x * per_column(columns, CHUNK)


def write_lower(lower: Reg, scaling_smem: Smem, tile_smem: Smem, zero: Index) -> None:
    """-s L t into a float16 tile, of which `TriangularInverse` reads what is strictly lower."""
    write(tile_smem, scale_rows_and_columns(-lower, scaling_smem, zero).astype(F16))
    commit_smem()


def write_a_inv(
    inverse: TriangularInverse, scaling_smem: Smem, a_inv_smem: Smem, zero: Index
) -> None:
    """(I + diag(beta) L)^-1 diag(beta) into a 16-bit tile, from what `write_lower` left."""
    x = scale_rows_and_columns(inverse(), scaling_smem, zero, inverse=True)
    a_inv_smem[...] = x.astype(a_inv_smem.dtype)
    commit_smem()
