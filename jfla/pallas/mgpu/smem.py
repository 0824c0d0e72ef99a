"""Shared memory that TMA and the tensor cores read: swizzled tiles, and how much of it a CTA has."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from jfla.pallas.context import interpreting
from jfla.pallas.mgpu.types import MemorySpec, Smem

F32 = jnp.float32
BF16 = jnp.bfloat16
F16 = jnp.float16


SWIZZLE_BYTES = 128


def tile_smem(*shape: int, dtype: DTypeLike = BF16) -> MemorySpec:
    """[.., rows, columns] tiles that TMA writes and the tensor cores read, with a swizzle of 128 bytes."""
    return plgpu.SMEM(shape, dtype, transforms=tile_transforms(dtype))


def tile_transforms(dtype: DTypeLike = BF16) -> tuple[Any, Any]:
    """How `tile_smem` lays tiles out."""
    columns = SWIZZLE_BYTES // jnp.dtype(dtype).itemsize
    tiling: Any = plgpu.TilingTransform  # to a type checker it is abstract
    swizzle: Any = plgpu.SwizzleTransform
    return tiling((8, columns)), swizzle(SWIZZLE_BYTES)


def in_one_place(*specs: MemorySpec) -> MemorySpec:
    """Buffers in the same memory, which a kernel sees as a tuple.

    The race detector of interpret mode would take them for one buffer, so there they lie apart.
    """
    return specs if interpreting() else plgpu.RefUnion(*specs)


def is_tile(ref: Smem) -> bool:
    """Whether it is laid out as `tile_smem`: all 16-bit buffers are."""
    return jnp.dtype(ref.dtype).itemsize == 2


def transposed(ref: Smem) -> Smem:
    """The view [columns, rows] of a tile, which wgmma reads as well."""
    return ref.transpose((1, 0))


def num_bytes(specs: MemorySpec) -> int:
    """Bytes of all buffers of a pytree."""
    return sum(
        math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in jax.tree.leaves(specs)
    )
