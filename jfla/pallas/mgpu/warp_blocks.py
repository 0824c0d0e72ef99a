"""Loads, stores and masks of arrays in registers by blocks of 16 rows, which are a warp's.

Pallas' indexing cannot say what differs from warp to warp; here it costs one address or predicate for each.
"""

from typing import Any

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mosaic
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from jfla.pallas.context import interpreting
from jfla.pallas.mgpu.layouts import ROWS, TILE_ROWS, WGMMA
from jfla.pallas.mgpu.smem import F32
from jfla.pallas.mgpu.thread import (
    BLOCK_ROWS,
    HALVES,
    NUM_WARPS,
    PART,
    Thread,
    element_of,
    equal,
    from_parts,
    i32,
    less,
    multiply_add,
    parts,
    parts_of,
    pointer_at,
    with_element,
)
from jfla.pallas.mgpu.tile_moves import store_matrix
from jfla.pallas.mgpu.types import Fragments, InlineContext, MemRef, Reg, Smem


def load_per_block(vectors_smem: Smem, first: int) -> Reg:
    """[64, columns]: in every row of block w the vector `first + w` of [vectors, columns] float32."""
    _, columns = vectors_smem.shape
    if interpreting():
        return jnp.repeat(vectors_smem[first : first + NUM_WARPS], BLOCK_ROWS, axis=0)
    out: Any = plgpu.ShapeDtypeStruct((TILE_ROWS, columns), jnp.dtype(F32), WGMMA)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=out)
    def load(_: InlineContext, vectors: MemRef) -> Fragments:
        thread = Thread()
        f32 = ir.F32Type.get()
        pair = ir.VectorType.get((2,), f32)
        number = arith.addi(thread.warp, i32(first))
        offset = multiply_add(number, columns, thread.column)
        ptr = pointer_at(utils.memref_ptr(vectors), offset, f32)
        registers = {}
        for column in range(columns // PART):
            value = llvm.load(pair, pointer_at(ptr, column * PART, f32))
            for half in range(HALVES):
                registers[column, half] = value
        return from_parts(registers)

    return load(vectors_smem)  # pyright: ignore[reportCallIssue]: the first argument is Mosaic's


def store_blocks(x: Reg, rows_smem: Smem, positions: tuple[int, int, int, int]) -> None:
    """Block w of x [64, 64], of 16 bits, to the rows of block `positions[w]` of a tile [rows, 64]."""
    if not interpreting():
        store_matrix(rows_smem, x, positions=positions)
        return
    for block, position in enumerate(positions):
        rows = x[block * BLOCK_ROWS : (block + 1) * BLOCK_ROWS]
        first = position * BLOCK_ROWS
        rows_smem[first : first + BLOCK_ROWS] = rows


def store_columns(x: Reg, vectors_smem: Smem) -> None:
    """The first columns of x [64, columns] float32 as the vectors [n, 64]; n is a multiple of 8."""
    count = vectors_smem.shape[0]
    if interpreting():
        vectors_smem[...] = x[:, :count].T
        return

    @plgpu.inline_mgpu(arg_types=(WGMMA, plgpu.RefType()))
    def store(_: InlineContext, x: Fragments, vectors: MemRef) -> None:
        thread = Thread()
        f32 = ir.F32Type.get()
        row = multiply_add(thread.warp, BLOCK_ROWS, thread.row)
        offset = multiply_add(thread.column, TILE_ROWS, row)
        ptr = pointer_at(utils.memref_ptr(vectors), offset, f32)
        for (column, half), register in parts(x).items():
            for n in range(2):
                vector_number = column * PART + n
                if vector_number < count:
                    moved = pointer_at(
                        ptr, vector_number * TILE_ROWS + half * PART, f32
                    )
                    llvm.store(element_of(register, n), moved)

    store(x, vectors_smem)  # pyright: ignore[reportCallIssue]


def only_block(x: Reg, block: int) -> Reg:
    """x [64, columns] float32 in the rows of a block, 0 elsewhere."""
    if interpreting():
        here = plgpu.broadcasted_iota(jnp.int32, x.shape, 0) // BLOCK_ROWS == block
        return jnp.where(here, x, 0.0)
    out: Any = plgpu.ShapeDtypeStruct(x.shape, x.dtype, WGMMA)

    @plgpu.inline_mgpu(arg_types=(WGMMA,), return_type=out)
    def select(_: InlineContext, x: Fragments) -> Fragments:
        here = equal(Thread().warp, i32(block))
        registers = {}
        for part, register in parts(x).items():
            zero = utils.c(0.0, register.type)
            registers[part] = arith.select(here, register, zero)
        return from_parts(registers)

    return select(x)  # pyright: ignore[reportCallIssue]


def mask_behind(x: Reg, block: int, which: int, strictly: bool) -> Reg:
    """[64, 16] of x [64, 16 n], part `which` of n, where row <= 16 block + column, or row < it; 0 elsewhere."""
    shape = (TILE_ROWS, BLOCK_ROWS)
    if interpreting():
        x = x[:, which * BLOCK_ROWS : (which + 1) * BLOCK_ROWS]
        row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=WGMMA)
        column = (
            plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=WGMMA)
            + block * BLOCK_ROWS
        )
        return jnp.where(row < column if strictly else row <= column, x, 0.0)
    out: Any = plgpu.ShapeDtypeStruct(shape, x.dtype, WGMMA)

    @plgpu.inline_mgpu(arg_types=(WGMMA,), return_type=out)
    def mask(_: InlineContext, x: Fragments) -> Fragments:
        thread = Thread()
        before = less(thread.warp, i32(block))
        here = equal(thread.warp, i32(block))
        zero = mosaic.c(0.0, ir.F32Type.get())

        def kept(column: int, half: int, n: int) -> Any:
            if half > column:
                return before
            if half < column:
                return arith.ori(before, here)
            # row <= column of the thread's element n, or row < it
            bound = arith.addi(thread.column, i32(n + (not strictly)))
            return arith.ori(before, arith.andi(here, less(thread.row, bound)))

        all_parts = parts(x)
        registers = {}
        for column, half in parts_of(BLOCK_ROWS):
            register = all_parts[which * BLOCK_ROWS // PART + column, half]
            masked = register
            for n in range(2):
                element = arith.select(
                    kept(column, half, n), element_of(register, n), zero
                )
                masked = with_element(masked, n, element)
            registers[column, half] = masked
        return from_parts(registers)

    return mask(x)  # pyright: ignore[reportCallIssue]


def with_diagonal(x: Reg, diagonal: Reg, block: int) -> Reg:
    """x [64, 16] with `diagonal` [64], by rows, where row == 16 block + column."""
    if interpreting():
        row = plgpu.broadcasted_iota(jnp.int32, x.shape, 0)
        column = plgpu.broadcasted_iota(jnp.int32, x.shape, 1) + block * BLOCK_ROWS
        return jnp.where(row == column, diagonal[:, None], x)
    out: Any = plgpu.ShapeDtypeStruct(x.shape, x.dtype, WGMMA)

    @plgpu.inline_mgpu(arg_types=(WGMMA, ROWS), return_type=out)
    def replace(_: InlineContext, x: Fragments, diagonal: Fragments) -> Fragments:
        thread = Thread()
        here = equal(thread.warp, i32(block))
        registers = parts(x)
        for half in range(HALVES):
            # Of a warp's 16 rows and columns the diagonal crosses the parts whose halves are alike.
            value = element_of(diagonal.registers.flatten()[half], 0)
            for n in range(2):
                own_column = arith.addi(thread.column, i32(n))
                on_diagonal = arith.andi(here, equal(thread.row, own_column))
                element = element_of(registers[half, half], n)
                element = arith.select(on_diagonal, value, element)
                registers[half, half] = with_element(registers[half, half], n, element)
        return from_parts(registers)

    return replace(x, diagonal)  # pyright: ignore[reportCallIssue]
