"""Branches of a kernel on a traced condition: `pl.when` and `lax.cond` by a number instead of a boolean.

Those convert the boolean to a number, and with JAX 0.11.2 Mosaic GPU runs the assembler for its version, some 10 ms,
whenever it lowers a conversion of less than 16 bits: half a second for the branches of KDA's kernels.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from jfla.pallas.mgpu.types import Index


def cond(
    condition: Index,
    if_true: Callable[..., Any],
    if_false: Callable[..., Any],
    *operands: Any,
) -> Any:
    """`lax.cond`."""
    return lax.switch(int_of(condition), (if_false, if_true), *operands)


def when(condition: Index) -> Callable[[Callable[[], None]], None]:
    """`pl.when` on a traced condition: a decorator that runs the function where the condition holds."""
    return lambda run: cond(condition, run, lambda: None)


def int_of(condition: Index) -> Index:
    """1 where the condition holds, or else 0."""
    return lax.select(condition, jnp.int32(1), jnp.int32(0))
