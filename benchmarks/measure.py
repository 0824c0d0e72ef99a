"""Times calls: warm, on rotating inputs, queued on a GPU so that launching costs nothing.

On a GPU `n` calls are queued and waited for once; a sample is the time of all over `n`. Where the
profiler gives the GPU's busy time, that is the time of the call, and the queued wall time stands
beside it. On a CPU a sample is one call, waited for. Inputs rotate through all runs, so that none
is met again before the others have passed through the cache.
"""

import itertools
import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks import trace

CACHE_BYTES = 60e6  # the second-level cache of an H200; an H100's is smaller
# A cache does not always drop what was used longest ago.
ROTATED_BYTES = 4 * CACHE_BYTES
MAX_SETS = 128
MAX_QUEUED = 20
QUEUE_SECONDS = 0.1
# Longer calls are many launches (a scan), and gaps between them belong to their time.
PROFILED_SECONDS = 0.05


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
    (1, 8, 1)
    """
    if not gpu:
        return 1
    return min(MAX_SETS, math.ceil(ROTATED_BYTES / max(bytes_of_one, 1)))


def timing(
    call: Callable[[Any], Any],
    wait: Callable[[Any], Any],
    sets: list[Any],
    repeats: int,
) -> Timing:
    """Times `call(set)`, which may return before its work is done; `wait(result)` returns after."""
    rotating = itertools.cycle(sets)

    def run(count: int) -> float:
        start = time.perf_counter()
        result = None
        for _ in range(count):
            result = call(next(rotating))
        wait(result)
        return time.perf_counter() - start

    run(1)
    gpu = jax.default_backend() == "gpu"
    count = min(MAX_QUEUED, max(1, round(QUEUE_SECONDS / run(1)))) if gpu else 1
    walls = [run(count) / count for _ in range(repeats)]
    wall = float(np.median(walls))
    if gpu and wall < PROFILED_SECONDS:
        found = _profiled(lambda: run(count), count, repeats)
        if found is not None:
            return _timing(found, wall, "device")
    return _timing(walls, wall, "queued" if gpu else "blocked")


def _profiled(run: Callable[[], float], count: int, repeats: int) -> list[float] | None:
    """Device seconds of one call in each of `repeats` runs of `count` calls, from one profile.

    None when it is not whole, or when the device would have been busy for longer than a run took.
    """
    walls: list[float] = []
    events = trace.device_events(lambda: walls.extend(run() for _ in range(repeats)))
    busy = trace.shares(events, repeats, count)
    if busy is None or any(seconds > wall for seconds, wall in zip(busy, walls)):
        return None
    return [seconds / count for seconds in busy]


def _timing(samples: list[float], wall: float, method: str) -> Timing:
    low, middle, high = (
        float(x) * 1e3 for x in np.quantile(samples, (0.25, 0.5, 0.75))
    )
    return Timing(middle, low, high, wall * 1e3, method, len(samples))
