"""Pallas' interpret mode for GPUs in half the time, and with one warpgroup held back at its barriers (`late`).

Interpret mode runs a callback of Python for every access to memory. JAX moves the operands of a callback to a device,
and back where they are read. Here they stay NumPy arrays. Its race detector compares two vector clocks four times for
every pair of accesses to a buffer. Here it does so once or twice. What is simulated, and which races are found, stays
the same: `tests/pallas/test_interpreter.py`.
"""

import contextlib
import operator
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
from jax._src import callback as callbacks
from jax._src.pallas.mosaic.interpret.vector_clock import NpVectorClock
from jax._src.pallas.mosaic_gpu.interpret import shared_memory

_to_int_of_jax = shared_memory._to_int

_QUIET_SECONDS = 0.02  # longer than XLA needs between two callbacks of a warpgroup


class _Callbacks:
    """Those of all threads."""

    last = 0.0  # when the last one began, by `time.monotonic`


def quicken() -> None:
    """Replaces three functions of JAX for the rest of the process."""
    callbacks.io_callback_impl = call_with_numpy_arrays
    shared_memory._to_int = to_int
    NpVectorClock.ordered = ordered


def call_with_numpy_arrays(
    *args: Any, callback: Callable, **described: Any
) -> list[np.ndarray]:
    """The results of a callback. Copies, because the callback may keep what XLA will write over."""
    del described
    _Callbacks.last = time.monotonic()
    return [np.asarray(x) for x in callback(*map(np.array, args))]


def to_int(x: Any) -> Any:
    """A scalar as an int; also one of NumPy, which JAX refuses."""
    return x.item() if isinstance(x, np.ndarray) else _to_int_of_jax(x)


def ordered(self: NpVectorClock, other: NpVectorClock) -> bool:
    """Whether one of two different clocks is at most the other in every component."""
    own = self.clock.tolist()  # a few numbers, which Python compares sooner than NumPy
    others = other.clock.tolist()
    if all(map(operator.le, own, others)):
        return own != others
    return all(map(operator.ge, own, others))


@contextlib.contextmanager
def late(warpgroup: int, cta: int | None = None) -> Iterator[None]:
    """That warpgroup, of every CTA or of one in a cluster, looks at a barrier only when the others can go no further.

    If a phase can end twice before it looks, it then does, and JAX raises an error. A GPU would wait for ever.
    """
    wait = shared_memory.Barrier.wait

    def wait_late(barrier: Any, thread: Any, *rest: Any, **log: Any) -> None:
        owner = thread if hasattr(thread, "warpgroup_id") else thread.warpgroup()
        of_cta = cta is None or owner.block_id == cta
        if of_cta and owner.warpgroup_id == warpgroup:
            _until_quiet()
        wait(barrier, thread, *rest, **log)

    with mock.patch.object(shared_memory.Barrier, "wait", wait_late):
        yield


def _until_quiet() -> None:
    """Until no thread has begun a callback for a while."""
    quiet = 0.0
    while quiet < _QUIET_SECONDS:
        time.sleep(_QUIET_SECONDS - quiet)
        quiet = time.monotonic() - _Callbacks.last
