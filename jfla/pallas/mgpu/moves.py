"""Arrays in registers from and to global memory, with addresses from a new thread index for each move."""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mosaic
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from jfla.pallas.context import interpreting
from jfla.pallas.mgpu.layouts import TILE_ROWS, WGMMA, WIDE
from jfla.pallas.mgpu.smem import F32
from jfla.pallas.mgpu.thread import (
    BLOCK_ROWS,
    HALVES,
    PART,
    WIDE_COLUMNS,
    Thread,
    element_of,
    from_parts,
    i32,
    multiply_add,
    parts,
    parts_of,
    pointer_at,
)
from jfla.pallas.mgpu.types import (
    Fragments,
    Gmem,
    InlineContext,
    MemRef,
    Reg,
    Scalar,
    Vector,
)


def load_rows(source_gmem: Gmem) -> Reg:
    """[64, columns] of global memory, whose rows are contiguous."""
    if interpreting():
        return source_gmem[...]
    shape = source_gmem.shape
    out: Any = plgpu.ShapeDtypeStruct(shape, source_gmem.dtype, WGMMA)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=out)
    def load(_: InlineContext, source: MemRef) -> Fragments:
        thread = Thread()
        rows = _Rows(source, thread, thread.column)
        registers = {
            (column, half): rows.load(2, half, column * PART)
            for column, half in parts_of(shape[1])
        }
        return from_parts(registers)

    return load(source_gmem)  # pyright: ignore[reportCallIssue]


def load_rows_wide(source_gmem: Gmem) -> Reg:
    """`load_rows` in the layout WIDE, of columns in multiples of 16."""
    if interpreting():
        return source_gmem[...]
    shape = source_gmem.shape
    out: Any = plgpu.ShapeDtypeStruct(shape, source_gmem.dtype, WIDE)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=out)
    def load(_: InlineContext, source: MemRef) -> Fragments:
        thread = Thread()
        rows = _Rows(source, thread, thread.wide_column)
        layout = mosaic.WGMMA_LAYOUT_UPCAST_2X
        registers = [
            rows.load(WIDE_COLUMNS, half, column)
            for column in range(0, shape[1], 4 * WIDE_COLUMNS)
            for half in range(HALVES)
        ]
        flat = np.array(registers, dtype=object)
        return mosaic.FragmentedArray(
            _registers=flat.reshape(layout.registers_shape(shape)),
            _layout=layout,
            _is_signed=None,
        )

    return load(source_gmem)  # pyright: ignore[reportCallIssue]


def add_halves(sums: Reg, x: Reg) -> Reg:
    """Sums of columns so far and x [64, columns], both in the layout WIDE: what they add up to over rows is right.

    Of a thread's two rows the second is added to the first, so that the sums take half the registers.
    """
    if interpreting():
        return sums + x
    out: Any = plgpu.ShapeDtypeStruct(x.shape, x.dtype, WIDE)

    @plgpu.inline_mgpu(arg_types=(WIDE, WIDE), return_type=out)
    def add(_: InlineContext, sums: Fragments, x: Fragments) -> Fragments:
        total = sums.registers.flatten()
        rows = x.registers.flatten()
        for n in range(0, len(rows), HALVES):
            total[n] = arith.addf(total[n], arith.addf(rows[n], rows[n + 1]))
        return mosaic.FragmentedArray(
            _registers=total.reshape(sums.registers.shape),
            _layout=sums.layout,
            _is_signed=None,
        )

    return add(sums, x)  # pyright: ignore[reportCallIssue]: the first argument is Mosaic's


class _Rows:
    """A thread's rows of an array in global memory, from one of its columns on."""

    def __init__(self, source: MemRef, thread: Thread, column: Scalar) -> None:
        memref = ir.MemRefType(source.type)
        (self._stride, _), _ = memref.get_strides_and_offset()
        self._element = memref.element_type
        pointer = llvm.addrspacecast(
            llvm.PointerType.get(address_space=1), utils.memref_ptr(source)
        )
        row = multiply_add(thread.warp, BLOCK_ROWS, thread.row)
        offset = multiply_add(row, self._stride, column)
        self._first = pointer_at(pointer, offset, self._element)

    def load(self, count: int, half: int, column: int) -> Vector:
        """So many neighbours of a row of that half, `column` columns on."""
        vector = ir.VectorType.get((count,), self._element)
        offset = half * PART * self._stride + column
        return llvm.load(vector, pointer_at(self._first, offset, self._element))


