"""The diagonal of a tile of 64 rows and columns in registers, and what is below it.

Which elements those are follows from the thread's own place: a thread compares one number with constants. With the
numbers of rows and columns as arrays every element would be compared with a register of its own.
"""

from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import arith

from jfla.pallas.context import interpreting
from jfla.pallas.mgpu.layouts import TILE_ROWS, WGMMA
from jfla.pallas.mgpu.mma import zeros
from jfla.pallas.mgpu.row_dots import row_dots
from jfla.pallas.mgpu.thread import (
    BLOCK_ROWS,
    HALVES,
    NUM_WARPS,
    PART,
    Thread,
    element_of,
    equal,
    from_parts,
    i32,
    multiply_add,
    parts,
    with_element,
)
from jfla.pallas.mgpu.types import Fragments, InlineContext, Reg

_SHAPE = (TILE_ROWS, TILE_ROWS)


def below_diagonal(
    x: Reg, other: Reg | None = None, *, with_diagonal: bool = False
) -> Reg:
    """[64, 64] float32: x below the diagonal, or on it, too; elsewhere `other`, or 0."""
    other = zeros(*_SHAPE) if other is None else other
    if interpreting():
        row, column = (
            plgpu.broadcasted_iota(jnp.int32, _SHAPE, axis, layout=WGMMA)
            for axis in range(2)
        )
        return jnp.where(row >= column if with_diagonal else row > column, x, other)
    out: Any = plgpu.ShapeDtypeStruct(_SHAPE, x.dtype, WGMMA)

    @plgpu.inline_mgpu(arg_types=(WGMMA, WGMMA), return_type=out)
    def select(_: InlineContext, x: Fragments, other: Fragments) -> Fragments:
        thread = Thread()
        # Row minus column, but for the part's place.
        distance = multiply_add(thread.warp, BLOCK_ROWS, thread.row)
        distance = arith.subi(distance, thread.column)
        others = parts(other)
        registers = {}
        for (column, half), register in parts(x).items():
            selected = others[column, half]
            for n in range(2):
                bound = _bound(column, half, n - with_diagonal)
                below = arith.cmpi(arith.CmpIPredicate.sgt, distance, i32(bound))
                elements = (element_of(y, n) for y in (register, selected))
                selected = with_element(selected, n, arith.select(below, *elements))
            registers[column, half] = selected
        return from_parts(registers)

    return select(x, other)  # pyright: ignore[reportCallIssue]


def diagonal(x: Reg) -> Reg:
    """[64] float32, by rows, of x [64, 64]."""
    return row_dots(_diagonal_blocks(x))


def _bound(column: int, half: int, n: int) -> int:
    """Of a part's element n: it is below the diagonal where the thread's distance is greater."""
    # Every second part is not crossed by the diagonal in any warp: its two elements share a comparison.
    offset = column - half
    return PART * offset + (n if offset % 2 == 0 else 0)


def _diagonal_blocks(x: Reg) -> Reg:
    """[64, 16] of x [64, 64]: of every warp's rows the columns of the same numbers."""
    if interpreting():
        by_block = x.reshape(NUM_WARPS, BLOCK_ROWS, NUM_WARPS, BLOCK_ROWS)
        blocks = jnp.diagonal(by_block, axis1=0, axis2=2)
        return jnp.moveaxis(blocks, -1, 0).reshape(TILE_ROWS, BLOCK_ROWS)
    out: Any = plgpu.ShapeDtypeStruct((TILE_ROWS, BLOCK_ROWS), x.dtype, WGMMA)

    @plgpu.inline_mgpu(arg_types=(WGMMA,), return_type=out)
    def select(_: InlineContext, x: Fragments) -> Fragments:
        thread = Thread()
        all_parts = parts(x)
        per_block = BLOCK_ROWS // PART
        registers = {}
        for column in range(per_block):
            for half in range(HALVES):
                register = all_parts[column, half]
                for warp in range(1, NUM_WARPS):
                    here = equal(thread.warp, i32(warp))
                    own = all_parts[warp * per_block + column, half]
                    register = arith.select(here, own, register)
                registers[column, half] = register
        return from_parts(registers)

    return select(x)  # pyright: ignore[reportCallIssue]
