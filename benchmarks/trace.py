"""Device time from JAX's profiler: how long the GPU was busy, whoever launched the kernels."""

import collections
import pathlib
import tempfile
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
from jax.profiler import ProfileData, ProfileOptions


class Event(NamedTuple):
    """A kernel, copy or fill on a stream of a GPU, in nanoseconds."""

    start: float
    stop: float
    name: str


def device_events(run: Callable[[], Any]) -> list[Event]:
    """What the GPU did during `run`, which has to wait for its results, in the order of begin.

    Nothing when the profile holds no event, as on a CPU, or could not be taken.
    """
    options = ProfileOptions()
    options.python_tracer_level = 0
    options.host_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        try:
            with jax.profiler.trace(folder, profiler_options=options):
                run()
        # There is no access to the GPU's counters, or a profile is being taken already.
        except RuntimeError:
            return []
        files = sorted(pathlib.Path(folder).rglob("*.xplane.pb"))
        return events(ProfileData.from_file(str(files[0]))) if files else []


def events(profile: ProfileData) -> list[Event]:
    """The events on all streams of all GPUs."""
    return sorted(
        Event(event.start_ns, event.start_ns + event.duration_ns, event.name)
        for plane in profile.planes
        if plane.name.startswith("/device:GPU")
        for line in plane.lines
        if line.name.startswith("Stream")
        for event in line.events
    )


def shares(found: Sequence[Event], parts: int, calls: int) -> list[float] | None:
    """Seconds that the GPU was busy in each of `parts` equal parts, overlaps counted once.

    None for a profile that is not whole. A profiler may drop events without a word. So every kernel
    must occur equally often in each part, and as often as `calls` or a multiple of it.
    """
    size, rest = divmod(len(found), parts)
    if not found or rest:
        return None
    cut = [found[i : i + size] for i in range(0, len(found), size)]
    names = [collections.Counter(event.name for event in part) for part in cut]
    if any(other != names[0] for other in names):
        return None
    if any(number % calls for number in names[0].values()):
        return None
    return [covered((event.start, event.stop) for event in part) * 1e-9 for part in cut]


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals.

    >>> covered([(5, 6), (0, 2), (1, 3)])
    4.0
    """
    total = 0.0
    end = float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total
