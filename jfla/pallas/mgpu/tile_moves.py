"""Tiles of 16 bits in shared memory from and to registers, as they lie or transposed, and where their parts lie.

Addresses follow from a new thread index for each move (`new_thread_idx`). LLVM would hoist what follows from a shared
index out of the loop over chunks, and ptxas would spill it.

The stores have no barriers: everything that was read there must have been committed, and so must be what is written
before it is read.
"""

from collections.abc import Callable
from typing import Any

from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from jfla.pallas.context import interpreting
from jfla.pallas.mgpu.layouts import TILE_ROWS, WGMMA, WIDER
from jfla.pallas.mgpu.smem import SWIZZLE_BYTES, tile_transforms
from jfla.pallas.mgpu.thread import (
    HALVES,
    NUM_WARPS,
    PART,
    Thread,
    element_of,
    from_parts,
    i32,
    multiply_add,
    parts,
    pointer_at,
)
from jfla.pallas.mgpu.types import (
    Fragments,
    InlineContext,
    Layout,
    MemRef,
    Reg,
    Scalar,
    Smem,
)

# Eight neighbours of a row; the swizzle exchanges the vectors of a row.
VECTOR_BYTES = 16
VECTORS = SWIZZLE_BYTES // VECTOR_BYTES  # of a row of 64 columns
_ELEMENT_BYTES = 2


class MatrixLane:
    """The row of 8 x 8 elements whose address a lane gives to stmatrix or ldmatrix, which move four such parts.

    They are two halves, one over the other, of two neighbours.
    """

    def __init__(self, thread: Thread) -> None:
        part = arith.divui(thread.lane, i32(PART))
        self.row = arith.remui(thread.lane, i32(PART))
        self.half = arith.remui(part, i32(HALVES))
        self.neighbour = arith.divui(part, i32(HALVES))


class TileAddresses:
    """Of vectors in row `row` of eight of a tile, whose vectors the swizzle exchanges by that number."""

    def __init__(self, tile: MemRef, row: Scalar) -> None:
        self._byte = ir.IntegerType.get_signless(8)
        (rows, columns, *_), _ = ir.MemRefType(tile.type).get_strides_and_offset()
        self._rows_bytes = _ELEMENT_BYTES * rows
        self._tile_bytes = _ELEMENT_BYTES * columns
        self._row = row
        self._base = pointer_at(
            utils.memref_ptr(tile), arith.muli(row, i32(SWIZZLE_BYTES)), self._byte
        )

    def of(
        self,
        rows: Scalar,
        number: Scalar,
        first_rows: int = 0,
        first_number: int = 0,
        byte: Scalar | None = None,
    ) -> Scalar:
        """Of vector `first_number | number` in a row of the eight rows `first_rows + rows`, or of one of its bytes.

        Vectors are counted through all tiles of 64 columns.
        """
        column_tile, first_number = divmod(first_number, VECTORS)
        swizzled = arith.muli(arith.xori(number, self._row), i32(VECTOR_BYTES))
        swizzled = arith.xori(swizzled, i32(first_number * VECTOR_BYTES))
        offset = multiply_add(rows, self._rows_bytes, swizzled)
        if byte is not None:
            offset = arith.addi(offset, byte)
        place = pointer_at(self._base, offset, self._byte)
        # Last, so that it becomes part of the instruction.
        known = first_rows * self._rows_bytes + column_tile * self._tile_bytes
        return pointer_at(place, known, self._byte)


def load_matrix(tile_smem: Smem, first: int = 0, columns: int = TILE_ROWS) -> Reg:
    """[64, columns] of a tile, from column `first` on, by ldmatrix; both are multiples of 16."""
    if interpreting():
        return tile_smem[:, first : first + columns]

    def place(address: TileAddresses, thread: Thread, column: int) -> Scalar:
        lane = MatrixLane(thread)
        rows = multiply_add(thread.warp, HALVES, lane.half)
        number = first // PART + column
        return address.of(rows, lane.neighbour, first_number=number)

    return _load_parts(tile_smem, columns, place)


def load_matrix_transposed(rows_smem: Smem) -> Reg:
    """The transpose [64, rows] of rows of a tile of 64 columns, by ldmatrix; rows are a multiple of 16."""
    if interpreting():
        return rows_smem[...].T

    def place(address: TileAddresses, thread: Thread, column: int) -> Scalar:
        lane = MatrixLane(thread)
        number = multiply_add(thread.warp, HALVES, lane.half)
        return address.of(lane.neighbour, number, first_rows=column)

    return _load_parts(rows_smem, rows_smem.shape[0], place, ".trans")


