"""Copies from global to shared memory by the threads of a warpgroup, 16 bytes at a time, with cp.async.

Pallas has them for GPUs before Hopper alone, and not for the rows of one head among many. A thread copies the same 16
bytes of every eighth part of a row of 128 bytes: where the swizzle puts them is the same for all of its rows.
"""

import math
from typing import Any

from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm

from jfla.pallas.mgpu.smem import SWIZZLE_BYTES, is_tile, tile_transforms
from jfla.pallas.mgpu.thread import i32, multiply_add, new_thread_idx, pointer_at
from jfla.pallas.mgpu.types import Gmem, InlineContext, MemRef, Scalar, Smem

THREADS = 128  # of a warpgroup
_BYTES = 16  # of a thread at a time, at most
_PARTS = SWIZZLE_BYTES // _BYTES
_ROWS = THREADS // _PARTS  # that a warpgroup copies at a time
_TILE_ROWS = 8


def cp_async(source_gmem: Gmem, target_smem: Smem) -> None:
    """Starts a copy, which is one group of cp.async: of a tile of 16 bits, or of what is contiguous."""
    transforms = tile_transforms(target_smem.dtype) if is_tile(target_smem) else ()
    gmem: Any = plgpu.RefType()
    smem: Any = plgpu.RefType(transforms)

    @plgpu.inline_mgpu(arg_types=(gmem, smem))
    def start(ctx: InlineContext, source: MemRef, target: MemRef) -> None:
        del ctx
        if transforms:
            _copy_tile(source, target)
        else:
            _copy_contiguous(source, target)
        nvvm.cp_async_commit_group()

    start(source_gmem, target_smem)  # pyright: ignore[reportCallIssue]: the first argument is Mosaic's


def wait_cp_async(groups_in_flight: int) -> None:
    """Waits until at most so many copies are in flight, for all threads of the warpgroup."""
    plgpu.inline_mgpu()(lambda ctx: ctx.await_cp_async_copy(groups_in_flight))()


def _copy_tile(source: MemRef, target: MemRef) -> None:
    """Rows of 64 elements of 16 bits to tiles [rows / 8, columns / 64, 8, 64]."""
    element = ir.MemRefType(source.type).element_type
    (row_stride, _), _ = ir.MemRefType(source.type).get_strides_and_offset()
    row_tiles, column_tiles, _, columns = ir.MemRefType(target.type).shape
    thread = new_thread_idx()
    row = arith.divui(thread, i32(_PARTS))
    part = arith.remui(thread, i32(_PARTS))
    row_in_tile = arith.remui(row, i32(_TILE_ROWS))
    part_elements = columns // _PARTS
    gmem_offset = multiply_add(row, row_stride, arith.muli(part, i32(part_elements)))
    swizzled = arith.muli(arith.xori(part, row_in_tile), i32(part_elements))
    in_tile = multiply_add(row_in_tile, columns, swizzled)
    row_tile = arith.divui(row, i32(_TILE_ROWS))
    smem_offset = multiply_add(row_tile, column_tiles * _TILE_ROWS * columns, in_tile)
    source_ptr = pointer_at(_global(utils.memref_ptr(source)), gmem_offset, element)
    target_ptr = pointer_at(utils.memref_ptr(target), smem_offset, element)
    for first in range(0, row_tiles * _TILE_ROWS, _ROWS):
        for tile in range(column_tiles):
            smem_tile = first // _TILE_ROWS * column_tiles + tile
            _copy_16_bytes(
                pointer_at(source_ptr, first * row_stride + tile * columns, element),
                pointer_at(target_ptr, smem_tile * _TILE_ROWS * columns, element),
                _BYTES,
            )


def _copy_contiguous(source: MemRef, target: MemRef) -> None:
    element = ir.MemRefType(source.type).element_type
    per_thread = math.prod(ir.MemRefType(target.type).shape) // THREADS
    element_bytes = utils.bitwidth(element) // 8
    per_copy = math.gcd(per_thread, _BYTES // element_bytes)
    offset = arith.muli(new_thread_idx(), i32(per_copy))
    source_ptr = pointer_at(_global(utils.memref_ptr(source)), offset, element)
    target_ptr = pointer_at(utils.memref_ptr(target), offset, element)
    for first in range(0, per_thread * THREADS, per_copy * THREADS):
        _copy_16_bytes(
            pointer_at(source_ptr, first, element),
            pointer_at(target_ptr, first, element),
            per_copy * element_bytes,
        )


def _copy_16_bytes(source_ptr: Scalar, target_ptr: Scalar, size: int) -> None:
    """Or 4, or 8; only 16 bytes can pass by the first-level cache."""
    kinds = nvvm.LoadCacheModifierKind
    nvvm.cp_async_shared_global(
        target_ptr, source_ptr, size, kinds.CG if size == _BYTES else kinds.CA
    )


def _global(ptr: Scalar) -> Scalar:
    return llvm.addrspacecast(llvm.PointerType.get(address_space=1), ptr)
