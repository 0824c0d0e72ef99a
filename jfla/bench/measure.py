"""Times calls: warm, on rotating inputs, queued on a GPU so that launching costs nothing, with the spread.

On a GPU `n` calls are queued and waited for once; a sample is the time of all over `n`. Where the profiler gives the
GPU's busy time, that is the time of the call, and the queued wall time stands beside it. On a CPU a sample is one call,
waited for.
"""

import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from jfla.bench import trace

CACHE_BYTES = 50e6  # the second-level cache of an H100 or H200
MAX_SETS = 64
MAX_QUEUED, QUEUE_SECONDS = 20, 0.1
PROFILES = 3
PROFILED_SECONDS = 0.05  # longer calls are many launches (a scan), and gaps between them belong to their time


class Timing(NamedTuple):
    """Milliseconds of one call: median, quartiles, and how they came about."""

    ms: float
    low_ms: float
    high_ms: float
    wall_ms: float
    method: str  # "device", "queued" or "blocked"
    repeats: int


def input_sets(bytes_of_one: int, gpu: bool) -> int:
    """How many sets of inputs to rotate through, so that none of them is still in the GPU's cache.

    >>> input_sets(10**9, gpu=True), input_sets(30_000_000, gpu=True), input_sets(1, gpu=False)
    (1, 4, 1)
    """
    if not gpu or bytes_of_one >= 2 * CACHE_BYTES:
        return 1
    return min(MAX_SETS, math.ceil(2 * CACHE_BYTES / max(bytes_of_one, 1)))


def timing(call: Callable[[Any], Any], wait: Callable[[Any], Any], sets: list[Any], repeats: int) -> Timing:
    """Times `call(set)`, which may return before its work is done; `wait(result)` returns after."""

    def run(count: int) -> float:
        start, result = time.perf_counter(), None
        for i in range(count):
            result = call(sets[i % len(sets)])
        wait(result)
        return time.perf_counter() - start

    run(1)
    gpu = jax.default_backend() == "gpu"
    count = min(MAX_QUEUED, max(1, round(QUEUE_SECONDS / run(1)))) if gpu else 1
    walls = [run(count) / count for _ in range(repeats)]
    wall = float(np.median(walls))
    if gpu and wall < PROFILED_SECONDS:
        found = _profiled(lambda: run(count), count)
        if found is not None:
            return _timing(found, wall, "device")
    return _timing(walls, wall, "queued" if gpu else "blocked")


def _profiled(run: Callable[[], float], count: int) -> list[float] | None:
    """Device seconds of one call, from some profiles of `count` calls; None when one of them is not whole.

    A profiler may drop events without a word. So all profiles must hold the same number of events, the same for each
    call, and no device can have been busy for longer than its call took.
    """
    profiles = []
    for _ in range(PROFILES):
        walls: list[float] = []
        busy = trace.device_time(lambda walls=walls: walls.append(run()))
        if busy is None or busy.seconds > walls[0] or busy.events % count:
            return None
        profiles.append(busy)
    if len({busy.events for busy in profiles}) != 1:
        return None
    return [busy.seconds / count for busy in profiles]


def _timing(samples: list[float], wall: float, method: str) -> Timing:
    low, middle, high = (float(x) * 1e3 for x in np.quantile(samples, (0.25, 0.5, 0.75)))
    return Timing(middle, low, high, wall * 1e3, method, len(samples))
