"""Pallas' interpret mode for GPUs in less time, and with one warpgroup held back at its barriers (`late`).

Interpret mode runs every warpgroup as a thread, which JAX compiles with XLA. Here Python walks its equations
(`walked_threads`). A thread calls back for every access to memory. Where XLA calls, JAX moves the operands to a device,
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
from jax._src.pallas.mosaic.interpret import thread_map
from jax._src.pallas.mosaic.interpret.vector_clock import NpVectorClock
from jax._src.pallas.mosaic_gpu.interpret import shared_memory

from support import walked_threads

_to_int_of_jax = shared_memory._to_int

# Longer than a thread that can go on needs for an equation, such as a callback. Nothing is compiled in between, except
# what NumPy has no form of, which `walked_threads.bound` counts.
_QUIET_SECONDS = 0.02


def quicken() -> None:
    """Replaces five functions of JAX for the rest of the process."""
    thread_map.thread_map = walked_threads.map_threads
    thread_map._run_jaxpr = walked_threads.run_thread
    callbacks.io_callback_impl = call_with_numpy_arrays
    shared_memory._to_int = to_int
    NpVectorClock.ordered = ordered


def call_with_numpy_arrays(
    *args: Any, callback: Callable, **described: Any
) -> list[np.ndarray]:
    """The results of a callback. It gets copies: it may keep, or write, what others still read or write over."""
    del described
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
    """Until no thread has begun an equation for a while."""
    begun = None
    while begun != walked_threads.Progress.equations:
        begun = walked_threads.Progress.equations
        time.sleep(_QUIET_SECONDS)
