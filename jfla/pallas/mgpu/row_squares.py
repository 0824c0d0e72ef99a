"""Sums of squares of the rows of tiles in shared memory, by mma.sync: a warp's rows times themselves.

Of rows x the product x x^T has the sums of squares on its diagonal. Rows of a warp as a left operand, by one ldmatrix
for every 16 columns, are its right operand as they lie, so that an instruction of the tensor cores takes the place of
16 conversions and 8 multiplications of a thread.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mosaic
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, nvvm, vector

from jfla.pallas.context import interpreting
from jfla.pallas.mgpu.layouts import ROWS, TILE_ROWS
from jfla.pallas.mgpu.smem import BF16, F32, tile_transforms
from jfla.pallas.mgpu.thread import HALVES, PART, Thread, equal, i32, multiply_add
from jfla.pallas.mgpu.tile_moves import MatrixLane, TileAddresses, ldmatrix
from jfla.pallas.mgpu.types import Fragments, InlineContext, MemRef, Reg, Scalar, Smem
from jfla.pallas.mgpu.warp_matmul import mma_m16n8k16

_MATRICES = 4  # of 8 x 8 elements that an ldmatrix loads: two neighbours of two halves
_LANES = 32


def row_squares(*arrays_smem: list[Smem]) -> list[Reg]:
    """[64] float32, by rows, of every array: the sum of x^2 over the columns of its tiles [64, columns] of 16 bits.

    The arrays have as many tiles; their sums, which are chains of instructions, are made side by side.
    """
    if interpreting():
        return [_row_squares_of(tiles_smem) for tiles_smem in arrays_smem]
    dtype = arrays_smem[0][0].dtype
    columns = arrays_smem[0][0].shape[1]
    element = "bf16" if dtype == BF16 else "f16"
    out: Any = plgpu.ShapeDtypeStruct((TILE_ROWS,), jnp.dtype(F32), ROWS)
    tile_type: Any = plgpu.RefType(tile_transforms(dtype))
    # The first tiles of all arrays, then the second ones.
    in_turn = [tile for tiles in zip(*arrays_smem, strict=True) for tile in tiles]
    num_arrays = len(arrays_smem)

    @plgpu.inline_mgpu(
        arg_types=(tile_type,) * len(in_turn), return_type=[out] * num_arrays
    )
    def sums(_: InlineContext, *tiles: MemRef) -> list[Fragments]:
        thread = Thread()
        lane = MatrixLane(thread)
        rows = multiply_add(thread.warp, HALVES, lane.half)
        addresses = [TileAddresses(tile, lane.row) for tile in tiles]
        zero = utils.c(0.0, ir.F32Type.get())
        products = {
            (n, half): [zero] * _MATRICES
            for n in range(num_arrays)
            for half in range(HALVES)
        }
        for first in range(0, len(tiles), num_arrays):
            for column in range(0, columns // PART, HALVES):
                for n in range(num_arrays):
                    place = addresses[first + n].of(
                        rows, lane.neighbour, first_number=column
                    )
                    left = ldmatrix(place)
                    for half in range(HALVES):
                        acc = products[n, half]
                        right = left[half::HALVES]
                        products[n, half] = mma_m16n8k16(left, right, acc, element)
        return [
            _line(
                [_diagonal(thread, products[n, half], half) for half in range(HALVES)]
            )
            for n in range(num_arrays)
        ]

    return sums(*in_turn)  # pyright: ignore[reportCallIssue]: the first argument is Mosaic's


def _row_squares_of(tiles_smem: list[Smem]) -> Reg:
    columns = jnp.concatenate([tile[...] for tile in tiles_smem], axis=1)
    return jnp.sum(jnp.square(columns.astype(F32)), axis=1)


def _diagonal(thread: Thread, products: list[Scalar], half: int) -> Scalar:
    """The diagonal's element of this thread's row of 8 x 8 products, of which it has two neighbours in that row."""
    even, odd = products[HALVES * half : HALVES * (half + 1)]
    is_odd = arith.remui(thread.row, i32(2))
    own = arith.select(equal(is_odd, i32(0)), even, odd)
    # Of the four threads of a row number row // 2 has the columns that the diagonal crosses.
    of_row = arith.divui(thread.row, i32(2))
    source = multiply_add(thread.row, _LANES // PART, of_row)
    word = utils.bitcast(own, ir.IntegerType.get_signless(32))
    word = nvvm.shfl_sync(
        i32(0xFFFFFFFF), word, source, i32(_LANES - 1), nvvm.ShflKind.idx
    )
    return utils.bitcast(word, ir.F32Type.get())


def _line(of_halves: list[Scalar]) -> Fragments:
    layout = mosaic.WGMMA_ROW_LAYOUT
    single = ir.VectorType.get((1,), ir.F32Type.get())
    registers = [vector.broadcast(single, x) for x in of_halves]
    shape = layout.registers_shape((TILE_ROWS,))
    return mosaic.FragmentedArray(
        _registers=np.array(registers, dtype=object).reshape(shape),
        _layout=layout,
        _is_signed=None,
    )
