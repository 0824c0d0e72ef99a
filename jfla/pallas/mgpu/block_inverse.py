"""The inverses of the 16 x 16 diagonal blocks of a unit lower triangular tile, each by a warp in its registers.

mma.sync multiplies 16 x 16 matrices whose left operand lies as an accumulator does, rounded; its right operand lies as
the transpose of an accumulator. So both X and X^T are kept, and no element leaves its warp.
"""

from typing import Any

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mosaic
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from jfla.pallas.context import interpreting
from jfla.pallas.mgpu.layouts import TILE_ROWS, WGMMA
from jfla.pallas.mgpu.smem import F16, F32
from jfla.pallas.mgpu.thread import (
    NUM_WARPS,
    Thread,
    equal,
    from_parts,
    i32,
    parts,
    with_element,
)
from jfla.pallas.mgpu.types import Fragments, InlineContext, Reg, Scalar, Vector
from jfla.pallas.mgpu.warp_matmul import EVERY_PART, WarpMatrix, multiply, splat

BLOCK_LEVELS = 4  # doublings from 1 to 16
LEVELS = 6  # and on to 64


def square_at(n: Reg, level: int) -> Reg:
    """Of n [64, 64] the squares below the diagonal that join two blocks of 2^level; elsewhere 0. Level 4 or 5."""
    if interpreting():
        return _square(n, level)
    out: Any = plgpu.ShapeDtypeStruct(n.shape, n.dtype, WGMMA)

    @plgpu.inline_mgpu(arg_types=(WGMMA,), return_type=out)
    def square(_: InlineContext, n: Fragments) -> Fragments:
        thread = Thread()
        registers = {}
        for (column, half), register in parts(n).items():
            zero = utils.c(0, register.type)
            kept = zero
            for warp in range(NUM_WARPS):
                block = column // 2
                if (warp >> (level - 4)) ^ 1 == block >> (level - 4) and block < warp:
                    kept = arith.select(equal(thread.warp, i32(warp)), register, kept)
            registers[column, half] = kept
        return from_parts(registers)

    return square(n)  # pyright: ignore[reportCallIssue]: the first argument is Mosaic's


