"""What values inside a kernel are: Pallas gives references and traced scalars no types that a checker could read."""

from typing import Any

import jax

Gmem = Any  # a reference to global memory, or a view of one; on the host the array itself, or None
Smem = Any  # a reference to shared memory, or a view of one; None where the kernel needs none
Reg = jax.Array  # a value in the registers of a warpgroup
Index = Any  # an int, a traced scalar or a slice
Barrier = Any  # an mbarrier, or an array of them
# What a kernel asks to be allocated: plgpu.SMEM, plgpu.Barrier, plgpu.RefUnion.
MemorySpec = Any
Layout = Any  # how an array lies over the threads of a warpgroup
