"""The soak run: cases of every kind pass, and what is wrong is caught and shown again by the file that is written."""

import dataclasses
import pathlib
import runpy
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

import jfla
from benchmarks.soak import cases, check, computed, recurrence, run
from benchmarks.soak.cases import Call, Case, Numbers, Sizes
from benchmarks.soak.run import Plan
from jfla.pallas.context import mma_kernels_wanted

TINY = Sizes(time=70, tokens=140, dims=(4, 8))
# What is planted does not depend on the form, and this one compiles sooner.
PACKED = Call(
    "gdn", form="recurrent", transform="jit", dtype="bfloat16", batch=2, time=9, heads=2, group=2, key_dim=8,
    value_dim=4, state="float32", final=True, segments=3,
)  # fmt: skip
NUMBERS = Numbers(seed=3, layout="uniform")
EVERY_STATE = dataclasses.replace(PACKED, segments=0, states_every=1)
POOL = dataclasses.replace(PACKED, segments=0, pool=True, batch=4)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "CPU_SIZES", TINY)


def test_a_handful_of_cases_passes(tmp_path: pathlib.Path):
    said: list[str] = []
    plan = Plan(
        seed=75, cases=4, each=2, implementation="xla", out=tmp_path / "failure.py"
    )
    tally = run.run(plan, said.append)
    assert (tally.cases, tally.failures, sum(tally.by.values())) == (4, 0, 4)
    assert not plan.out.exists()
    assert "4 cases" in said[-1 - len(tally.by)]
    assert "a minute" in said[-1 - len(tally.by)]


@pytest.mark.slow
@pytest.mark.parametrize("transform", cases.TRANSFORMS)
def test_every_transform_with_all_that_a_call_can_have(transform: str):
    call = dataclasses.replace(
        PACKED,
        op="kda",
        form="chunk",
        time=70,
        transform=transform,
        gate="softplus",
        dt_bias=True,
    )
    checked = check.Checked(call, "xla")
    for layout in cases.LAYOUTS:
        assert checked.problems(Numbers(seed=1, layout=layout)) == []


@pytest.mark.parametrize(
    "call",
    [
        dataclasses.replace(EVERY_STATE, op="kda", form="chunk", time=150, states_every=64),
        dataclasses.replace(EVERY_STATE, transform="grad"),
        dataclasses.replace(POOL, transform="grad", state="bfloat16"),
    ],
    ids=["states of chunks", "every state", "pool"],
)  # fmt: skip
def test_states_along_time_and_pools_are_right(call: Call):
    checked = check.Checked(call, "xla")
    for seed in range(3):
        assert checked.problems(Numbers(seed=seed)) == []


@pytest.mark.parametrize(
    "gate", [pytest.param(None, marks=pytest.mark.slow), "softplus"]
)
def test_a_batch_split_over_devices_is_right(gate: str | None):
    call = dataclasses.replace(
        PACKED, transform=cases.SPLIT, batch=jax.device_count(), gate=gate, dt_bias=True
    )
    assert jax.device_count() == 8
    assert check.Checked(call, "xla").problems(NUMBERS) == []


@pytest.mark.slow
@pytest.mark.parametrize("mma", [False, True])
def test_kernels_are_soaked_in_interpret_mode(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, mma: bool
):
    call = dataclasses.replace(
        PACKED, form="chunk", batch=1, heads=1, group=1, state=None
    )
    call = dataclasses.replace(call, final=False, segments=0)
    monkeypatch.setattr(run, "draw_call", lambda rng, sizes, devices: call)
    by_mma = []

    def taken(*args: Any) -> str:
        by_mma.append(mma_kernels_wanted())
        return computed.taken(*args)

    monkeypatch.setattr(run, "taken", taken)
    plan = Plan(cases=1, interpret=True, mma=mma, out=tmp_path / "failure.py")
    tally = run.run(plan, lambda text: None)
    assert by_mma == [mma]
    assert tally.by == {"chunk_gdn by pallas, jit": 1}
    assert tally.failures == 0
    run.write_failure(plan, Case(call, NUMBERS), ["invented"])
    with pytest.raises(SystemExit) as right:
        runpy.run_path(str(plan.out), run_name="__main__")
    assert right.value.code == 0


