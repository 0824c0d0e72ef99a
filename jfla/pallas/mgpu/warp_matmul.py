"""Products of 16 x 16 matrices, each by a warp in its registers with mma.sync.

The left operand lies as an accumulator does, rounded; the right operand lies as the transpose of an accumulator. So a
warp that has 16 rows of two tiles multiplies them, the second one transposed, and no element leaves its thread.
"""

from typing import Any

import jax.numpy as jnp
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from jfla.pallas.context import interpreting
from jfla.pallas.mgpu.layouts import WGMMA
from jfla.pallas.mgpu.smem import BF16, F32
from jfla.pallas.mgpu.thread import (
    BLOCK_ROWS,
    HALVES,
    NUM_WARPS,
    PART,
    element_of,
    from_parts,
    parts,
    with_element,
)
from jfla.pallas.mgpu.types import Fragments, InlineContext, Reg, Scalar, Vector

# A thread's share of a 16 x 16 matrix by (column of parts, half): two float32, or two elements of 16 bits as i32.
WarpMatrix = dict[tuple[int, int], Any]
EVERY_PART = [(column, half) for column in range(2) for half in range(HALVES)]

SUMMED_PARTS = 2  # columns of parts that a product sums over


def add_block_products(acc: Reg, left: Reg, rights: tuple[Reg, ...]) -> Reg:
    """acc [64, 16 n] float32 + left_w @ right_w^T of every block w of 16 rows, for n rights side by side.

    left and rights are [64, channels] of 16 bits.
    """
    if interpreting():
        blocks = (NUM_WARPS, BLOCK_ROWS, -1)
        left_blocks = left.astype(F32).reshape(blocks)
        products = [
            jnp.einsum(
                "wik,wjk->wij",
                left_blocks,
                right.astype(F32).reshape(blocks),
                precision="highest",
            )
            for right in rights
        ]
        return acc + jnp.concatenate(products, axis=-1).reshape(acc.shape)
    out: Any = plgpu.ShapeDtypeStruct(acc.shape, acc.dtype, WGMMA)
    element = "bf16" if left.dtype == BF16 else "f16"

    @plgpu.inline_mgpu(arg_types=(WGMMA,) * (2 + len(rights)), return_type=out)
    def add(
        _: InlineContext, acc: Fragments, left: Fragments, *rights: Fragments
    ) -> Fragments:
        sums = parts(acc)
        left_parts = _words(left)
        for n, right in enumerate(rights):
            right_parts = _words(right)
            first = n * BLOCK_ROWS // PART
            total = {(i, half): sums[first + i, half] for i, half in EVERY_PART}
            for k in range(0, left.shape[1] // PART, SUMMED_PARTS):
                a = {(i, half): left_parts[k + i, half] for i, half in EVERY_PART}
                b = {(i, half): right_parts[k + i, half] for i, half in EVERY_PART}
                total = multiply(total, a, b, element)
            for i, half in EVERY_PART:
                sums[first + i, half] = total[i, half]
        return from_parts(sums)

    return add(acc, left, *rights)  # pyright: ignore[reportCallIssue]: the first argument is Mosaic's


def multiply(
    acc: WarpMatrix, a: WarpMatrix, b_transposed: WarpMatrix, element: str = "f16"
) -> WarpMatrix:
    """acc + a @ b of 16 x 16 matrices: acc float32; a and b^T two elements as i32."""
    left = [a[0, 0], a[0, 1], a[1, 0], a[1, 1]]
    out = {}
    for column in range(2):
        right = [b_transposed[0, column], b_transposed[1, column]]
        sums = [
            element_of(acc[column, half], n) for half in range(HALVES) for n in range(2)
        ]
        results = mma_m16n8k16(left, right, sums, element)
        for half in range(HALVES):
            out[column, half] = pair(*results[2 * half : 2 * half + 2])
    return out


def splat(value: float) -> Vector:
    """Two float32."""
    return utils.c(value, ir.VectorType.get((2,), ir.F32Type.get()))


def pair(first: Scalar, second: Scalar) -> Vector:
    """The two float32 as a vector."""
    return with_element(with_element(splat(0.0), 0, first), 1, second)


def _words(x: Fragments) -> WarpMatrix:
    word = ir.IntegerType.get_signless(32)
    return {part: utils.bitcast(register, word) for part, register in parts(x).items()}


def mma_m16n8k16(
    a: list[Scalar], b: list[Scalar], acc: list[Scalar], element: str
) -> list[Scalar]:
    """[16, 8] += [16, 16] @ [16, 8] of a warp."""
    f32 = ir.F32Type.get()
    text = (
        f"mma.sync.aligned.m16n8k16.row.col.f32.{element}.{element}.f32 "
        "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};"
    )
    result = llvm.inline_asm(
        llvm.StructType.get_literal([f32] * 4),
        [*a, *b, *acc],
        text,
        ",".join(["=f"] * 4 + ["r"] * 6 + ["f"] * 4),
        has_side_effects=False,
    )
    return [llvm.extractvalue(f32, result, [n]) for n in range(4)]
