"""Lines broadcast over a tile of registers, and the row and column numbers that masks are made of."""

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jfla.pallas.mgpu.copies import commit_smem, load_with_layout
from jfla.pallas.mgpu.layouts import COLS, ROWS, WGMMA
from jfla.pallas.mgpu.types import Layout, MemorySpec, Reg, Smem


def per_row(x: Reg, columns: int, layout: Layout = WGMMA) -> Reg:
    """[rows] to [rows, columns]."""
    whole = lax.broadcast_in_dim(x, (x.shape[0], columns), [0])
    return plgpu.layout_cast(whole, layout)


def per_column(x: Reg, rows: int, layout: Layout = WGMMA) -> Reg:
    """[columns] to [rows, columns]."""
    whole = lax.broadcast_in_dim(x, (rows, x.shape[0]), [1])
    return plgpu.layout_cast(whole, layout)


def iota_smem(num_warpgroups: int, size: int) -> MemorySpec:
    """Shared memory for `write_iota`, a line for each warpgroup."""
    return plgpu.SMEM((num_warpgroups, size), jnp.int32)


def iota(size: int, layout: Layout) -> Reg:
    """[size]: 0, 1, .."""
    return plgpu.layout_cast(lax.iota(jnp.int32, size), layout)


def write_iota(line_smem: Smem) -> None:
    """0, 1, .. into a line of shared memory."""
    line_smem[...] = iota(line_smem.shape[0], ROWS)
    commit_smem()


def column_numbers(line_smem: Smem) -> Reg:
    """[size, size]: the number of every element's column, from a line of `write_iota`.

    LLVM would hoist a line that is made of constants out of the loop over tiles; this one is read where it is needed.
    """
    return per_column(load_with_layout(line_smem, COLS), line_smem.shape[0])
