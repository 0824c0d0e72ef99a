"""A matmul of mma.sync, which every GPU since Ampere has, with operands in shared memory or in registers.

The accumulator lies as wgmma's does, and a tile of 16 bits in that layout holds in each thread what mma.sync's left
operand wants there: registers are renumbered, nothing moves between threads. From shared memory operands come by
ldmatrix, with addresses from a new thread index for each product: LLVM would keep those of Mosaic's own loads from
chunk to chunk, and ptxas would spill them.
"""

from typing import Any

import jax
import numpy as np
from jax.experimental.mosaic import gpu as mosaic
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from jfla.pallas.mgpu.layouts import TILE_ROWS, WGMMA
from jfla.pallas.mgpu.smem import tile_transforms, transposed
from jfla.pallas.mgpu.thread import HALVES, PART, Thread, multiply_add
from jfla.pallas.mgpu.tile_moves import VECTORS, MatrixLane, TileAddresses, ldmatrix
from jfla.pallas.mgpu.types import (
    Fragments,
    InlineContext,
    Layout,
    MemRef,
    Reg,
    Scalar,
    Smem,
    Vector,
)

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
        loader = _OperandLoader(layouts, ir.MemRefType(b.type).element_type)
        acc_layout = acc.layout
        # Copy the accumulator first: the products below write into it, and the caller may begin other sums from the
        # same value, which would then begin from this product.
        acc = _renumbered(acc, layouts.acc, _ACC_TILE).copy()
        if in_registers:
            a = _renumbered(a, layouts.lhs, _LHS_TILE)
        else:
            a = loader.left(a, a_transposed)
        rows = acc.shape[1] if b_transposed else a.shape[1]
        for first in range(0, rows, _STEP):
            step = slice(first, first + _STEP)
            if b_transposed:
                part = loader.right_transposed(b, first, a.shape[1])
                acc[:, step] = mosaic.mma(acc[:, step], a, part)
            else:
                columns = slice(first_column, first_column + acc.shape[1])
                part = loader.right(b, first, columns)
                acc = mosaic.mma(acc, a[:, step], part)
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


class _OperandLoader:
    """Loads the operands of one product from shared memory; a lane's place in tiles is made once."""

    def __init__(self, layouts: Any, element: ir.Type) -> None:
        thread = Thread()
        self._layouts = layouts
        self._pair = ir.VectorType.get((2,), element)
        self._lane = MatrixLane(thread)
        self._warp_blocks = multiply_add(thread.warp, HALVES, self._lane.half)

    def left(self, tile: MemRef, transpose: bool) -> Fragments:
        """[TILE_ROWS, columns] of a tile, or of the transposed view of one with 64 columns; a warp has 16 rows."""
        lane = self._lane
        address = TileAddresses(tile, lane.row)
        row_tiles, column_tiles, *_ = ir.MemRefType(tile.type).shape
        num_parts = row_tiles if transpose else column_tiles * VECTORS
        registers = []
        for part in range(0, num_parts, 2):
            if transpose:
                place = address.of(lane.neighbour, self._warp_blocks, first_rows=part)
            else:
                place = address.of(self._warp_blocks, lane.neighbour, first_number=part)
            registers += self._ldmatrix(place, transpose)
        return self._fragments(
            registers, self._layouts.lhs, (TILE_ROWS, num_parts * PART)
        )

    def right(self, tile: MemRef, first: int, columns: slice) -> Fragments:
        """[16, columns] of a tile, from row `first` on."""
        lane = self._lane
        address = TileAddresses(tile, lane.row)
        registers = []
        for part in range(columns.start // PART, columns.stop // PART, 2):
            place = address.of(lane.half, lane.neighbour, first // PART, part)
            registers += self._ldmatrix(place, transpose=True)
        shape = (_STEP, columns.stop - columns.start)
        return self._fragments(registers, self._layouts.rhs, shape)

    def right_transposed(self, tile: MemRef, first: int, rows: int) -> Fragments:
        """[rows, 16] of the transposed view of a tile, from column `first` on."""
        lane = self._lane
        address = TileAddresses(tile, lane.row)
        registers = []
        for part in range(0, rows // PART, 2):
            # Halves lie over one another in the view, and so beside one another in the tile.
            place = address.of(lane.neighbour, lane.half, first // PART, part)
            registers += self._ldmatrix(place, transpose=False)
        return self._fragments(registers, self._layouts.rhs, (rows, _STEP))

    def _ldmatrix(self, place: Scalar, transpose: bool) -> list[Vector]:
        """The four parts, [neighbour][half], in pairs of elements."""
        words = ldmatrix(place, ".trans" if transpose else "")
        return [llvm.bitcast(self._pair, word) for word in words]

    @staticmethod
    def _fragments(
        registers: list[Vector], layout: Layout, shape: tuple[int, int]
    ) -> Fragments:
        flat = np.array(registers, dtype=object)
        return mosaic.FragmentedArray(
            _registers=flat.reshape(layout.registers_shape(shape)),
            _layout=layout,
            _is_signed=None,
        )


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
