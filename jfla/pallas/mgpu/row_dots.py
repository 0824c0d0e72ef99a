"""Dot products of rows, each of one array with the same row of another, by mma.sync: in a warp, 16 rows times 16 rows.

Of rows x and y the product x y^T has them on its diagonal, the sums of squares where both are the same. Rows of a warp
as a left operand are its right operand as they lie, so that an instruction of the tensor cores takes the place of 16
conversions and 8 multiplications of a thread, and the sums of several products are 8 numbers a thread.
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
from jfla.pallas.mgpu.layouts import ROWS, TILE_ROWS, WGMMA
from jfla.pallas.mgpu.mma import zeros
from jfla.pallas.mgpu.smem import F32
from jfla.pallas.mgpu.thread import (
    BLOCK_ROWS,
    HALVES,
    LANES,
    NUM_WARPS,
    PART,
    Thread,
    element_of,
    equal,
    i32,
    multiply_add,
    parts,
)
from jfla.pallas.mgpu.tile_moves import load_matrix
from jfla.pallas.mgpu.types import Fragments, InlineContext, Reg, Scalar, Smem
from jfla.pallas.mgpu.warp_matmul import add_block_products


def no_blocks() -> Reg:
    """[64, 16] float32: what `add_row_dots` begins from."""
    return zeros(TILE_ROWS, BLOCK_ROWS)


def add_row_dots(blocks: Reg, x: Reg, y: Reg) -> Reg:
    """With the products of x and y [64, columns] of 16 bits added, whose row dots `row_dots` takes."""
    return add_block_products(blocks, x, (y,))


def row_dots(blocks: Reg) -> Reg:
    """[64] float32, by rows: the diagonal of every block of 16 rows."""
    if interpreting():
        by_warp = blocks.reshape(NUM_WARPS, BLOCK_ROWS, BLOCK_ROWS)
        return jnp.diagonal(by_warp, axis1=1, axis2=2).reshape(TILE_ROWS)
    out: Any = plgpu.ShapeDtypeStruct((TILE_ROWS,), jnp.dtype(F32), ROWS)

    @plgpu.inline_mgpu(arg_types=(WGMMA,), return_type=out)
    def diagonal(_: InlineContext, blocks: Fragments) -> Fragments:
        thread = Thread()
        registers = parts(blocks)
        return _line(
            [_on_diagonal(thread, registers[half, half]) for half in range(HALVES)]
        )

    return diagonal(blocks)  # pyright: ignore[reportCallIssue]: the first argument is Mosaic's


def row_squares(*arrays_smem: list[Smem]) -> list[Reg]:
    """[64] float32, by rows, of every array: the sum of x^2 over the columns of its tiles [64, columns] of 16 bits.

    The arrays have as many tiles; their sums, which are chains of instructions, are made side by side.
    """
    sums = [no_blocks() for _ in arrays_smem]
    for tiles_smem in zip(*arrays_smem, strict=True):
        for n, tile_smem in enumerate(tiles_smem):
            x = load_matrix(tile_smem, columns=tile_smem.shape[1])
            sums[n] = add_row_dots(sums[n], x, x)
    return [row_dots(blocks) for blocks in sums]


def _on_diagonal(thread: Thread, neighbours: Any) -> Scalar:
    """The diagonal's element of this thread's row of 8 x 8 products, of which it has two neighbours in that row."""
    even, odd = (element_of(neighbours, n) for n in range(2))
    is_odd = arith.remui(thread.row, i32(2))
    own = arith.select(equal(is_odd, i32(0)), even, odd)
    # Of the four threads of a row number row // 2 has the columns that the diagonal crosses.
    of_row = arith.divui(thread.row, i32(2))
    source = multiply_add(thread.row, LANES // PART, of_row)
    word = utils.bitcast(own, ir.IntegerType.get_signless(32))
    word = nvvm.shfl_sync(
        i32(0xFFFFFFFF), word, source, i32(LANES - 1), nvvm.ShflKind.idx
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
