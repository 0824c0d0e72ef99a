"""The quickened interpreter of the tests: it finds races, and orders clocks as JAX does."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax._src.pallas.mosaic.interpret.vector_clock import NpVectorClock
from jax.experimental.pallas import mosaic_gpu as plgpu
from support import interpreter

import jfla
from jfla.pallas.mgpu.launch import launch


def run_two_warpgroups(body: Callable[..., None], **options: Any) -> jax.Array:
    """What a CTA of two warpgroups leaves in an array [128], interpreted."""
    out = jax.ShapeDtypeStruct((128,), jnp.float32)
    with jfla.pallas.interpret():
        return launch(body, (), out, grid={}, num_warpgroups=2, **options)


def exchange(waits: bool) -> jax.Array:
    """Warpgroup 0 writes shared memory, and warpgroup 1 copies it out, after a barrier or at once."""

    def body(_inputs, output_gmem, tile_smem, barrier):
        wg = lax.axis_index("wg")

        def writer():
            tile_smem[...] = jnp.full((128,), 7.0, jnp.float32)
            plgpu.barrier_arrive(barrier)

        def reader():
            if waits:
                plgpu.barrier_wait(barrier)
            output_gmem[...] = tile_smem[...]

        lax.cond(wg == 0, writer, reader)

    return run_two_warpgroups(
        body,
        smem=plgpu.SMEM((128,), jnp.float32),
        barriers=plgpu.Barrier(num_barriers=1, num_arrivals=1),
        name="exchange",
    )


def test_tests_run_the_quickened_interpreter():
    assert NpVectorClock.ordered is interpreter.ordered


def test_a_barrier_orders_a_write_and_a_read():
    np.testing.assert_array_equal(exchange(waits=True), 7.0)


def test_without_the_barrier_the_race_is_found(capfd):
    said = ""
    try:
        jax.block_until_ready(exchange(waits=False))
    except jax.errors.JaxRuntimeError as error:
        said = str(error)
    said += capfd.readouterr().out  # JAX 0.11.2 prints races instead of raising
    assert "RACE DETECTED" in said


def arrive_twice(waits: bool) -> jax.Array:
    """Warpgroup 0 arrives twice at a barrier, for the second time when warpgroup 1 has seen the first, or at once."""

    def body(_inputs, output_gmem, _smem, barriers):
        full, empty = barriers
        wg = lax.axis_index("wg")

        def producer():
            plgpu.barrier_arrive(full)
            if waits:
                plgpu.barrier_wait(empty)
            plgpu.barrier_arrive(full)

        def consumer():
            plgpu.barrier_wait(full)
            if waits:
                plgpu.barrier_arrive(empty)
            plgpu.barrier_wait(full)
            output_gmem[...] = jnp.ones((128,), jnp.float32)

        lax.cond(wg == 0, producer, consumer)

    barriers = (plgpu.Barrier(), plgpu.Barrier())
    return run_two_warpgroups(body, barriers=barriers, name="arrive_twice")


def test_a_late_warpgroup_sees_each_arrival_that_waits_for_it():
    with interpreter.late(1):
        np.testing.assert_array_equal(arrive_twice(waits=True), 1.0)


def test_a_late_warpgroup_misses_an_arrival_that_does_not_wait_for_it():
    with interpreter.late(1), pytest.raises(jax.errors.JaxRuntimeError, match="phase"):
        jax.block_until_ready(arrive_twice(waits=False))


def test_clocks_are_ordered_as_in_jax():
    clocks = []
    for ticks in itertools.product(range(3), repeat=3):
        clock = NpVectorClock(3)
        clock.clock[:] = ticks
        clocks.append(clock)
    for a, b in itertools.product(clocks, repeat=2):
        assert interpreter.ordered(a, b) == (a.lt(b) or b.lt(a))
