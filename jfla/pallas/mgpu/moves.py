"""Arrays in registers from global memory, and to tiles of 16 bits in shared memory as they lie or transposed.

Addresses follow from a thread index that is read anew for each move. LLVM would hoist what follows from the same index
out of the loop over chunks, and ptxas would spill it.

The stores have no barriers: everything that was read there must have been committed, and so must be what is written
before it is read.
"""

import functools
from typing import Any

import jax.numpy as jnp
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from jfla.pallas.context import interpreting
from jfla.pallas.mgpu.layouts import TILE_ROWS, WGMMA, WIDE
from jfla.pallas.mgpu.smem import F32, SWIZZLE_BYTES, tile_transforms
from jfla.pallas.mgpu.thread import (
    BLOCK_ROWS,
    HALVES,
    NUM_WARPS,
    PART,
    Thread,
    element_of,
    from_parts,
    i32,
    multiply_add,
    parts,
    parts_of,
    pointer_at,
    with_element,
)
from jfla.pallas.mgpu.types import (
    Fragments,
    Gmem,
    InlineContext,
    MemRef,
    Reg,
    Scalar,
    Smem,
)

# Eight neighbours of a row; the swizzle exchanges the vectors of a row.
VECTOR_BYTES = 16
VECTORS = SWIZZLE_BYTES // VECTOR_BYTES  # of a row of 64 columns


