"""Where kernels are to run, as the caller says it: interpreted anywhere, or compiled for a GPU that is not here.

And which kernels, where a GPU runs several.
"""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import NamedTuple


class Target(NamedTuple):
    """A GPU that need not be on this machine: its compute capability and its number of multiprocessors."""

    compute_capability: str
    num_sms: int


_INTERPRET: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "jfla_interpret", default=False
)
_TARGET: contextvars.ContextVar[Target | None] = contextvars.ContextVar(
    "jfla_target", default=None
)
_MMA: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "jfla_mma_kernels", default=False
)


@contextlib.contextmanager
def interpret() -> Iterator[None]:
    """Inside, implementation="pallas" runs in Pallas' interpret mode, on any device, with race detection: for tests.

    **Raises:** calls raise `RuntimeError` when JAX has fewer CPU threads than a kernel has warpgroups, at most 4. With
    `XLA_FLAGS=--xla_force_host_platform_device_count=4`, set before JAX starts, it has enough on any machine.

    >>> import jax, jfla
    >>> with jfla.pallas.interpret():
    ...     jfla.pallas.interpreting()
    True
    """
    with interpreted(True):
        yield


@contextlib.contextmanager
def interpreted(flag: bool) -> Iterator[None]:
    """Inside, kernels are interpreted, or are not: `interpret` for code that is traced later than it was called."""
    token = _INTERPRET.set(flag)
    try:
        yield
    finally:
        _INTERPRET.reset(token)


def interpreting() -> bool:
    """Whether kernels are interpreted here and now."""
    return _INTERPRET.get()


@contextlib.contextmanager
def compiling_for(compute_capability: str, num_sms: int = 132) -> Iterator[None]:
    """Inside, implementations are chosen and lowered as on a GPU of this compute capability, also without one.

    For `jax.jit(f).trace(...).lower(...)` towards a described topology, and for `jfla.explain`. What is lowered for
    another platform than CUDA, such as a call that runs on this machine's CPU, takes "xla" all the same.

    **Arguments:**

    - `compute_capability`: such as `"9.0"`.
    - `num_sms`: its number of multiprocessors; 132 is that of an H100 or H200 with SXM. What is compiled for a Hopper
      GPU may need as many: with fewer it could wait for ever.

    **Raises:** `ValueError` for a compute capability that is not two numbers, or a number of multiprocessors below 1.

    >>> import jax, jfla
    >>> x = jax.ShapeDtypeStruct((1, 64, 2, 128), "bfloat16")
    >>> beta = jax.ShapeDtypeStruct((1, 64, 2), "float32")
    >>> with jfla.pallas.compiling_for("9.0"):
    ...     jfla.explain(jfla.chunk_kda, x, x, x, x, beta).implementation
    'pallas'
    """
    parts = compute_capability.split(".") if isinstance(compute_capability, str) else []
    if len(parts) != 2 or not all(part.isdecimal() for part in parts):
        raise ValueError(
            f'compute_capability must be a string such as "9.0", got {compute_capability!r}'
        )
    if not isinstance(num_sms, int) or num_sms < 1:
        raise ValueError(f"num_sms must be an int of at least 1, got {num_sms!r}")
    token = _TARGET.set(Target(compute_capability, num_sms))
    try:
        yield
    finally:
        _TARGET.reset(token)


def target() -> Target | None:
    """The GPU of `compiling_for`, or None outside of it."""
    return _TARGET.get()


@contextlib.contextmanager
def mma_kernels() -> Iterator[None]:
    """Inside, implementation="pallas" takes the mma.sync kernels on every GPU that has them, Hopper GPUs too.

    For tests and measurements of those kernels: on a Hopper GPU its own are faster. It holds for what is traced inside.

    >>> import jax, jfla
    >>> x = jax.ShapeDtypeStruct((1, 64, 2, 128), "bfloat16")
    >>> beta = jax.ShapeDtypeStruct((1, 64, 2), "float32")
    >>> with jfla.pallas.compiling_for("9.0"), jfla.pallas.mma_kernels():
    ...     jfla.explain(jfla.chunk_kda, x, x, x, x, beta, implementation="pallas").detail
    'mma.sync kernels'
    """
    token = _MMA.set(True)
    try:
        yield
    finally:
        _MMA.reset(token)


def mma_kernels_wanted() -> bool:
    """Whether the call is inside `mma_kernels`."""
    return _MMA.get()
