"""Arrays in registers from global memory, and to tiles of 16 bits in shared memory as they lie or transposed.

Addresses follow from a thread index that is read anew for each move. LLVM would hoist what follows from the same index
out of the loop over chunks, and ptxas would spill it.

The stores have no barriers: everything that was read there must have been committed, and so must be what is written
before it is read.
"""

from typing import Any

from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from jfla.pallas.mgpu.layouts import WGMMA, WIDE
from jfla.pallas.mgpu.smem import SWIZZLE_BYTES, tile_transforms
from jfla.pallas.mgpu.thread import (
    BLOCK_ROWS,
    HALVES,
    NUM_WARPS,
    PART,
    Fragments,
    Scalar,
    Thread,
    from_parts,
    i32,
    multiply_add,
    parts,
    parts_of,
    pointer_at,
)
from jfla.pallas.mgpu.types import Gmem, Reg, Smem

CHUNK_BYTES = 16  # eight neighbours of a row; the swizzle exchanges the chunks of a row
CHUNKS = SWIZZLE_BYTES // CHUNK_BYTES


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
    def store(_: Any, x: Fragments, tile: Any) -> None:
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
                chunk = multiply_add(thread.warp, HALVES, half)
                place = address.of(arith.addi(second, i32(column)), chunk)
            else:
                column_tile, first = divmod(column, CHUNKS)
                rows = multiply_add(thread.of_warp(positions), HALVES, half)
                place = address.of(rows, arith.addi(second, i32(first)), column_tile)
            _stmatrix(place, four, ".trans" if transpose else "")

    store(x, tile_smem)  # pyright: ignore[reportCallIssue]: the first argument is Mosaic's


def store_wide(tile_smem: Smem, x: Reg) -> None:
    """x [64, 64] in the layout WIDE to a tile."""

    @plgpu.inline_mgpu(arg_types=(WIDE, _tile_type(tile_smem)))
    def store(_: Any, x: Fragments, tile: Any) -> None:
        thread = Thread()
        # Of two chunks a thread has the first or the second half of the first or the second.
        chunk_of_two = arith.remui(thread.pair, i32(2))
        half_of_chunk = arith.divui(thread.pair, i32(2))
        address = _Addresses(tile, thread.row)
        byte = arith.muli(half_of_chunk, i32(CHUNK_BYTES // 2))
        for n, register in enumerate(x.registers.flatten()):
            column, half = divmod(n, HALVES)
            rows = multiply_add(thread.warp, HALVES, i32(half))
            place = address.of(rows, arith.addi(chunk_of_two, i32(2 * column)))
            llvm.store(register, pointer_at(place, byte, address.byte))

    store(x, tile_smem)  # pyright: ignore[reportCallIssue]


def load_rows(source_gmem: Gmem) -> Reg:
    """[64, columns] of global memory, whose rows are contiguous."""
    shape = source_gmem.shape
    out: Any = plgpu.ShapeDtypeStruct(shape, source_gmem.dtype, WGMMA)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=out)
    def load(_: Any, source: Any) -> Fragments:
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


class _Addresses:
    """Of chunks in row `row` of eight of a tile, whose chunks the swizzle exchanges by that number."""

    def __init__(self, tile: Any, row: Scalar) -> None:
        self.byte = ir.IntegerType.get_signless(8)
        (self._rows, self._columns, *_), _ = ir.MemRefType(tile.type).get_strides_and_offset()
        self._row = row
        self._base = pointer_at(
            utils.memref_ptr(tile), arith.muli(row, i32(SWIZZLE_BYTES)), self.byte
        )

    def of(self, rows: Scalar, chunk: Scalar, column_tile: int = 0) -> Scalar:
        """`rows` counts eight rows, `chunk` eight of the tile's columns."""
        swizzled = arith.muli(arith.xori(chunk, self._row), i32(CHUNK_BYTES))
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