def store_matrix(
    tile_smem: Smem,
    x: Reg,
    transpose: bool = False,
    positions: tuple[int, ...] = tuple(range(NUM_WARPS)),
) -> None:
    """x [64, columns] to a tile, or x^T to one of 64 columns, by stmatrix; columns are a multiple of 16.

    Block w of 16 rows of x, which is a warp's, goes to the rows of block `positions[w]`.
    """

    @plgpu.inline_mgpu(arg_types=(WGMMA, _tile_type(tile_smem)))
    def store(_: InlineContext, x: Fragments, tile: MemRef) -> None:
        thread = Thread()
        # A lane has the address of a row of one of four parts of 8 x 8: of two halves, of two neighbours.
        row = arith.remui(thread.lane, i32(PART))
        part = arith.divui(thread.lane, i32(PART))
        half = arith.remui(part, i32(HALVES))
        second = arith.divui(part, i32(HALVES))
        address = _Addresses(tile, row)
        registers = parts(x)
        for column in range(0, x.shape[1] // PART, 2):
            four = [registers[column + n, h] for n in range(2) for h in range(HALVES)]
            if transpose:
                vector_number = multiply_add(thread.warp, HALVES, half)
                place = address.of(arith.addi(second, i32(column)), vector_number)
            else:
                column_tile, first = divmod(column, VECTORS)
                rows = multiply_add(thread.of_warp(positions), HALVES, half)
                place = address.of(rows, arith.addi(second, i32(first)), column_tile)
            _stmatrix(place, four, ".trans" if transpose else "")

    store(x, tile_smem)  # pyright: ignore[reportCallIssue]: the first argument is Mosaic's


def store_wide(tile_smem: Smem, x: Reg) -> None:
    """x [64, 64] in the layout WIDE to a tile."""

    @plgpu.inline_mgpu(arg_types=(WIDE, _tile_type(tile_smem)))
    def store(_: InlineContext, x: Fragments, tile: MemRef) -> None:
        thread = Thread()
        # Four threads have 16 columns of a row, two vectors: a half vector each.
        vector_of_two = arith.remui(thread.pair, i32(2))
        half_of_vector = arith.divui(thread.pair, i32(2))
        address = _Addresses(tile, thread.row)
        byte = arith.muli(half_of_vector, i32(VECTOR_BYTES // 2))
        for n, register in enumerate(x.registers.flatten()):
            column, half = divmod(n, HALVES)
            rows = multiply_add(thread.warp, HALVES, i32(half))
            place = address.of(rows, arith.addi(vector_of_two, i32(2 * column)))
            llvm.store(register, pointer_at(place, byte, address.byte))

    store(x, tile_smem)  # pyright: ignore[reportCallIssue]


def load_rows(source_gmem: Gmem) -> Reg:
    """[64, columns] of global memory, whose rows are contiguous."""
    if interpreting():
        return source_gmem[...]
    shape = source_gmem.shape
    out: Any = plgpu.ShapeDtypeStruct(shape, source_gmem.dtype, WGMMA)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=out)
    def load(_: InlineContext, source: MemRef) -> Fragments:
        thread = Thread()
        memref = ir.MemRefType(source.type)
        (stride, _), _ = memref.get_strides_and_offset()
        element = memref.element_type
        pair = ir.VectorType.get((2,), element)
        pointer = llvm.addrspacecast(
            llvm.PointerType.get(address_space=1), utils.memref_ptr(source)
        )
        row = multiply_add(thread.warp, BLOCK_ROWS, thread.row)
        first = pointer_at(pointer, multiply_add(row, stride, thread.column), element)
        registers = {}
        for column, half in parts_of(shape[1]):
            place = pointer_at(first, half * PART * stride + column * PART, element)
            registers[column, half] = llvm.load(pair, place)
        return from_parts(registers)

    return load(source_gmem)  # pyright: ignore[reportCallIssue]


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


def load_transposed_f32(rows_gmem: Gmem) -> Reg:
    """[64, rows] float32 of [rows, 64] in global memory, of what the same threads have stored."""
    if interpreting():
        return rows_gmem[...].T
    count = rows_gmem.shape[0]
    out: Any = plgpu.ShapeDtypeStruct((TILE_ROWS, count), jnp.dtype(F32), WGMMA)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=out)
    def load(_: InlineContext, rows: MemRef) -> Fragments:
        address = _transposed_addresses(rows)
        f32 = ir.F32Type.get()
        undefined = llvm.mlir_undef(ir.VectorType.get((2,), f32))
        registers = {}
        for column, half in parts_of(count):
            pair = undefined
            for n in range(2):
                element = llvm.load(f32, address(column, half, n))
                pair = with_element(pair, n, element)
            registers[column, half] = pair
        return from_parts(registers)

    return load(rows_gmem)  # pyright: ignore[reportCallIssue]


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


class _Addresses:
    """Of vectors in row `row` of eight of a tile, whose vectors the swizzle exchanges by that number."""

    def __init__(self, tile: MemRef, row: Scalar) -> None:
        self.byte = ir.IntegerType.get_signless(8)
        (self._rows, self._columns, *_), _ = ir.MemRefType(
            tile.type
        ).get_strides_and_offset()
        self._row = row
        self._base = pointer_at(
            utils.memref_ptr(tile), arith.muli(row, i32(SWIZZLE_BYTES)), self.byte
        )

    def of(self, rows: Scalar, number: Scalar, column_tile: int = 0) -> Scalar:
        """`rows` counts eight rows, `number` the vectors of a row."""
        swizzled = arith.muli(arith.xori(number, self._row), i32(VECTOR_BYTES))
        first = i32(2 * column_tile * self._columns)
        offset = arith.addi(multiply_add(rows, 2 * self._rows, swizzled), first)
        return pointer_at(self._base, offset, self.byte)


def _tile_type(tile_smem: Smem) -> Any:
    return plgpu.RefType(tile_transforms(tile_smem.dtype))


def _stmatrix(pointer: Scalar, matrices: list[Any], suffix: str) -> None:
    i32_type = ir.IntegerType.get_signless(32)
    registers = [llvm.bitcast(i32_type, x) for x in matrices]
    llvm.inline_asm(
        ir.Type.parse("!llvm.void"),
        [pointer, *registers],
        f"stmatrix.sync.aligned.m8n8.x4{suffix}.shared.b16 [$0], {{$1, $2, $3, $4}};",
        "l,r,r,r,r,~{memory}",
        has_side_effects=True,
    )
