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
# Inside `plgpu.inline_mgpu`, which writes operations of MLIR for one thread.
InlineContext = Any  # what it hands over first
Fragments = Any  # mosaic.FragmentedArray: an array in the registers of a warpgroup
MemRef = Any  # a reference, as an operation sees it
Scalar = Any  # a value of an operation: an i32, an i1 or a pointer
Vector = Any  # a value of a few neighbours
Tree = Any  # a pytree of arrays, of their shapes and dtypes, or of references to them
