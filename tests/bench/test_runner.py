"""A run from plan to JSON: rows, refusals, failures, what is kept and what is measured again."""

import dataclasses
import json
import pathlib
import subprocess
import sys
import types
from typing import Any

import jax
import pytest

import jfla
from benchmarks import (
    ceilings,
    exact,
    inputs,
    providers,
    results,
    runner,
    shapes,
)
from benchmarks.ceilings import Ceilings
from benchmarks.exact import Exact
from benchmarks.measure import Timing
from benchmarks.programs import Program, Refused
from benchmarks.providers import Provider, jax_program
from benchmarks.results import Results, Row
from benchmarks.runner import Plan
from benchmarks.shapes import Case, Shape
from jfla import reference

TINY = Shape(1, 64, 1, 8)
CEILINGS = Ceilings(2.0, 100.0)


def _scan(case: Case) -> Program:
    return jax_program(getattr(reference, f"recurrent_{case.op}"), case)


def _refuses(case: Case) -> Program:
    raise Refused("not on a Saturday")


def _breaks(case: Case) -> Program:
    raise MemoryError("RESOURCE_EXHAUSTED: out of everything\nand a second line")


def _not_finite(case: Case) -> Program:
    def op(*main: jax.Array, **rest: Any) -> jfla.DeltaRuleOutput:
        out = getattr(reference, f"recurrent_{case.op}")(*main, **rest)
        return out._replace(output=out.output * jax.numpy.nan)

    return jax_program(op, case)


def _wrong(case: Case) -> Program:
    raise TypeError("no such argument\nand a second line")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch):
    """One tiny shape, quick implementations, no time for ceilings."""
    builds = {
        "scan": _scan,
        "refuses": _refuses,
        "breaks": _breaks,
        "wrong": _wrong,
        "nan": _not_finite,
    }
    monkeypatch.setattr(
        runner,
        "PROVIDERS",
        {name: Provider(build, ours=True) for name, build in builds.items()},
    )
    monkeypatch.setattr(providers, "PROVIDERS", runner.PROVIDERS)
    monkeypatch.setitem(shapes.SETS, "quick", (TINY,))
    monkeypatch.setattr(ceilings, "measured", lambda repeats: CEILINGS)


def test_a_run_has_a_row_for_everything_and_keeps_it(tmp_path: pathlib.Path):
    path = tmp_path / "results.json"
    said: list[str] = []
    plan = Plan(ops=("gdn",), passes=("backward",), json=path, repeats=2)
    record = runner.run(
        plan, lambda done, total, text: said.append(f"{done}/{total} {text}")
    )
    rows = {(row.implementation, row.timed): row for row in record.rows}
    assert said[0] == "0/2 gdn forward, B1 T64 H1 D8, production: scan"
    for timed in ("forward", "forward+backward"):
        row = rows["scan", timed]
        assert row.ms > 0
        assert row.low_ms <= row.ms <= row.high_ms
        assert row.errors["output"] < 4e-3
        assert row.compile_seconds > 0
        assert row.peak_mib > 0
        assert row.copy_fraction == pytest.approx(row.tb_per_s / 2)
        assert rows["refuses", timed].refused == "not on a Saturday"
        assert rows["breaks", timed].refused == "out of memory"
        assert rows["wrong", timed].refused == "failed: TypeError: no such argument"
        reason = rows["nan", timed].refused
        assert reason.startswith("failed: ArithmeticError: not finite: ")
        assert "output" in reason
    assert ("refuses", "backward") not in rows
    written = results.read(path)
    assert [row.key for row in written.rows] == [row.key for row in record.rows]
    assert written.ceilings == CEILINGS
    assert written.versions["jax"]

    again = runner.run(
        dataclasses.replace(plan, passes=("forward",), implementations=("scan",)),
        lambda *_: None,
    )
    assert sorted(row.key for row in again.rows) == sorted(
        row.key for row in record.rows
    )


def test_ours_have_their_turn_between_the_peers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
):
    for name in ("first", "second", "third"):
        monkeypatch.setitem(runner.PROVIDERS, name, Provider(_refuses))
    monkeypatch.setattr(runner, "unavailable", lambda name: None)
    peers_last = ("scan", "first", "second", "third")
    path = tmp_path / "results.json"
    plan = Plan(
        ops=("gdn",),
        passes=("forward",),
        implementations=peers_last,
        json=path,
        repeats=1,
    )
    rows = runner.run(plan, lambda *_: None).rows
    assert [row.implementation for row in rows] == ["first", "second", "scan", "third"]
    assert results.read(path).runs == 1
    runner.run(plan, lambda *_: None)
    assert results.read(path).runs == 2


