"""Flags between kernels side by side, in interpret mode, which has none: recorded, or simulated.

Interpret mode runs one CTA after the other, but the CTAs of a cluster at a time. Simulated, a launch is one cluster,
and a flag an array with a number for every warpgroup that may set it.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jfla.pallas import chunk, scans_and_grads
from jfla.pallas.common.scan import signalling
from jfla.pallas.mgpu import launch, overlap

_MOST_WARPGROUPS = 4  # of a CTA


class Recorded(NamedTuple):
    """What was traced of flags, by their shapes; None where a kernel runs alone."""

    signals: list[Any]
    waits: list[Any]  # with the number of writers


def record_flags(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    """A kernel does all that it does for flags but to set them and to wait: stores end, and barriers are met."""
    recorded = Recorded([], [])

    def signal(self: overlap.ReadyFlags, _: Any) -> None:
        recorded.signals.append(self.flags_gmem)
        plgpu.wait_smem_to_gmem(0)

    def wait(self: overlap.ReadyFlags, _: Any) -> None:
        recorded.waits.append((self.flags_gmem, self.lead.num_writers))

    monkeypatch.setattr(overlap, "allocate_flags", lambda shape: shape)
    monkeypatch.setattr(overlap.ReadyFlags, "signal", signal)
    monkeypatch.setattr(overlap.ReadyFlags, "wait", wait)
    return recorded


class _Flags(NamedTuple):
    """In the place of an array of semaphores."""

    numbers: Any  # int32 [*shape, CTAs * warpgroups]: 1 from those that have signalled

    @property
    def shape(self) -> tuple[int, ...]:
        return self.numbers.shape[:-1]

    @property
    def at(self) -> Any:
        return self.numbers.at


def _signal(flag: Any, **_: Any) -> None:
    own = lax.axis_index("cta") * _MOST_WARPGROUPS + lax.axis_index("wg")
    flag.at[own][...] = jnp.int32(1)


def _wait(flag: Any, value: int, *, most_looks: int, **_: Any) -> None:
    def look(seen: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return jnp.sum(flag[...]), seen[1] + 1

    def goes_on(seen: tuple[jax.Array, jax.Array]) -> jax.Array:
        count, looks = seen
        return (count < value) & (looks < most_looks)

    count, _ = lax.while_loop(goes_on, look, (jnp.int32(0), jnp.int32(0)))
    size = flag.shape[-1]
    flag.at[jnp.where(count < value, size, 0)][...]


@contextlib.contextmanager
def simulated_flags(most_looks: int = 20_000) -> Iterator[list[str]]:
    """Kernels side by side run at the same time, signal and wait, also for room in rings: the names of their launches.

    A flag that is not set when somebody has looked so often is an error of interpret mode: an index out of bounds.
    """
    flags_shapes = []
    numbers_gmem = []
    launches: list[str] = []
    wait = functools.partial(_wait, most_looks=most_looks)

    def with_shape(
        producing: Any, consume: Callable, flags_shape: Any, lead: Any, **options: Any
    ) -> Any:
        flags_shapes.append(flags_shape)
        return run_overlap(producing, consume, flags_shape, lead, **options)

    def launch_with_numbers(
        body: Callable, inputs: Any, outputs: Any, *, grid: Any, **options: Any
    ) -> Any:
        if "_beside_" not in options["name"]:
            return launch.launch(body, inputs, outputs, grid=grid, **options)
        launches.append(options["name"])
        num_warpgroups = grid["cta"] * _MOST_WARPGROUPS
        numbers = jnp.zeros((*flags_shapes.pop(), num_warpgroups), jnp.int32)

        def with_numbers(inputs_gmem: Any, *rest: Any) -> None:
            inputs_gmem, given = inputs_gmem
            numbers_gmem.append(given)
            body(inputs_gmem, *rest)
            numbers_gmem.pop()

        return launch.launch(
            with_numbers, (inputs, numbers), outputs, grid=grid, **options
        )

    def as_cluster(entry: Callable, **options: Any) -> Any:
        if "_beside_" in options["kernel_name"]:
            size = options.pop("grid")
            names = options.pop("grid_names")
            options |= {"cluster": size, "cluster_names": names}
        return kernel(entry, **options)

    run_overlap = overlap.overlap
    kernel = plgpu.kernel
    jax.clear_caches()  # of the same kernels without flags
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plgpu, "kernel", as_cluster)
        patch.setattr(plgpu, "semaphore_signal", _signal)
        patch.setattr(plgpu, "semaphore_wait", wait)
        patch.setattr(overlap, "_signal_relaxed", _signal)
        patch.setattr(overlap, "launch", launch_with_numbers)
        patch.setattr(overlap, "allocate_flags", lambda _: _Flags(numbers_gmem[-1]))
        for module in (chunk, scans_and_grads):
            patch.setattr(module, "overlap", with_shape)
        for module in (chunk, scans_and_grads, signalling):
            patch.setattr(module, "interpreting", lambda: False)
        try:
            yield launches
        finally:
            jax.clear_caches()
