"""Timing, device time from a profile, and the errors beside every time."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.profiler import ProfileData

from benchmarks import ceilings, exact, inputs, measure, trace
from benchmarks.exact import Exact
from benchmarks.providers import jax_program
from benchmarks.shapes import Case, Shape
from jfla import reference

RECURRENT = {
    "kda": reference.recurrent_kda,
    "gdn": reference.recurrent_gdn,
}  # quicker to compile than chunks
GRADIENTS = ("dq", "dk", "dv", "dg", "dbeta")
PROFILE = """
planes {
  name: "/device:GPU:0"
  event_metadata { key: 1 value { id: 1 name: "kernel" } }
  lines { id: 1 name: "Stream #7(Compute)" timestamp_ns: 1000
    events { metadata_id: 1 offset_ps: 0 duration_ps: 3000000 }
    events { metadata_id: 1 offset_ps: 5000000 duration_ps: 1000000 } }
  lines { id: 2 name: "Stream #8(MemcpyD2D)" timestamp_ns: 1000
    events { metadata_id: 1 offset_ps: 2000000 duration_ps: 2000000 } }
  lines { id: 3 name: "XLA Modules" timestamp_ns: 1000
    events { metadata_id: 1 offset_ps: 0 duration_ps: 99000000 } }
}
planes { name: "/host:CPU" lines { id: 1 name: "Stream of words" timestamp_ns: 0
    events { metadata_id: 1 offset_ps: 0 duration_ps: 99000000 } } }