def _wrong_gdn(
    change: Callable[[jax.Array], jax.Array], of: str = "output"
) -> Callable[..., jfla.DeltaRuleOutput]:
    right = jfla.recurrent_gdn

    def recurrent_gdn(*args, **kwargs) -> jfla.DeltaRuleOutput:
        out = right(*args, **kwargs)
        return out._replace(**{of: change(getattr(out, of))})

    return recurrent_gdn


def test_a_planted_error_is_caught_and_its_file_shows_it_again(
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    plan = Plan(cases=1, implementation="xla", out=tmp_path / "failure.py")
    monkeypatch.setattr(run, "draw_call", lambda rng, sizes, devices: PACKED)
    with monkeypatch.context() as planted:
        planted.setattr(jfla, "recurrent_gdn", _wrong_gdn(lambda output: 1.1 * output))
        said: list[str] = []
        assert run.run(plan, said.append).failures == 1
        assert any("output: error " in text for text in said)
        with pytest.raises(SystemExit) as wrong:
            runpy.run_path(str(plan.out), run_name="__main__")
    assert wrong.value.code == 1
    assert "output: error " in capsys.readouterr().out
    with pytest.raises(SystemExit) as right:
        runpy.run_path(str(plan.out), run_name="__main__")
    assert right.value.code == 0
    assert "nothing is wrong" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda output: output.at[0, 0].set(np.nan), "output is not finite"),
        (lambda output: output + 1e-3, "output is not 0 on padding"),
        (
            lambda output: output + 1e-3 * output.mean(1, keepdims=True),
            "depends on later tokens or other rows",
        ),
        (
            lambda output: output + 1e-3 * output[::-1],
            "depends on later tokens or other rows",
        ),
    ],
)
def test_what_needs_no_reference_is_caught(
    change: Callable, said: str, monkeypatch: pytest.MonkeyPatch
):
    call = dataclasses.replace(PACKED, dtype="float32")
    monkeypatch.setattr(jfla, "recurrent_gdn", _wrong_gdn(change))
    wrong = check.Checked(call, "xla").problems(NUMBERS)
    assert any(said in text for text in wrong), wrong


def test_a_state_that_depends_on_later_tokens_is_caught(
    monkeypatch: pytest.MonkeyPatch,
):
    change = lambda states: states + 1e-3 * states.mean(1, keepdims=True)
    monkeypatch.setattr(jfla, "recurrent_gdn", _wrong_gdn(change, "final_state"))
    wrong = check.Checked(EVERY_STATE, "xla").problems(NUMBERS)
    assert any(text.startswith("final_state before token") for text in wrong), wrong


def test_a_slot_that_no_row_writes_keeps_its_bits(monkeypatch: pytest.MonkeyPatch):
    change = lambda pool: pool + 1e-6
    monkeypatch.setattr(jfla, "recurrent_gdn", _wrong_gdn(change, "final_state"))
    wrong = check.Checked(POOL, "xla").problems(NUMBERS)
    assert "final_state has other bits in slots that no row writes" in wrong


def test_other_bits_the_second_time_are_caught():
    checked = check.Checked(PACKED, "xla")
    op = checked._op
    factors = iter((1.0, 1.001, 1.0))

    def differs(*arrays):
        factor = next(factors)
        return {name: (factor * a).astype(a.dtype) for name, a in op(*arrays).items()}

    checked._op = differs
    assert "final_state has other bits the second time" in checked.problems(NUMBERS)


def test_what_a_dtype_cannot_hold_is_no_error():
    tiny = np.full(4, 2e-8)
    assert check.error(np.zeros(4, np.float16), tiny) == 0
    assert check.error(np.zeros(4, np.float32), tiny) == 1
    assert check.error(np.zeros(4, np.float16), 100 * tiny) == 1
    assert check.error(np.full(4, 6e-8, np.float16), tiny) > 1


