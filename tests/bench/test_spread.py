"""A plan shared by several GPUs: every unit once, its passes in one file, nothing twice after an interruption."""

import json
import pathlib
import queue
import subprocess
import threading
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks import alone, ceilings, results, runner, spread
from benchmarks.ceilings import Ceilings
from benchmarks.providers import PROVIDERS
from benchmarks.runner import Plan
from benchmarks.shapes import SETS, Shape

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
    monkeypatch.setenv(alone.FILE, str(tmp_path / "gpu"))
    monkeypatch.setitem(SETS, "quick", SHAPES)
    return Plan(
        ops=("gdn",),
        passes=("backward",),
        implementations=("scan",),
        repeats=1,
        commit="abc",
        json=tmp_path / "all.json",
        first_calls_done=True,
    )


def test_units_hold_all_passes_of_an_op_shape_and_gate(plan: Plan):
    found = spread.units(plan.filled())
    assert [[case.timed for case in unit] for unit in found] == [
        ["forward", "forward+backward"]
    ] * 2
    assert [unit[0].shape for unit in found] == list(SHAPES)


def test_all_rows_come_together_and_a_second_run_measures_what_is_missing(
    plan: Plan, capsys: pytest.CaptureFixture[str]
):
    record = spread.run(plan, 2)
    assert len(record.rows) == 2 * 3
    # A backward of so few tokens can drown in noise.
    assert all(row.ms is not None for row in record.rows if row.timed != "backward")
    # Kernels were on disk, so these are no times of first calls.
    assert {row.compile_seconds for row in record.rows} == {None}
    assert plan.json is not None
    assert len(results.read(plan.json).rows) == len(record.rows)
    assert capsys.readouterr().out.count("GPU 0") == 4

    part = plan.json.with_suffix(".gpu0-0.json")
    kept = results.read(part)
    lost = next(row for row in kept.rows if row.timed == "forward+backward")
    kept.rows.remove(lost)
    kept.write(part)
    again = spread.run(plan, 2)
    text = capsys.readouterr().out
    assert text.count("GPU 0") == 2
    assert text.count(lost.shape) == 2
    assert {row.key for row in again.rows} == {row.key for row in record.rows}


def test_first_calls_are_made_on_every_gpu_before(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
):
    made = []

    def note(command: list[str], env: dict[str, str], **_: Any) -> None:
        made.append((command[3], json.loads(command[4]), env["CUDA_VISIBLE_DEVICES"]))

    monkeypatch.setattr(subprocess, "run", note)
    monkeypatch.setattr(
        spread, "PROVIDERS", {"scan": PROVIDERS["scan"]._replace(on_disk=True)}
    )
    spread._make_first_calls(plan.filled(), spread.units(plan.filled()), 2)
    assert {name for name, _, _ in made} == {"scan"}
    assert {gpu for _, _, gpu in made} == {"0", "1"}
    assert [len(todo) for _, todo, _ in made] == [2, 2]


def test_only_one_is_alone(plan: Plan):
    order = []

    def other() -> None:
        with alone.alone():
            order.append("other")

    with alone.alone():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(timeout=0.2)
        order.append("first")
    thread.join()
    assert order == ["first", "other"]


def test_a_file_is_asked_for(plan: Plan):
    with pytest.raises(ValueError, match="json must name a file"):
        spread.run(Plan(), 2)
