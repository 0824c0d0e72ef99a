"""Device time from JAX's profiler: how long the GPU's streams were busy, whoever launched the kernels."""

import pathlib
import tempfile
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
from jax.profiler import ProfileData, ProfileOptions


class Busy(NamedTuple):
    """How long the streams of the GPU were busy, with how many kernels, copies and fills."""

    seconds: float
    events: int


def device_time(run: Callable[[], Any]) -> Busy | None:
    """What the GPU did during `run`, which has to wait for its results.

    None when the profile holds no event, as on a CPU, or could not be taken.
    """
    options = ProfileOptions()
    options.python_tracer_level = 0
    options.host_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        try:
            with jax.profiler.trace(folder, profiler_options=options):
                run()
        except RuntimeError:  # no access to the GPU's counters, or a profile is being taken already
            return None
        files = sorted(pathlib.Path(folder).rglob("*.xplane.pb"))
        return busy(ProfileData.from_file(str(files[0]))) if files else None


def busy(profile: ProfileData) -> Busy | None:
    """The time covered by the events on all streams of all GPUs, overlaps counted once."""
    spans = [
        (event.start_ns, event.start_ns + event.duration_ns)
        for plane in profile.planes
        if plane.name.startswith("/device:GPU")
        for line in plane.lines
        if line.name.startswith("Stream")
        for event in line.events
    ]
    return Busy(covered(spans) * 1e-9, len(spans)) if spans else None


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals.

    >>> covered([(5, 6), (0, 2), (1, 3)])
    4.0
    """
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total
