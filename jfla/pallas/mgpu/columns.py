"""Arrays in registers cut into blocks of columns and put together again, and moved transposed to global memory.

Cutting and joining cost nothing: a thread has its part of every block of columns.
"""

import functools
from typing import Any

import jax.numpy as jnp
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from jfla.pallas.context import interpreting
from jfla.pallas.mgpu.layouts import TILE_ROWS, WGMMA
from jfla.pallas.mgpu.smem import F32
from jfla.pallas.mgpu.thread import (
    BLOCK_ROWS,
    PART,
    Fragments,
    Scalar,
    Thread,
    from_parts,
    multiply_add,
    parts,
    parts_of,
    pointer_at,
)
from jfla.pallas.mgpu.types import Gmem, Reg


def split_columns(x: Reg, columns: int) -> list[Reg]:
    """x [64, n * columns] as n arrays [64, columns]."""
    count = x.shape[1] // columns
    if interpreting():
        return [x[:, i * columns : (i + 1) * columns] for i in range(count)]
    out: Any = plgpu.ShapeDtypeStruct((TILE_ROWS, columns), x.dtype, WGMMA)

    @plgpu.inline_mgpu(arg_types=(WGMMA,), return_type=[out] * count)
    def split(_: Any, x: Fragments) -> list[Fragments]:
        registers = parts(x)

        def block(i: int) -> Fragments:
            first = i * columns // PART
            own = {(n, half): registers[first + n, half] for n, half in parts_of(columns)}
            return from_parts(own)

        return [block(i) for i in range(count)]

    return split(x)  # pyright: ignore[reportCallIssue]: the first argument is Mosaic's


def join_columns(blocks: list[Reg], count: int | None = None) -> Reg:
    """Arrays [64, columns] side by side; and zeros, where there are fewer than `count`."""
    count = count or len(blocks)
    columns = blocks[0].shape[1]
    shape = (TILE_ROWS, columns * count)
    if interpreting():
        joined = jnp.concatenate(blocks, axis=1)
        return jnp.pad(joined, ((0, 0), (0, shape[1] - joined.shape[1])))
    out: Any = plgpu.ShapeDtypeStruct(shape, blocks[0].dtype, WGMMA)

    @plgpu.inline_mgpu(arg_types=(WGMMA,) * len(blocks), return_type=out)
    def join(_: Any, *blocks: Fragments) -> Fragments:
        registers = {}
        for i, block in enumerate(blocks):
            for (n, half), register in parts(block).items():
                registers[i * columns // PART + n, half] = register
        zero = utils.c(0, next(iter(registers.values())).type)
        return from_parts({part: registers.get(part, zero) for part in parts_of(shape[1])})

    return join(*blocks)  # pyright: ignore[reportCallIssue]


def widened(x: Reg) -> Reg:
    """bf16 x in float32: two instructions a pair, where a cast takes three."""
    if interpreting():
        return x.astype(F32)
    out: Any = plgpu.ShapeDtypeStruct(x.shape, jnp.dtype(F32), WGMMA)

    @plgpu.inline_mgpu(arg_types=(WGMMA,), return_type=out)
    def widen(_: Any, x: Fragments) -> Fragments:
        i32 = ir.IntegerType.get_signless(32)
        pair_type = ir.VectorType.get((2,), ir.F32Type.get())

        def wide(pair: Any) -> Any:
            bits = llvm.bitcast(i32, pair)
            both = llvm.mlir_undef(ir.VectorType.get((2,), i32))
            low = arith.shli(bits, utils.c(16, i32))
            high = arith.andi(bits, utils.c(-65536, i32))
            for n, part in enumerate((low, high)):
                both = vector.insert(part, both, dynamic_position=[], static_position=[n])
            return vector.bitcast(pair_type, both)

        return from_parts({part: wide(pair) for part, pair in parts(x).items()})

    return widen(x)  # pyright: ignore[reportCallIssue]


def store_transposed_f32(x: Reg, rows_gmem: Gmem) -> None:
    """x [64, rows] float32 to [rows, 64] in global memory."""
    if interpreting():
        rows_gmem[...] = x.T
        return

    @plgpu.inline_mgpu(arg_types=(WGMMA, plgpu.RefType()))
    def store(_: Any, x: Fragments, rows: Any) -> None:
        address = _addresses(rows)
        for (column, half), register in parts(x).items():
            for n in range(2):
                element = vector.extract(register, dynamic_position=[], static_position=[n])
                llvm.store(element, address(column, half, n))

    store(x, rows_gmem)  # pyright: ignore[reportCallIssue]


def load_transposed_f32(rows_gmem: Gmem) -> Reg:
    """[64, rows] float32 of [rows, 64] in global memory, of what the same threads have stored."""
    if interpreting():
        return rows_gmem[...].T
    count = rows_gmem.shape[0]
    out: Any = plgpu.ShapeDtypeStruct((TILE_ROWS, count), jnp.dtype(F32), WGMMA)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=out)
    def load(_: Any, rows: Any) -> Fragments:
        address = _addresses(rows)
        f32 = ir.F32Type.get()
        undefined = llvm.mlir_undef(ir.VectorType.get((2,), f32))
        registers = {}
        for column, half in parts_of(count):
            pair = undefined
            for n in range(2):
                element = llvm.load(f32, address(column, half, n))
                pair = vector.insert(element, pair, dynamic_position=[], static_position=[n])
            registers[column, half] = pair
        return from_parts(registers)

    return load(rows_gmem)  # pyright: ignore[reportCallIssue]


def _addresses(rows: Any) -> Any:
    """Of element n of a thread's pair in a part: its place in the transposed array."""
    thread = Thread()
    f32 = ir.F32Type.get()
    (stride, _), _ = ir.MemRefType(rows.type).get_strides_and_offset()
    pointer = llvm.addrspacecast(llvm.PointerType.get(address_space=1), utils.memref_ptr(rows))
    channel = multiply_add(thread.warp, BLOCK_ROWS, thread.row)
    base = pointer_at(pointer, multiply_add(thread.column, stride, channel), f32)
    return functools.partial(_address, base, stride)


def _address(base: Scalar, stride: int, column: int, half: int, n: int) -> Scalar:
    moved = (column * PART + n) * stride + half * PART
    return pointer_at(base, moved, ir.F32Type.get())
