"""A matmul of mma.sync, which every GPU since Ampere has, with operands in shared memory or in registers.

The accumulator lies as wgmma's does, and a tile of 16 bits in that layout holds in each thread what mma.sync's left
operand wants there: registers are renumbered, nothing moves between threads.
"""

from typing import Any

import jax
import numpy as np
from jax.experimental.mosaic import gpu as mosaic
from jax.experimental.pallas import mosaic_gpu as plgpu

from jfla.pallas.mgpu.layouts import WGMMA
from jfla.pallas.mgpu.smem import SWIZZLE_BYTES, tile_transforms, transposed
from jfla.pallas.mgpu.types import Fragments, InlineContext, Layout, MemRef, Reg, Smem

_ACC_TILE = (64, 8)
_LHS_TILE = (64, 16)
_STEP = 16  # rows of shared memory whose right operands are in registers at a time: two tiles of 8


def mma_sync(acc: Reg, a: Reg | Smem, b: Smem, first_column: int = 0) -> Reg:
    """acc + a @ b, of b as many columns from `first_column` on as acc has.

    References are tiles of `tile_smem`, or transposed views of them; of those all columns are taken.
    """
    a_smem, a_transposed = _untransposed(a)
    b_smem, b_transposed = _untransposed(b)
    in_registers = isinstance(a, jax.Array)
    tile: Any = plgpu.RefType(tile_transforms(b_smem.dtype))
    out: Any = plgpu.ShapeDtypeStruct(acc.shape, acc.dtype, WGMMA)

    @plgpu.inline_mgpu(
        arg_types=(WGMMA, WGMMA if in_registers else tile, tile), return_type=out
    )
    def run(_: InlineContext, acc: Fragments, a: Fragments, b: MemRef) -> Fragments:
        layouts = mosaic.MMALayouts(b_smem.dtype)
        acc_layout = acc.layout
        acc = _renumbered(acc, layouts.acc, _ACC_TILE)
        if in_registers:
            a = _renumbered(a, layouts.lhs, _LHS_TILE)
        else:
            a = _load(a, layouts.lhs, a_transposed)
        rows = acc.shape[1] if b_transposed else a.shape[1]
        for first in range(0, rows, _STEP):
            step = slice(first, first + _STEP)
            part = _load(_tile_rows(b, first), layouts.rhs, b_transposed)
            if b_transposed:
                acc[:, step] = mosaic.mma(acc[:, step], a, part)
            else:
                columns = slice(first_column, first_column + acc.shape[1])
                acc = mosaic.mma(acc, a[:, step], part[:, columns])
        return _renumbered(acc, acc_layout, _ACC_TILE)

    operands: Any = (acc, a_smem, b_smem)
    return run(*operands)


def _untransposed(x: Reg | Smem) -> tuple[Any, bool]:
    """(the tile itself, whether x is its transposed view)."""
    if isinstance(x, jax.Array):
        return x, False
    twice = transposed(x)
    *base, before, last = (None, *twice.transforms)
    if before != last:
        return x, False
    return type(twice)(twice.ref, tuple(base[1:])), True


def _tile_rows(tiles: MemRef, first: int) -> MemRef:
    """Of a buffer [rows / 8, columns / 64, 8, 64] the rows from `first` on."""
    return mosaic.memref_slice(tiles, slice(first // 8, (first + _STEP) // 8))


def _load(tiles: MemRef, layout: Layout, transpose: bool) -> Fragments:
    if transpose:
        tiles = mosaic.memref_transpose(tiles, (1, 0, 3, 2))
    return mosaic.FragmentedArray.load_tiled(tiles, SWIZZLE_BYTES, layout=layout)


def _renumbered(x: Fragments, layout: Layout, tile: tuple[int, int]) -> Fragments:
    """The same elements in the same threads, under another numbering of registers."""
    if x.layout == layout:
        return x
    rows, columns = tile
    shape = layout.registers_shape(tile)
    registers = np.full(
        layout.registers_shape(x.shape), x.registers.flat[0], dtype=object
    )
    out = mosaic.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)
    for row in range(0, x.shape[0], rows):
        for column in range(0, x.shape[1], columns):
            part = x[row : row + rows, column : column + columns].registers.flatten()
            out[row : row + rows, column : column + columns] = mosaic.FragmentedArray(
                _registers=part.reshape(shape), _layout=layout, _is_signed=None
            )
    return out