"""


def test_a_gpu_is_busy_while_any_of_its_streams_is():
    """0 .. 3 and 2 .. 4 and 5 .. 6 microseconds; other lines and other planes do not count."""
    events = trace.events(ProfileData.from_text_proto(PROFILE))
    assert trace.shares(events, parts=1, calls=3) == [pytest.approx(5e-6)]
    assert trace.shares(events, parts=3, calls=1) == pytest.approx([3e-6, 2e-6, 1e-6])


def test_a_profile_without_a_gpu_has_no_device_time():
    assert trace.device_events(lambda: jax.block_until_ready(jnp.ones(3) + 1)) == []


def test_a_profile_that_is_not_whole_is_no_device_time(monkeypatch: pytest.MonkeyPatch):
    """Three runs of four calls, each of two kernels of 0.1 s; a run takes 1 s by the wall."""
    kernels = [trace.Event(i * 1e8, (i + 1) * 1e8, "ab"[i % 2]) for i in range(24)]

    def profiled(events: list[trace.Event]) -> list[float] | None:
        monkeypatch.setattr(trace, "device_events", lambda run: (run(), events)[1])
        return measure._profiled(lambda: 1.0, 4, 3)

    assert profiled(kernels) == pytest.approx([0.2, 0.2, 0.2])
    assert profiled([]) is None
    assert profiled(kernels[1:]) is None
    # as many events in each run, but not of each call
    assert profiled(kernels[3:]) is None
    # the same one in each run
    assert profiled([event for event in kernels if event.start % 8e8 != 0]) is None
    assert (
        profiled(
            [
                event._replace(stop=event.stop + 1e8, name=event.name)
                for event in kernels[:-1]
            ]
        )
        is None
    )
    slow = [
        trace.Event(event.start * 2, event.stop * 2, event.name) for event in kernels
    ]
    assert profiled(slow) is None


def test_inputs_rotate_through_all_runs(monkeypatch: pytest.MonkeyPatch):
    met: list[int] = []
    measure.timing(met.append, lambda _: None, [0, 1, 2], repeats=4)
    assert met == [0, 1, 2, 0, 1]


def test_times_are_those_of_the_calls():
    calls = []

    def call(x: float) -> None:
        calls.append(x)
        time.sleep(x)

    timing = measure.timing(call, lambda _: None, [0.02, 0.02], repeats=3)
    assert timing.method == "blocked"
    assert timing.repeats == 3
    assert 20 <= timing.low_ms <= timing.ms <= timing.high_ms < 1000
    assert len(calls) == 4  # one of them warms up


@pytest.mark.parametrize(
    ("op", "timed"),
    [("gdn", "forward"), ("kda", "forward+backward"), ("kda", "decode")],
)
def test_errors_are_roundings_of_the_right_call_and_more_of_a_wrong_one(
    op: str, timed: str
):
    """The output is linear in q: with 1.1 q, a tenth of it and of most gradients is wrong."""
    case = Case(
        op, timed, Shape(2, 1 if timed == "decode" else 96, 2, 16, value_heads=4)
    )
    both = timed == "forward+backward"
    arrays, compare = inputs.draw(case, 0), Exact(gradients=both)
    program = jax_program(RECURRENT[op], case)
    right = compare.errors(case, arrays, program, program.first(program.load(arrays)))
    assert right.keys() == (
        {"output", *GRADIENTS} if both else {"output", "final_state"}
    )
    assert all(error < 4e-3 for error in right.values()), right
    wrong = compare.errors(
        case, arrays, program, program(program.load(arrays | {"q": arrays["q"] * 1.1}))
    )
    for name in ("output", "dv", "dk") if both else ("output",):
        assert wrong[name] == pytest.approx(0.1, rel=0.1)


def test_packed_sequences_have_errors_too():
    case = Case(
        "kda", "forward+backward", Shape(1, 96, 2, 16, packing="skewed", segments=3)
    )
    found = _errors(case)
    assert found.keys() == {"output", *GRADIENTS}
    assert all(0 < error < 4e-3 for error in found.values()), found


@pytest.mark.parametrize("op", ["kda", "gdn"])
def test_of_long_sequences_the_last_tokens_and_the_final_state_are_compared(
    op: str, monkeypatch: pytest.MonkeyPatch
):
    """They are those of the whole: the tokens before have left their state."""
    case = Case(op, "forward+backward", Shape(1, 128, 1, 16))
    arrays = inputs.draw(case, 0)
    whole = exact._started(case, arrays)()
    monkeypatch.setattr(exact, "MAX_TIME", 64)
    monkeypatch.setattr(exact, "LAST", 32)
    last = exact._started(case, arrays)()
    assert last.keys() == whole.keys() == {"output", "final_state", *GRADIENTS}
    for name, x in last.items():
        expected = whole[name] if name == "final_state" else whole[name][:, 96:]
        np.testing.assert_allclose(x, expected, rtol=1e-12, atol=1e-14)
    found = _errors(case)
    assert found.keys() == {"output", *GRADIENTS}
    assert all(0 < error < 4e-3 for error in found.values()), found


def test_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch):
    case = Case("kda", "forward+backward", Shape(1, 96, 1, 8))
    arrays = inputs.draw(case, 0)
    whole = exact._started(case, arrays)()
    monkeypatch.setattr(exact, "BLOCK", 32)
    exact._compiler.cache_clear()
    for name, x in exact._started(case, arrays)().items():
        np.testing.assert_allclose(x, whole[name], rtol=1e-12, atol=1e-14)
    exact._compiler.cache_clear()


def test_packed_sequences_side_by_side_are_those_of_the_definition():
    case = Case(
        "kda", "forward+backward", Shape(1, 96, 2, 8, packing="random", segments=5)
    )
    arrays = inputs.draw(case, 0)
    with jax.enable_x64(True):
        main = [arrays[name].astype(jnp.float64) for name in inputs.MAIN]
        run = lambda *main: (
            reference.recurrent_kda(*main, segment_ids=arrays["segment_ids"]).output
        )
        output, adjoint = jax.vjp(run, *main)
        expected = [output, *adjoint(arrays["do"].astype(jnp.float64))]
    found = exact._started(case, arrays)()
    assert found.keys() == {"output", *GRADIENTS}
    for name, x in zip(("output", *(f"d{name}" for name in inputs.MAIN)), expected):
        np.testing.assert_allclose(found[name], x, rtol=1e-10, atol=1e-14)


def _errors(case: Case) -> dict[str, float]:
    arrays = inputs.draw(case, 0)
    program = jax_program(RECURRENT[case.op], case)
    return Exact(gradients=True).errors(
        case, arrays, program, program.first(program.load(arrays))
    )


def test_the_ceilings_are_those_of_a_machine():
    found = ceilings.measured(3)
    assert 5e-4 < found.copy_tb_per_s < 10
    assert 1e-3 < found.matmul_tflop_per_s < 2000
