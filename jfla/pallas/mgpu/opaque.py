"""Values that the compiler must not reason about: an opaque zero, and results pinned to where they were made.

LLVM hoists whatever does not change out of a loop over tiles: addresses, masks, iotas. Each then holds a register for
the whole kernel, and there are more of them than registers. A zero from an instruction that LLVM cannot look into,
added to an index, keeps what is computed from the index where it is used; ptxas knows that it is 0.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mosaic
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from jfla.pallas.context import interpreting


def zero_operand() -> jax.Array:
    """On the host: [1] int32, an operand of a kernel that reads its zero there.

    ptxas does not know it either: loops whose count has it stay loops, and what is before them stays apart.
    """
    return jnp.zeros(1, jnp.int32)


def pin[T](x: T) -> T:
    """x, where it is: no computation moves across."""
    return lax.optimization_barrier(x)


def opaque_zero() -> jax.Array:
    """In a kernel: a new int32 zero."""
    if interpreting():
        return jnp.int32(0)
    splat = plgpu.Layout.WG_SPLAT(())
    out: Any = plgpu.ShapeDtypeStruct((), jnp.dtype(jnp.int32), splat)

    @plgpu.inline_mgpu(return_type=out)
    def zero(_: Any) -> Any:
        i32 = ir.IntegerType.get_signless(32)
        zero = llvm.inline_asm(i32, [], "mov.u32 $0, 0;", "=r", has_side_effects=True)
        return mosaic.FragmentedArray.splat(zero, (), is_signed=True)

    return zero()  # pyright: ignore[reportCallIssue]: the first argument is Mosaic's


def opaque(n: int) -> jax.Array:
    """In a kernel: n, as a number that LLVM does not know: the steps of a loop that is within another, or around one.

    Scans in three loops, of which the compiler knew all steps, spilled up to 144 bytes.
    """
    return n + opaque_zero()
