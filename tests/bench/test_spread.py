"""A plan shared by several GPUs: every unit once, its passes in one file, nothing twice after an interruption."""

import dataclasses
import json
import pathlib
import queue
import threading
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks import (
    ceilings,
    everything,
    first_calls,
    gpu_lock,
    results,
    runner,
    spread,
)
from benchmarks.ceilings import Ceilings
from benchmarks.providers import PROVIDERS
from benchmarks.runner import Plan
from benchmarks.shapes import GATES, OPS, SETS, Shape

SHAPES = (Shape(1, 64, 1, 8), Shape(2, 64, 1, 8))


class _InThisProcess:
    """The part of `multiprocessing` that is used, with one process that does all."""

    def Queue(self) -> Any:
        waiting: Any = queue.Queue()
        waiting.cancel_join_thread = lambda: None
        return waiting

    def Process(self, target: Callable[..., None], args: tuple) -> Any:
        class Process:
            def start(self) -> None:
                target(*args)

            def join(self) -> None:
                pass

        return Process()


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> Plan:
    monkeypatch.setattr(runner, "PROVIDERS", {"scan": PROVIDERS["scan"]})
    monkeypatch.setattr(ceilings, "measured", lambda repeats: Ceilings(2.0, 100.0))
    monkeypatch.setattr(
        spread.multiprocessing, "get_context", lambda _: _InThisProcess()
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv(gpu_lock.FILE, str(tmp_path / "gpu"))
    monkeypatch.setitem(SETS, "quick", SHAPES)
    return Plan(
        ops=("gdn",),
        passes=("backward",),
        implementations=("scan",),
        repeats=1,
        commit="abc",
        json=tmp_path / "all.json",
    )


def test_units_hold_all_passes_of_an_op_shape_and_gate(plan: Plan):
    plan = dataclasses.replace(plan, ops=("kda", "gdn"))
    other = dataclasses.replace(plan, gates=("weak",))
    found = spread.units([plan.filled(), other.filled()])
    passes = [[case.timed for case in unit.cases] for unit in found]
    assert passes == [["forward", "forward+backward"]] * 8
    assert [unit.cases[0].op for unit in found] == ["kda", "kda", "gdn", "gdn"] * 2
    gates = [unit.cases[0].gate for unit in found]
    assert gates == ["production"] * 4 + ["weak"] * 4
    assert [unit.cases[0].shape for unit in found[:2]] == list(SHAPES)
    assert found[4].plan == other.filled()


def test_all_rows_come_together_and_a_second_run_measures_what_is_missing(
    plan: Plan, capsys: pytest.CaptureFixture[str]
):
    record = spread.run([plan], 2)
    assert len(record.rows) == 2 * 3
    # A backward of so few tokens can drown in noise.
    assert all(row.ms is not None for row in record.rows if row.timed != "backward")
    # Other processes have a part in first calls.
    assert {row.compile_seconds for row in record.rows} == {None}
    assert plan.json is not None
    assert len(results.read(plan.json).rows) == len(record.rows)
    assert capsys.readouterr().out.count("GPU 0") == 4

    part = plan.json.with_suffix(".gpu0-0.json")
    kept = results.read(part)
    lost = next(row for row in kept.rows if row.timed == "forward+backward")
    kept.rows.remove(lost)
    kept.write(part)
    again = spread.run([plan], 2)
    text = capsys.readouterr().out
    assert text.count("GPU 0") == 2
    assert text.count(lost.shape) == 2
    assert {row.key for row in again.rows} == {row.key for row in record.rows}


def test_first_calls_of_every_kind_of_shape_are_over_before_anything_is_measured(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
):
    events = []
    jobs = []

    class Noted:
        def __init__(self, command: list[str], env: dict[str, str], **_: Any) -> None:
            cases = json.loads(command[4])
            jobs.append((command[3], cases, env["CUDA_VISIBLE_DEVICES"]))

        def wait(self, timeout: float | None = None) -> None:
            events.append("waited")

        def poll(self) -> int:
            return 0

        def kill(self) -> None:
            pass

    monkeypatch.setattr(first_calls.subprocess, "Popen", Noted)
    on_disk = {"scan": PROVIDERS["scan"]._replace(on_disk=True)}
    monkeypatch.setattr(spread, "PROVIDERS", on_disk)
    shapes = (Shape(1, 128, 1, 8), *SHAPES, Shape(1, 64, 2, 8))
    monkeypatch.setitem(SETS, "quick", shapes)
    monkeypatch.setattr(spread, "_serve", lambda *_: events.append("measured"))
    with pytest.raises(ValueError, match="no case was begun"):
        spread.run([plan], 2)
    # The last "waited" of a process is its end.
    assert events.index("measured") >= 8
    assert {name for name, _, _ in jobs} == {"scan"}
    assert [gpu for _, _, gpu in jobs] == ["0", "1", "0", "1"]
    # One and two heads, each forward and with gradients; the shortest stands for others.
    found = [(case["shape"]["heads"], case["timed"]) for _, (case,), _ in jobs]
    assert sorted(found) == [
        (heads, timed) for heads in (1, 2) for timed in ("forward", "forward+backward")
    ]
    assert {case["shape"]["time"] for _, (case,), _ in jobs} == {64}


def test_what_found_no_memory_is_measured_again(
    plan: Plan, capsys: pytest.CaptureFixture[str]
):
    assert plan.json is not None
    spread.run([plan], 1)
    part = plan.json.with_suffix(".gpu0-0.json")
    kept = results.read(part)
    failed = next(row for row in kept.rows if row.timed == "forward")
    failed.ms = None
    failed.refused = "out of memory"
    kept.write(part)
    capsys.readouterr()
    again = spread.run([plan], 1)
    assert capsys.readouterr().out.count(failed.shape) == 2
    (row,) = [row for row in again.rows if row.key == failed.key]
    assert row.ms is not None


def test_everything_holds_every_set_and_gate_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
):
    monkeypatch.setattr(everything, "unavailable", lambda name: None)
    plans = everything.plans(tmp_path / "all.json", None, 60.0)
    cases = [case for plan in plans for case in plan.cases()]
    assert len(cases) == len(set(cases))
    sets = ("readme", "paper", "fla", "fla823", "packed")
    wanted = {shape for name in sets for shape in SETS[name]}
    for op in OPS:
        some = [case for case in cases if case.op == op]
        assert {case.shape for case in some if case.gate == "production"} == wanted
        assert {case.gate for case in some} == set(GATES)


def test_one_thread_holds_the_lock(plan: Plan):
    order = []

    def other() -> None:
        with gpu_lock.gpu_lock():
            order.append("other")

    with gpu_lock.gpu_lock():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(timeout=0.2)
        order.append("first")
    thread.join()
    assert order == ["first", "other"]


def test_a_file_is_asked_for(plan: Plan):
    with pytest.raises(ValueError, match="json must name a file"):
        spread.run([Plan()], 2)
