"""Arrays in registers from and to global memory, with addresses from a new thread index for each move."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mosaic
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from jfla.pallas.context import interpreting
from jfla.pallas.mgpu.layouts import TILE_ROWS, WGMMA, WIDER, whole_rows
from jfla.pallas.mgpu.smem import F32
from jfla.pallas.mgpu.thread import (
    BLOCK_ROWS,
    HALVES,
    PART,
    WIDE_COLUMNS,
    WIDER_COLUMNS,
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
    Layout,
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


def load_rows_wide(source_gmem: Gmem, layout: Layout) -> Reg:
    """`load_rows` in the layout WIDE or WIDER, of columns in multiples of 16 or 32."""
    if interpreting():
        return source_gmem[...]
    shape = source_gmem.shape
    count = WIDER_COLUMNS if layout == WIDER else WIDE_COLUMNS
    out: Any = plgpu.ShapeDtypeStruct(shape, source_gmem.dtype, layout)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=out)
    def load(_: InlineContext, source: MemRef) -> Fragments:
        thread = Thread()
        if layout == WIDER:
            first = arith.muli(thread.pair, i32(WIDER_COLUMNS))
        else:
            first = thread.wide_column
        rows = _Rows(source, thread, first)
        registers = [
            rows.load(count, half, column)
            for column in range(0, shape[1], 4 * count)
            for half in range(HALVES)
        ]
        flat = np.array(registers, dtype=object)
        return mosaic.FragmentedArray(
            _registers=flat.reshape(layout.to_mgpu().registers_shape(shape)),
            _layout=layout.to_mgpu(),
            _is_signed=None,
        )

    return load(source_gmem)  # pyright: ignore[reportCallIssue]


def add_rows(sums: Reg, x: Reg) -> Reg:
    """Sums over rows [n, columns] and x [a multiple of n, columns], in the layout `whole_rows`: a register a thread.

    Every thread adds all of its rows of x to its row of `sums`.
    """
    rows, columns = sums.shape
    if interpreting():
        return sums + jnp.sum(x.reshape(-1, rows, columns), axis=0)
    layout = whole_rows(columns)
    out: Any = plgpu.ShapeDtypeStruct(sums.shape, sums.dtype, layout)

    @plgpu.inline_mgpu(arg_types=(layout, layout), return_type=out)
    def add(_: InlineContext, sums: Fragments, x: Fragments) -> Fragments:
        (total,) = sums.registers.flatten()
        for row in x.registers.flatten():
            total = arith.addf(total, row)
        return mosaic.FragmentedArray(
            _registers=np.array([total], dtype=object).reshape(sums.registers.shape),
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


def store_rows_transposed(x: Reg, rows_gmem: Gmem) -> None:
    """x [64, rows] to [rows, 64] in global memory."""
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
    memref = ir.MemRefType(rows.type)
    (stride, _), _ = memref.get_strides_and_offset()
    pointer = llvm.addrspacecast(
        llvm.PointerType.get(address_space=1), utils.memref_ptr(rows)
    )
    channel = multiply_add(thread.warp, BLOCK_ROWS, thread.row)
    element = memref.element_type
    base = pointer_at(pointer, multiply_add(thread.column, stride, channel), element)

    def address(column: int, half: int, n: int) -> Scalar:
        moved = (column * PART + n) * stride + half * PART
        return pointer_at(base, moved, element)

    return address
