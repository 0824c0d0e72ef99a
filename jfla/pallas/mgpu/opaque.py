"""Values that the compiler must not reason about: an opaque zero, and results pinned to where they were made.

LLVM hoists whatever does not change out of a loop over tiles: addresses, masks, iotas. Each then holds a register for
the whole kernel, and there are more of them than registers. A zero that is read from global memory, added to an index,
makes the index depend on something that LLVM cannot know, so what is computed from it stays inside the loop.
"""

import jax
import jax.numpy as jnp
from jax import lax


def opaque_zero() -> jax.Array:
    """On the host: [1] int32, the kernel operand that holds the zero."""
    return jnp.zeros(1, jnp.int32)


def pin[T](x: T) -> T:
    """x, where it is: no computation moves across, and layout inference does not search through both sides at once."""
    return lax.optimization_barrier(x)
