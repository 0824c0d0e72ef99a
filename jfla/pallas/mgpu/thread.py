"""What a thread of a warpgroup holds of an accumulator's tile, for code in Mosaic's own operations.

A warp has 16 rows of a tile of 64. In every 8 x 8 part of them a thread has two neighbours of a row: those of row
`row` from column `column` on. An array of n columns is n / 8 parts wide and, in a warp, two parts high.
"""

from typing import Any

import numpy as np
from jax.experimental.mosaic import gpu as mosaic
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from jfla.pallas.mgpu.layouts import TILE_ROWS
from jfla.pallas.mgpu.types import Fragments, Scalar, Vector

LANES = 32  # of a warp
BLOCK_ROWS = 16  # of a warp
NUM_WARPS = TILE_ROWS // BLOCK_ROWS
PART = 8  # rows and columns of a part
HALVES = 2  # parts of a warp, one over the other
WIDE_COLUMNS = 4  # neighbours of a row that a thread has in the layout WIDE
WIDER_COLUMNS = 8  # the same in the layout WIDER


class Thread:
    """A thread's warp in its warpgroup, and its place in a part."""

    def __init__(self) -> None:
        thread = new_thread_idx()
        lane = arith.remui(thread, i32(LANES))
        self.lane = lane
        self.warp = arith.remui(arith.divui(thread, i32(LANES)), i32(NUM_WARPS))
        self.row = arith.divui(lane, i32(4))
        self.pair = arith.remui(lane, i32(4))
        self.column = arith.muli(self.pair, i32(2))

    @property
    def wide_column(self) -> Scalar:
        """Of 16 columns the thread's first in the layout WIDE."""
        part = arith.muli(arith.remui(self.pair, i32(2)), i32(PART))
        return multiply_add(arith.divui(self.pair, i32(2)), WIDE_COLUMNS, part)

    def of_warp(self, numbers: tuple[int, ...]) -> Scalar:
        """Of four numbers below 256 that of this thread's warp."""
        if numbers == tuple(range(NUM_WARPS)):
            return self.warp
        packed = i32(sum(number << (8 * warp) for warp, number in enumerate(numbers)))
        return arith.andi(arith.shrui(packed, arith.muli(self.warp, i32(8))), i32(255))


def new_thread_idx() -> Scalar:
    """The thread's number under a new name.

    LLVM would hoist what follows from the old one, and ptxas would spill it. ptxas knows that they are the same.
    """
    return llvm.inline_asm(
        ir.IntegerType.get_signless(32),
        [mosaic.thread_idx()],
        "mov.u32 $0, $1;",
        "=r,r",
        has_side_effects=True,
    )


def i32(x: int) -> Scalar:
    return mosaic.c(x, ir.IntegerType.get_signless(32))


def multiply_add(x: Scalar, factor: int, y: Scalar) -> Scalar:
    """x * factor + y."""
    return arith.addi(arith.muli(x, i32(factor)), y)


def equal(x: Scalar, y: Scalar) -> Scalar:
    return arith.cmpi(arith.CmpIPredicate.eq, x, y)


def less(x: Scalar, y: Scalar) -> Scalar:
    return arith.cmpi(arith.CmpIPredicate.ult, x, y)


def pointer_at(ptr: Scalar, elements: Scalar | int, element: ir.Type) -> Scalar:
    return utils.getelementptr(ptr, [elements], element)


def element_of(values: Vector, n: int) -> Scalar:
    return vector.extract(values, dynamic_position=[], static_position=[n])


def with_element(values: Vector, n: int, element: Scalar) -> Vector:
    return vector.insert(element, values, dynamic_position=[], static_position=[n])


def parts_of(columns: int) -> list[tuple[int, int]]:
    """(column of parts, half) of an array of so many columns, in the order of its registers."""
    return [
        (column, half) for column in range(columns // PART) for half in range(HALVES)
    ]


def parts(x: Fragments) -> dict[tuple[int, int], Any]:
    """The registers of an array by (column of parts, half)."""
    return dict(zip(parts_of(x.shape[1]), x.registers.flatten()))


def from_parts(registers: dict[tuple[int, int], Any]) -> Fragments:
    """The array of these registers, a vector of two elements each."""
    columns = len(registers) // HALVES * PART
    layout = mosaic.WGMMA_LAYOUT
    flat = [registers[part] for part in parts_of(columns)]
    shape = layout.registers_shape((TILE_ROWS, columns))
    return mosaic.FragmentedArray(
        _registers=np.array(flat, dtype=object).reshape(shape),
        _layout=layout,
        _is_signed=None,
    )