def store_transposed_f32(x: Reg, rows_gmem: Gmem) -> None:
    """x [64, rows] float32 to [rows, 64] in global memory."""
    if interpreting():
        rows_gmem[...] = x.T
        return

    @plgpu.inline_mgpu(arg_types=(WGMMA, plgpu.RefType()))
    def store(_: InlineContext, x: Fragments, rows: MemRef) -> None:
        address = _transposed_addresses(rows)
        for (column, half), register in parts(x).items():
            for n in range(2):
                llvm.store(element_of(register, n), address(column, half, n))

    store(x, rows_gmem)  # pyright: ignore[reportCallIssue]


def store_scratch(x: Reg, rows_gmem: Gmem) -> None:
    """x [64, 64] float32 to scratch in global memory of that shape, from which each thread can load what it has stored.

    A thread stores four of its elements at once, and so the elements are not in the array's order. Before any thread
    stores results over the scratch, all threads must have loaded theirs: else one would load a result.
    """
    if interpreting():
        rows_gmem[...] = x
        return

    @plgpu.inline_mgpu(arg_types=(WGMMA, plgpu.RefType()))
    def store(_: InlineContext, x: Fragments, rows: MemRef) -> None:
        registers = parts(x)
        for column, address in enumerate(_scratch_addresses(rows)):
            upper, lower = (registers[column, half] for half in range(HALVES))
            four = vector.shuffle(upper, lower, [0, 1, 2, 3])
            llvm.store(four, address)

    store(x, rows_gmem)  # pyright: ignore[reportCallIssue]


def load_scratch(rows_gmem: Gmem) -> Reg:
    """[64, 64] float32: what `store_scratch` of the same threads has stored there."""
    if interpreting():
        return rows_gmem[...]
    out: Any = plgpu.ShapeDtypeStruct(rows_gmem.shape, jnp.dtype(F32), WGMMA)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=out)
    def load(_: InlineContext, rows: MemRef) -> Fragments:
        vector_type = ir.VectorType.get((2 * HALVES,), ir.F32Type.get())
        registers = {}
        for column, address in enumerate(_scratch_addresses(rows)):
            four = llvm.load(vector_type, address)
            for half in range(HALVES):
                pair = [2 * half, 2 * half + 1]
                registers[column, half] = vector.shuffle(four, four, pair)
        return from_parts(registers)

    return load(rows_gmem)  # pyright: ignore[reportCallIssue]


def _scratch_addresses(rows: MemRef) -> list[Scalar]:
    """Where a thread's four elements of every column of parts go: 16 lanes share a line."""
    thread = Thread()
    f32 = ir.F32Type.get()
    (stride, _), _ = ir.MemRefType(rows.type).get_strides_and_offset()
    pointer = llvm.addrspacecast(
        llvm.PointerType.get(address_space=1), utils.memref_ptr(rows)
    )
    lanes = TILE_ROWS // (2 * HALVES)  # of a row
    line = multiply_add(thread.warp, BLOCK_ROWS, arith.divui(thread.lane, i32(lanes)))
    place = arith.muli(arith.remui(thread.lane, i32(lanes)), i32(2 * HALVES))
    first = pointer_at(pointer, multiply_add(line, stride, place), f32)
    lines = 32 // lanes  # of an access of a warp
    return [
        pointer_at(first, n * lines * stride, f32) for n in range(TILE_ROWS // PART)
    ]


def _transposed_addresses(rows: Any) -> Any:
    """Of element n of a thread's pair in a part: its place in the transposed array."""
    thread = Thread()
    f32 = ir.F32Type.get()
    (stride, _), _ = ir.MemRefType(rows.type).get_strides_and_offset()
    pointer = llvm.addrspacecast(
        llvm.PointerType.get(address_space=1), utils.memref_ptr(rows)
    )
    channel = multiply_add(thread.warp, BLOCK_ROWS, thread.row)
    base = pointer_at(pointer, multiply_add(thread.column, stride, channel), f32)
    return functools.partial(_transposed_address, base, stride)


def _transposed_address(
    base: Scalar, stride: int, column: int, half: int, n: int
) -> Scalar:
    moved = (column * PART + n) * stride + half * PART
    return pointer_at(base, moved, ir.F32Type.get())
