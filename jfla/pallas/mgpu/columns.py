"""Arrays in registers cut into blocks of columns, put together again, and widened to float32, within a thread.

Cutting and joining cost nothing: a thread has its part of every block of columns.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mosaic
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from jfla.pallas.context import interpreting
from jfla.pallas.mgpu.layouts import TILE_ROWS, WGMMA
from jfla.pallas.mgpu.smem import BF16, F32
from jfla.pallas.mgpu.thread import (
    PART,
    element_of,
    from_parts,
    parts,
    parts_of,
    with_element,
)
from jfla.pallas.mgpu.types import Fragments, InlineContext, Layout, Reg, Vector


def split_columns(x: Reg, columns: int) -> list[Reg]:
    """x [64, n * columns] as n arrays [64, columns]."""
    count = x.shape[1] // columns
    if interpreting():
        return [x[:, i * columns : (i + 1) * columns] for i in range(count)]
    out: Any = plgpu.ShapeDtypeStruct((TILE_ROWS, columns), x.dtype, WGMMA)

    @plgpu.inline_mgpu(arg_types=(WGMMA,), return_type=[out] * count)
    def split(_: InlineContext, x: Fragments) -> list[Fragments]:
        registers = parts(x)

        def block(i: int) -> Fragments:
            first = i * columns // PART
            own = {
                (n, half): registers[first + n, half] for n, half in parts_of(columns)
            }
            return from_parts(own)

        return [block(i) for i in range(count)]

    return split(x)  # pyright: ignore[reportCallIssue]: the first argument is Mosaic's


def join_columns(blocks: list[Reg], count: int | None = None, first: int = 0) -> Reg:
    """Arrays [64, columns] side by side, with zeros in the place of `first` before them, `count` in all."""
    count = count or len(blocks)
    columns = blocks[0].shape[1]
    shape = (TILE_ROWS, columns * count)
    if interpreting():
        joined = jnp.concatenate(blocks, axis=1)
        before = first * columns
        return jnp.pad(joined, ((0, 0), (before, shape[1] - before - joined.shape[1])))
    out: Any = plgpu.ShapeDtypeStruct(shape, blocks[0].dtype, WGMMA)

    @plgpu.inline_mgpu(arg_types=(WGMMA,) * len(blocks), return_type=out)
    def join(_: InlineContext, *blocks: Fragments) -> Fragments:
        registers = {}
        for i, block in enumerate(blocks, start=first):
            for (n, half), register in parts(block).items():
                registers[i * columns // PART + n, half] = register
        zero = utils.c(0, next(iter(registers.values())).type)
        return from_parts(
            {part: registers.get(part, zero) for part in parts_of(shape[1])}
        )

    return join(*blocks)  # pyright: ignore[reportCallIssue]


def widened(x: Reg, layout: Layout = WGMMA) -> Reg:
    """x in float32; of bf16 by two instructions a pair, where a cast takes three."""
    if interpreting() or x.dtype != BF16:
        return x.astype(F32)
    out: Any = plgpu.ShapeDtypeStruct(x.shape, jnp.dtype(F32), layout)

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=out)
    def widen(_: InlineContext, x: Fragments) -> Fragments:
        registers = [_widened_vector(register) for register in x.registers.flatten()]
        flat = np.array(registers, dtype=object)
        return mosaic.FragmentedArray(
            _registers=flat.reshape(x.registers.shape),
            _layout=x.layout,
            _is_signed=None,
        )

    return widen(x)  # pyright: ignore[reportCallIssue]


def _widened_vector(x: Vector) -> Vector:
    """A vector of an even number of bf16 in float32."""
    (size,) = ir.VectorType(x.type).shape
    i32 = ir.IntegerType.get_signless(32)
    pairs = vector.bitcast(ir.VectorType.get((size // 2,), i32), x)
    wide = llvm.mlir_undef(ir.VectorType.get((size,), i32))
    for n in range(size // 2):
        bits = element_of(pairs, n)
        low = arith.shli(bits, utils.c(16, i32))
        high = arith.andi(bits, utils.c(-65536, i32))
        wide = with_element(wide, 2 * n, low)
        wide = with_element(wide, 2 * n + 1, high)
    return vector.bitcast(ir.VectorType.get((size,), ir.F32Type.get()), wide)
