"""Kernels that write over their operands: arrays become references, and results lie where operands did.

XLA may take slices of operands and results into a kernel's launch, as of the rows that a loop or `jax.vmap` goes
through. There it forgets that a result lies over an operand: the kernel would write to the operand's slice, and the
result's would stay as it was. Barriers keep slices outside.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl


def write_in_place[T](write: Callable[[Any, Any], None], written: T, read: Any) -> T:
    """`written`, pytrees of arrays, as `write(references to them, read)` leaves them. Rows of `vmap` go in turn.

    All arrays that the kernel has for operands are in one of the two.
    """

    def run(written: T, read: Any) -> T:
        written, read = lax.optimization_barrier((written, read))
        results = pl.run_state(lambda refs: write(refs, read))(written)
        return lax.optimization_barrier(results)

    return jax.custom_batching.sequential_vmap(run)(written, read)