def test_the_readmes_set_is_run_with_what_the_readme_shows(
    monkeypatch: pytest.MonkeyPatch,
):
    known = dict.fromkeys(("pallas", "tokamax", "fla", "jla"), Provider(_scan))
    can_run = ("pallas", "tokamax", "fla")
    monkeypatch.setattr(runner, "PROVIDERS", known)
    monkeypatch.setattr(runner, "unavailable", lambda name: name not in can_run)
    assert Plan(sets=("readme",)).filled().implementations == ("pallas", "fla")
    assert Plan(sets=("paper",)).filled().implementations == can_run


def test_no_case_is_begun_after_its_time():
    said: list[str] = []
    record = runner.run(
        Plan(ops=("kda",), seconds=0.0), lambda done, total, text: said.append(text)
    )
    assert record.rows == []
    assert said == ["stopped after 0 s, 3 cases left"]


def test_inputs_that_do_not_fit_are_rows_with_a_reason(monkeypatch: pytest.MonkeyPatch):
    draw = inputs.draw

    def fits(case: Case, seed: int) -> inputs.Arrays:
        if case.op == "kda":
            raise MemoryError("RESOURCE_EXHAUSTED: out of memory")
        return draw(case, seed)

    monkeypatch.setattr(inputs, "draw", fits)
    plan = Plan(passes=("forward",), implementations=("scan", "refuses"), repeats=1)
    found = {
        (row.op, row.implementation): row.refused
        for row in runner.run(plan, lambda *_: None).rows
    }
    assert found["kda", "scan"] == found["kda", "refuses"] == "out of memory"
    assert found["gdn", "scan"] is None


def test_a_reference_that_cannot_be_made_is_not_taken_from_other_inputs(
    monkeypatch: pytest.MonkeyPatch,
):
    first, second = (Case("gdn", "forward", TINY, gate) for gate in ("strong", "weak"))
    compare = Exact(gradients=False)
    compare.begin(first, inputs.draw(first, 0))
    compare.wait()

    def fails(*_):
        raise MemoryError("no")

    monkeypatch.setattr(exact, "_started", fails)
    for _ in range(2):
        with pytest.raises(MemoryError):
            compare.begin(second, inputs.draw(second, 0))


def test_rows_of_another_version_are_not_added_to(tmp_path: pathlib.Path):
    path = tmp_path / "results.json"
    results.started(CEILINGS, "abc", None).write(path)
    assert results.started(CEILINGS, "abc", path).rows == []
    with pytest.raises(ValueError, match="another commit: abc, now def"):
        results.started(CEILINGS, "def", path)
    path.write_text(json.dumps({"schema": 0}))
    with pytest.raises(ValueError, match="schema 1, got 0"):
        results.read(path)


def _file(
    path: pathlib.Path, copy: float, versions: dict[str, str], *rows: Row, **other: str
) -> pathlib.Path:
    head = {
        "device": "NVIDIA X",
        "platform": "gpu",
        "date": "2000-01-02",
        "commit": "abc",
    } | other
    Results(
        **head, versions=versions, ceilings=Ceilings(copy, 100.0), rows=list(rows)
    ).write(path)
    return path


def test_merging_loses_no_row_and_relates_all_to_the_best_ceilings(
    tmp_path: pathlib.Path,
):
    timed = lambda name, ms: results.timed_row(
        Case("kda", "forward", TINY),
        name,
        Timing(ms, ms, ms, ms, "device", 7),
        Ceilings(2.0, 100.0),
    )
    no = lambda name: Row(
        "kda", "forward", str(TINY), "production", name, refused="out of memory"
    )
    first = _file(
        tmp_path / "1",
        2.0,
        {"jax": "9"},
        timed("pallas", 1.0),
        timed("fla", 3.0),
        no("cudnn"),
        no("scan"),
    )
    second = _file(
        tmp_path / "2",
        4.0,
        {"jax": "9", "fla": "1"},
        timed("pallas", 2.0),
        no("fla"),
        timed("cudnn", 5.0),
    )
    record = runner.merge([first, second], tmp_path / "out.json")
    assert [row.key for row in results.read(tmp_path / "out.json").rows] == [
        row.key for row in record.rows
    ]
    assert {row.implementation: row.ms for row in record.rows} == {
        "pallas": 2.0,
        "fla": 3.0,
        "cudnn": 5.0,
        "scan": None,
    }
    assert record.versions == {"jax": "9", "fla": "1"}
    assert record.runs == 0  # these did not say
    assert record.ceilings == Ceilings(4.0, 100.0)
    for row in record.rows:
        if row.ms is not None:
            assert row.copy_fraction == pytest.approx(row.tb_per_s / 4, rel=1e-4)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"commit": "def"}, "another commit than .*: def"),
        ({"date": "2000-01-03"}, "another date than"),
        ({"device": "NVIDIA Y"}, "another device than"),
        ({"versions": {"jax": "8"}}, "another jax: 8, not 9"),
    ],
)
def test_records_that_do_not_belong_together_are_not_merged(
    other: dict, said: str, tmp_path: pathlib.Path
):
    versions = other.pop("versions", {"jax": "9"})
    paths = [
        _file(tmp_path / "1", 2.0, {"jax": "9"}),
        _file(tmp_path / "2", 2.0, versions, **other),
    ]
    with pytest.raises(ValueError, match=said):
        results.merged(paths)


