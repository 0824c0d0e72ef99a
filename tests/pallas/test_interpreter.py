"""The quickened interpreter of the tests: it finds races, orders clocks as JAX does, and ends when a thread fails."""

import itertools
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax._src.pallas.mosaic.interpret import thread_map
from jax._src.pallas.mosaic.interpret.vector_clock import NpVectorClock
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, shared_memory
from jax.experimental.pallas import mosaic_gpu as plgpu
from support import interpreter, numpy_primitives, walked_threads

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
    assert thread_map._run_jaxpr is walked_threads.run_thread
    assert thread_map.thread_map is walked_threads.map_threads


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


def test_a_lone_warpgroup_is_walked():
    def body(_inputs, output_gmem, _smem, _barriers):
        output_gmem[...] = jnp.full((128,), 3.0, jnp.float32)

    out = jax.ShapeDtypeStruct((128,), jnp.float32)
    before = walked_threads.Progress.equations
    with jfla.pallas.interpret():
        left = launch(body, (), out, grid={}, num_warpgroups=1, name="lone")
    np.testing.assert_array_equal(left, 3.0)
    assert walked_threads.Progress.equations > before


def fail_while_another_waits() -> jax.Array:
    """Warpgroup 0 takes a cosine and arrives at a barrier, where warpgroup 1 waits."""

    def body(_inputs, output_gmem, tile_smem, barrier):
        wg = lax.axis_index("wg")

        def writer():
            tile_smem[...] = jnp.cos(jnp.full((128,), wg, jnp.float32))
            plgpu.barrier_arrive(barrier)

        def reader():
            plgpu.barrier_wait(barrier)
            output_gmem[...] = tile_smem[...]

        lax.cond(wg == 0, writer, reader)

    smem = plgpu.SMEM((128,), jnp.float32)
    return run_two_warpgroups(body, smem=smem, barriers=plgpu.Barrier(), name="fails")


def error_within(seconds: float, call: Callable[[], Any]) -> BaseException | None:
    """What a call raised; fails when it has not ended by then, and ends its threads."""
    errors = []

    def run() -> None:
        try:
            jax.block_until_ready(call())
        except jax.errors.JaxRuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        late_error = RuntimeError("the test ran out of time")
        gpu_callbacks._get_shared_memory().set_failed(late_error, top_level=False)
        pytest.fail("the threads of a kernel did not end")
    return errors[0] if errors else None


def test_an_error_outside_callbacks_ends_all_threads(monkeypatch):
    def fail(_array: Any) -> Any:
        raise ArithmeticError("no cosine")

    def make_fail(_equation: Any) -> Callable[..., Any]:
        return fail

    monkeypatch.setitem(numpy_primitives._MAKERS, "cos", make_fail)
    error = error_within(60.0, fail_while_another_waits)
    assert "no cosine" in str(error)
    np.testing.assert_array_equal(exchange(waits=True), 7.0)  # nothing is left behind


def test_an_error_in_a_callback_ends_all_threads(monkeypatch):
    def fail(*_args: Any, **_log: Any) -> None:
        raise ArithmeticError("no arrival")

    monkeypatch.setattr(shared_memory.Barrier, "arrive", fail)
    error = error_within(60.0, fail_while_another_waits)
    assert "no arrival" in str(error)


def test_clocks_are_ordered_as_in_jax():
    clocks = []
    for ticks in itertools.product(range(3), repeat=3):
        clock = NpVectorClock(3)
        clock.clock[:] = ticks
        clocks.append(clock)
    for a, b in itertools.product(clocks, repeat=2):
        assert interpreter.ordered(a, b) == (a.lt(b) or b.lt(a))
