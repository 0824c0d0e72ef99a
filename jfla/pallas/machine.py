"""Which instructions a kernel is made of: Hopper's, or those that every GPU since Ampere has.

Hopper's wgmma reads its right operand from shared memory and runs beside its warpgroup, and its TMA copies whole tiles
and arrives on a barrier. mma.sync takes both operands from registers; with cp.async every thread copies 16 bytes at a
time and waits for its own copies. No warpgroup can wait for another's, so that a CTA is one warpgroup.
"""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from typing import Literal

Machine = Literal["hopper", "ampere"]

_MACHINE: contextvars.ContextVar[Machine] = contextvars.ContextVar(
    "jfla_machine", default="hopper"
)


def on_hopper() -> bool:
    """Whether kernels are traced with Hopper's instructions here and now."""
    return _MACHINE.get() == "hopper"


def for_same_machine[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """The function, traced with the instructions of here and now wherever it is called: `jax.vmap` traces it anew."""
    machine = _MACHINE.get()

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with tracing_for(machine):
            return function(*args, **kwargs)

    return call


@contextlib.contextmanager
def tracing_for(machine: Machine) -> Iterator[None]:
    """Inside, kernels are traced with the instructions of this machine."""
    token = _MACHINE.set(machine)
    try:
        yield
    finally:
        _MACHINE.reset(token)