@pytest.mark.parametrize(
    ("option", "value"), [("sets", "huge"), ("ops", "mamba"), ("gates", "iron")]
)
def test_wrong_options_are_named(option: str, value: str):
    with pytest.raises(ValueError, match=f"{option} must be among .*'{value}'"):
        Plan(**{option: (value,)}).filled()


def test_absent_peers_are_refused_by_name(monkeypatch: pytest.MonkeyPatch):
    peer = Provider(_scan, ("a_package_that_is_not_there",))
    monkeypatch.setitem(runner.PROVIDERS, "peer", peer)
    assert "peer" not in Plan().filled().implementations
    with pytest.raises(
        ValueError, match="peer cannot run here: no package a_package_that_is_not_there"
    ):
        Plan(implementations=("peer",)).filled()


@pytest.mark.parametrize(
    ("capability", "left_out"),
    [("9.0", {"xla", "scan"}), ("8.0", set()), (None, set())],
)
def test_where_the_kernels_run_the_slow_implementations_are_asked_for(
    capability: str | None, left_out: set[str], monkeypatch: pytest.MonkeyPatch
):
    ours = {name: Provider(_scan, ours=True) for name in ("pallas", "xla", "scan")}
    monkeypatch.setattr(runner, "PROVIDERS", ours)
    monkeypatch.setattr(providers, "PROVIDERS", ours)
    monkeypatch.setattr(
        jax, "devices", lambda: [types.SimpleNamespace(compute_capability=capability)]
    )
    assert set(Plan().filled().implementations) == ours.keys() - left_out
    assert Plan(implementations=("scan",)).filled().implementations == ("scan",)


def test_the_backward_is_the_difference_and_noise_is_none():
    case = Case("kda", "forward+backward", TINY)
    timed = lambda name, *ms: results.timed_row(
        dataclasses.replace(case, timed=name), "xla", Timing(*ms, "device", 7), CEILINGS
    )
    forward, both = (
        timed("forward", 2.0, 1.9, 2.2, 2.5),
        timed("forward+backward", 5.0, 4.8, 5.1, 6.0),
    )
    both.errors = {"output": 1e-3, "dq": 2e-3}
    row = results.backward_row(case, forward, both, CEILINGS)
    assert (row.timed, row.ms, row.wall_ms, row.method) == (
        "backward",
        3.0,
        3.5,
        "device",
    )
    assert (row.low_ms, row.high_ms) == pytest.approx((2.6, 3.2))
    assert row.errors == {"dq": 2e-3}
    forward.method = "queued"  # then both are taken as wall times
    assert results.backward_row(case, forward, both, CEILINGS).ms == 3.5
    noise = results.backward_row(
        case, both, timed("forward+backward", 4.0, 4.0, 4.0, 4.0), CEILINGS
    )
    assert noise.ms is None
    assert "noise" in str(noise.refused)


def test_a_row_that_was_refused_has_no_timing():
    with pytest.raises(ValueError, match="no such thing"):
        _ = Row(
            "kda", "forward", str(TINY), "strong", "xla", refused="no such thing"
        ).timing


def test_the_core_needs_jax_and_numpy_alone():
    """What `python -m benchmarks` imports, with everything else hidden, and its table."""
    hidden = (
        "rich",
        "typer",
        "matplotlib",
        "beartype",
        "optax",
        "orbax",
        "grain",
        "flax",
    )
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({hidden})); "
        "from benchmarks import report, results, runner; from benchmarks.ceilings import Ceilings; "
        "report.show(results.started(Ceilings(1.0, 2.0), 'abc', None))"
    )
    folder = results.FOLDER.parents[1]
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "copy 1 TB/s, matmul 2 TFLOP/s\nop  pass" in done.stdout