def _load_parts(
    source_smem: Smem,
    columns: int,
    place: Callable[[TileAddresses, Thread, int], Scalar],
    suffix: str = "",
) -> Reg:
    """[64, columns]: two columns of parts by an ldmatrix, from `place(address, thread, first of the two)`."""
    shape = (TILE_ROWS, columns)
    out: Any = plgpu.ShapeDtypeStruct(shape, source_smem.dtype, WGMMA)

    @plgpu.inline_mgpu(arg_types=(_tile_type(source_smem),), return_type=out)
    def load(_: InlineContext, source: MemRef) -> Fragments:
        thread = Thread()
        address = TileAddresses(source, MatrixLane(thread).row)
        pair = ir.VectorType.get((2,), ir.MemRefType(source.type).element_type)
        registers = {}
        for column in range(0, columns // PART, 2):
            words = ldmatrix(place(address, thread, column), suffix)
            for n, word in enumerate(words):
                registers[column + n // HALVES, n % HALVES] = llvm.bitcast(pair, word)
        return from_parts(registers)

    return load(source_smem)  # pyright: ignore[reportCallIssue]: the first argument is Mosaic's


def ldmatrix(place: Scalar, suffix: str = "") -> list[Scalar]:
    """Four parts of 8 x 8 elements, [neighbour][half], two elements of each to a thread as i32."""
    word = ir.IntegerType.get_signless(32)
    four = llvm.inline_asm(
        ir.Type.parse("!llvm.struct<(i32, i32, i32, i32)>"),
        [place],
        f"ldmatrix.sync.aligned.m8n8.x4{suffix}.shared.b16 {{$0, $1, $2, $3}}, [$4];",
        "=r,=r,=r,=r,l,~{memory}",
        has_side_effects=True,
    )
    return [llvm.extractvalue(word, four, [n]) for n in range(4)]


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
        lane = MatrixLane(thread)
        address = TileAddresses(tile, lane.row)
        registers = parts(x)
        for column in range(0, x.shape[1] // PART, 2):
            four = [registers[column + n, h] for n in range(2) for h in range(HALVES)]
            if transpose:
                vector_number = multiply_add(thread.warp, HALVES, lane.half)
                place = address.of(lane.neighbour, vector_number, first_rows=column)
            else:
                rows = multiply_add(thread.of_warp(positions), HALVES, lane.half)
                place = address.of(rows, lane.neighbour, first_number=column)
            _stmatrix(place, four, ".trans" if transpose else "")

    store(x, tile_smem)  # pyright: ignore[reportCallIssue]: the first argument is Mosaic's


def store_pairs(tile_smem: Smem, x: Reg) -> None:
    """x [64, columns] to a tile, two neighbours of a row at a time, where there is no stmatrix."""

    @plgpu.inline_mgpu(arg_types=(WGMMA, _tile_type(tile_smem)))
    def store(_: InlineContext, x: Fragments, tile: MemRef) -> None:
        thread = Thread()
        address = TileAddresses(tile, thread.row)
        byte = arith.muli(thread.column, i32(_ELEMENT_BYTES))
        rows = arith.muli(thread.warp, i32(HALVES))
        for (column, half), register in parts(x).items():
            llvm.store(register, address.of(rows, i32(0), half, column, byte))

    store(x, tile_smem)  # pyright: ignore[reportCallIssue]: the first argument is Mosaic's


def store_transposed(tile_smem: Smem, x: Reg) -> None:
    """x^T of x [64, columns] to a tile of 64 columns, element by element, where there is no stmatrix.

    32 elements of a warp go to 64 bytes in four rows that the swizzle keeps apart: no two meet in a bank.
    """

    @plgpu.inline_mgpu(arg_types=(WGMMA, _tile_type(tile_smem)))
    def store(_: InlineContext, x: Fragments, tile: MemRef) -> None:
        thread = Thread()
        byte = arith.muli(thread.row, i32(_ELEMENT_BYTES))
        for n in range(2):
            address = TileAddresses(tile, arith.addi(thread.column, i32(n)))
            for (column, half), register in parts(x).items():
                vector_number = multiply_add(thread.warp, HALVES, i32(half))
                place = address.of(i32(0), vector_number, column, byte=byte)
                llvm.store(element_of(register, n), place)

    store(x, tile_smem)  # pyright: ignore[reportCallIssue]: the first argument is Mosaic's


def store_wide(tile_smem: Smem, x: Reg, layout: Layout) -> None:
    """x [64, 64] in the layout WIDE or WIDER to a tile."""

    @plgpu.inline_mgpu(arg_types=(layout, _tile_type(tile_smem)))
    def store(_: InlineContext, x: Fragments, tile: MemRef) -> None:
        thread = Thread()
        address = TileAddresses(tile, thread.row)
        if layout == WIDER:
            # Four threads have 32 columns of a row, four vectors: a vector each.
            vectors = 4
            own_vector = thread.pair
            byte = None
        else:
            # Four threads have 16 columns of a row, two vectors: a half vector each.
            vectors = 2
            own_vector = arith.remui(thread.pair, i32(2))
            half_of_vector = arith.divui(thread.pair, i32(2))
            byte = arith.muli(half_of_vector, i32(VECTOR_BYTES // 2))
        for n, register in enumerate(x.registers.flatten()):
            column, half = divmod(n, HALVES)
            rows = multiply_add(thread.warp, HALVES, i32(half))
            first = vectors * column
            place = address.of(rows, own_vector, first_number=first, byte=byte)
            llvm.store(register, place)

    store(x, tile_smem)  # pyright: ignore[reportCallIssue]: the first argument is Mosaic's


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