def inverse_of_blocks(n: Reg) -> Reg:
    """(I - N)^-1 float32 of the diagonal blocks of n [64, 64] float16, 0 elsewhere.

    Of N what is below the diagonal is read.
    """
    if interpreting():
        x = jnp.eye(TILE_ROWS, dtype=F32) + _square(n, 0).astype(F32)
        for level in range(1, BLOCK_LEVELS):
            x16 = x.astype(F16).astype(F32)
            right = jnp.dot(_square(n, level).astype(F32), x16, precision="highest")
            right = right.astype(F16).astype(F32)
            x = x + jnp.dot(x16, right, precision="highest")
        return x
    out: Any = plgpu.ShapeDtypeStruct(n.shape, jnp.dtype(F32), WGMMA)

    @plgpu.inline_mgpu(arg_types=(WGMMA,), return_type=out)
    def inverse(_: InlineContext, n: Fragments) -> Fragments:
        thread = Thread()
        x = _block_inverse(_own_block(parts(n), thread), thread)
        zero = splat(0.0)
        registers = {}
        for column, half in parts(n):
            own = equal(thread.warp, i32(column // 2))
            registers[column, half] = arith.select(own, x[column % 2, half], zero)
        return from_parts(registers)

    return inverse(n)  # pyright: ignore[reportCallIssue]


def _square(n: Reg, level: int) -> Reg:
    row = plgpu.broadcasted_iota(jnp.int32, n.shape, 0, layout=WGMMA)
    column = plgpu.broadcasted_iota(jnp.int32, n.shape, 1, layout=WGMMA)
    joins = ((row >> level) ^ 1) == (column >> level)
    return jnp.where(joins & (row > column), n, jnp.zeros_like(n))


def _own_block(registers: WarpMatrix, thread: Thread) -> WarpMatrix:
    """A warp's diagonal block, two float16 as i32."""
    word = ir.IntegerType.get_signless(32)
    block = {}
    for column, half in EVERY_PART:
        kept = utils.bitcast(registers[column, half], word)
        for warp in range(1, NUM_WARPS):
            other = utils.bitcast(registers[2 * warp + column, half], word)
            kept = arith.select(equal(thread.warp, i32(warp)), other, kept)
        block[column, half] = kept
    return block


def _block_inverse(n: WarpMatrix, thread: Thread) -> WarpMatrix:
    """(I - N)^-1 of a block, by doubling: X <- X + X N' X with the N' of the squares that join two blocks."""
    square = _squares(n, thread, 0)
    # A square of level 0 lies in a part on the diagonal, so that the transpose of each part is that of the block.
    flipped = {part: _transposed(x) for part, x in square.items()}
    diagonal = _diagonal(thread)
    x = {part: _add(diagonal[part], square[part]) for part in EVERY_PART}
    xt = {part: _add(diagonal[part], flipped[part]) for part in EVERY_PART}
    for level in range(1, BLOCK_LEVELS):
        square = _squares(n, thread, level)
        x16 = {part: _rounded(pair) for part, pair in x.items()}
        xt16 = {part: _rounded(pair) for part, pair in xt.items()}
        none = {part: splat(0.0) for part in EVERY_PART}
        right_t = multiply(none, xt16, square)  # (N' X)^T
        right_t16 = {part: _rounded(pair) for part, pair in right_t.items()}
        x = multiply(x, x16, right_t16)
        if level + 1 < BLOCK_LEVELS:
            xt = multiply(xt, right_t16, x16)
    return x


def _squares(n: WarpMatrix, thread: Thread, level: int) -> WarpMatrix:
    """The squares of a level; elsewhere 0."""
    zero = i32(0)
    if level == BLOCK_LEVELS - 1:  # the part below the diagonal
        return {part: n[part] if part == (0, 1) else zero for part in EVERY_PART}
    row = arith.shrui(thread.row, i32(level))
    odd = equal(arith.andi(row, i32(1)), i32(1))
    if level == 0:  # the left one of the two neighbours
        joins = arith.andi(odd, equal(arith.shrui(thread.row, i32(1)), thread.pair))
        kept = arith.select(joins, i32(0xFFFF), zero)
        select = lambda x: arith.andi(x, kept)
    else:
        column = arith.shrui(thread.pair, i32(level - 1))
        joins = arith.andi(odd, equal(arith.addi(column, i32(1)), row))
        select = lambda x: arith.select(joins, x, zero)
    return {
        (column, half): select(n[column, half]) if column == half else zero
        for column, half in EVERY_PART
    }


def _diagonal(thread: Thread) -> WarpMatrix:
    """The identity in float32."""
    f32 = ir.F32Type.get()
    pair = splat(0.0)
    for n in range(2):
        here = equal(thread.row, arith.addi(thread.column, i32(n)))
        element = arith.select(here, mosaic.c(1.0, f32), mosaic.c(0.0, f32))
        pair = with_element(pair, n, element)
    zero = splat(0.0)
    return {
        (column, half): pair if column == half else zero for column, half in EVERY_PART
    }


def _transposed(x: Scalar) -> Scalar:
    """The transpose of an 8 x 8 part, two float16 as i32."""
    word = ir.IntegerType.get_signless(32)
    text = "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;"
    # Every lane takes part, so no branch may enclose it.
    return llvm.inline_asm(word, [x], text, "=r,r", has_side_effects=True)


def _add(x: Vector, y16: Scalar) -> Vector:
    """x, two float32, + two float16 as i32."""
    y = utils.bitcast(y16, ir.VectorType.get((2,), ir.F16Type.get()))
    return arith.addf(x, arith.extf(ir.VectorType.get((2,), ir.F32Type.get()), y))


def _rounded(x: Vector) -> Scalar:
    """Two float32 as two float16, as i32."""
    half = arith.truncf(ir.VectorType.get((2,), ir.F16Type.get()), x)
    return utils.bitcast(half, ir.IntegerType.get_signless(32))
