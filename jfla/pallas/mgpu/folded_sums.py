"""Sums over the rows of two arrays by one matmul, for which a tile of shared memory has room for both.

In every 16 rows a warp has two parts of 8, one over the other. They are added first, and of two arrays [64, columns]
[64, columns] is left: the first array's sums where the upper parts were, the second's in the place of the lower ones.
"""

from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import arith

from jfla.pallas.context import interpreting
from jfla.pallas.mgpu.layouts import TILE_ROWS, WGMMA
from jfla.pallas.mgpu.mma import filled
from jfla.pallas.mgpu.smem import BF16, F32
from jfla.pallas.mgpu.thread import HALVES, NUM_WARPS, PART, from_parts, parts
from jfla.pallas.mgpu.types import Fragments, Index, InlineContext, Reg

_HALVED = (NUM_WARPS, HALVES, PART, -1)  # of [64, columns]


def fold(upper: Reg, lower: Reg) -> Reg:
    """[64, columns] float32 of two such arrays."""
    if interpreting():
        sums = [x.reshape(_HALVED).sum(axis=1) for x in (upper, lower)]
        return jnp.stack(sums, axis=1).reshape(upper.shape)
    out: Any = plgpu.ShapeDtypeStruct(upper.shape, jnp.dtype(F32), WGMMA)

    @plgpu.inline_mgpu(arg_types=(WGMMA, WGMMA), return_type=out)
    def add(_: InlineContext, *arrays: Fragments) -> Fragments:
        both = [parts(x) for x in arrays]
        return from_parts(
            {
                (column, half): arith.addf(both[half][column, 0], both[half][column, 1])
                for column, half in both[0]
            }
        )

    return add(upper, lower)  # pyright: ignore[reportCallIssue]: the first argument is Mosaic's


def fold_selector(one: Index) -> Reg:
    """[64, 64] bf16, the left operand to a folded right one: the sums over the rows of either array, in all its rows.

    `one` is a 1 that LLVM does not know: a matrix that it knows would be made too late for the tensor cores.
    """
    ones = (filled(TILE_ROWS, TILE_ROWS, 0.0) + one.astype(F32)).astype(BF16)
    if interpreting():
        half = jnp.arange(TILE_ROWS) // PART % HALVES
        return jnp.where(half[:, None] == half[None], ones, 0)
    out: Any = plgpu.ShapeDtypeStruct(ones.shape, jnp.dtype(BF16), WGMMA)

    @plgpu.inline_mgpu(arg_types=(WGMMA, WGMMA), return_type=out)
    def select(_: InlineContext, ones: Fragments, zeros: Fragments) -> Fragments:
        none = parts(zeros)
        return from_parts(
            {
                (column, half): x if column % HALVES == half else none[column, half]
                for (column, half), x in parts(ones).items()
            }
        )

    zeros = filled(TILE_ROWS, TILE_ROWS, 0.0).astype(BF16)
    return select(ones, zeros)  # pyright: ignore[reportCallIssue]


def unfold(sums: Reg) -> list[Reg]:
    """Of what `fold_selector` gave, [64, columns] of the first array and of the second: all rows are alike."""
    if interpreting():
        halves = sums.reshape(_HALVED)
        return [
            jnp.stack([halves[:, n]] * HALVES, axis=1).reshape(sums.shape)
            for n in range(HALVES)
        ]
    out: Any = plgpu.ShapeDtypeStruct(sums.shape, jnp.dtype(F32), WGMMA)

    @plgpu.inline_mgpu(arg_types=(WGMMA,), return_type=[out] * HALVES)
    def split(_: InlineContext, sums: Fragments) -> list[Fragments]:
        registers = parts(sums)
        return [
            from_parts(
                {(column, half): registers[column, n] for column, half in registers}
            )
            for n in range(HALVES)
        ]

    return split(sums)  # pyright: ignore[reportCallIssue]