@pytest.mark.parametrize("gate", ["softplus", "sigmoid"])
@pytest.mark.parametrize("op", ["kda", "gdn"])
def test_cotangents_of_the_gate_s_parameters_are_sums_of_their_terms(
    op: str, gate: str
):
    call = dataclasses.replace(
        PACKED, op=op, transform="grad", gate=gate, dt_bias=True, heads=1
    )
    x, indices, cotangents = cases.draw_arrays(Case(call, NUMBERS))
    want = recurrence.exact(call)(x, indices, cotangents)
    over_tokens = (0, 1)
    of_bias = check.terms(call, "ddt_bias", x, want["dg"]).sum(over_tokens)
    np.testing.assert_allclose(of_bias, want["ddt_bias"], rtol=1e-9)
    of_rate = check.terms(call, "da_log", x, want["dg"]).sum(over_tokens)
    of_rate = of_rate.reshape(call.group, -1).sum(1)
    np.testing.assert_allclose(of_rate, want["da_log"], rtol=1e-9)
    assert check.terms(call, "dbeta", x, want["dg"]).size == 0


def test_the_error_of_a_sum_is_told_beside_its_terms(monkeypatch: pytest.MonkeyPatch):
    got = np.array([0.02], np.float32)
    want = np.array([0.01])
    of_terms = check.beside_terms(got, want, np.array([6.0, -8.0]))
    assert of_terms == ", 1.00e-03 of its terms"
    assert check.beside_terms(got, want, np.zeros(0)) == ""

    call = dataclasses.replace(PACKED, transform="grad", gate="sigmoid")
    checked = check.Checked(call, "xla")
    op = checked._op

    def wrong(*arrays):
        found = op(*arrays)
        return found | {"da_log": 1.1 * found["da_log"]}

    checked._op = wrong
    (problem,) = checked.problems(NUMBERS)
    assert problem.startswith("da_log: error 1.00e-01 > ")
    assert problem.endswith(" of its terms")


def test_what_cannot_run_is_a_failure_with_its_message(monkeypatch: pytest.MonkeyPatch):
    def recurrent_gdn(*_, **__):
        raise RuntimeError("no such device\nsecond line")

    monkeypatch.setattr(jfla, "recurrent_gdn", recurrent_gdn)
    assert check.Checked(PACKED, None).problems(NUMBERS) == [
        "RuntimeError: no such device"
    ]


def test_calls_that_are_not_taken_are_counted_with_their_reason(tmp_path: pathlib.Path):
    said: list[str] = []
    plan = Plan(minutes=0.005, implementation="pallas", out=tmp_path / "failure.py")
    tally = run.run(plan, said.append)
    assert tally.cases == 0
    assert sum(tally.refused.values()) >= 1
    assert 'calls not taken: implementation="pallas" cannot take this call' in said[-1]


def test_a_run_without_a_case_is_no_success(capsys: pytest.CaptureFixture[str]):
    assert run.main(["--minutes", "0"]) == 1
    assert "0 cases" in capsys.readouterr().out


def test_draws_are_of_every_kind_and_the_same_for_a_seed():
    def drawn(seed: int) -> list[Case]:
        rng = np.random.default_rng(seed)
        return [
            Case(cases.draw_call(rng, TINY), cases.draw_numbers(rng))
            for _ in range(200)
        ]

    calls = [case.call for case in drawn(0)]
    assert drawn(0) == drawn(0)
    assert drawn(0) != drawn(1)
    for name, values in {
        "op": {"kda", "gdn"},
        "form": {"chunk", "recurrent"},
        "transform": set(cases.TRANSFORMS),
        "dtype": {"float32", "bfloat16", "float16"},
        "gate": {None, "softplus", "sigmoid"},
        "state": {None, "float32", "bfloat16"},
        "beta_max": {None, 1.0, 2.0},
        "states_every": {0, 1, *cases.STATES_EVERY},
        "pool": {False, True},
    }.items():
        assert {getattr(call, name) for call in calls} == values
    assert any(call.segments and call.final for call in calls)
    rng = np.random.default_rng(0)
    split = [
        call
        for call in (cases.draw_call(rng, TINY, devices=8) for _ in range(200))
        if call.transform == cases.SPLIT
    ]
    assert {call.batch for call in split} == {8, 16}
    assert all(1 <= call.time <= TINY.time for call in calls)


@pytest.mark.parametrize("layout", cases.LAYOUTS)
def test_segment_ids_are_what_the_ops_take(layout: str):
    rng = np.random.default_rng(0)
    for time in (1, 2, 7, 64):
        for _ in range(20):
            ids = cases._ids(rng, time, 3, layout)
            used = ids[ids > 0]
            assert ids.shape == (time,)
            assert set(ids) <= {0, 1, 2, 3}
            assert (np.diff(used) >= 0).all()
            assert not ids[len(used) :].any()
