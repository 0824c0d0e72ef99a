"""First calls of what compiles for long: made by another process with the run's cases, which is gone with the run."""

import subprocess
import sys
from typing import Any

import pytest

from benchmarks import ceilings, first_calls, providers, runner
from benchmarks.ceilings import Ceilings
from benchmarks.programs import Program, Refused, Results
from benchmarks.providers import PROVIDERS, Provider
from benchmarks.runner import Plan
from benchmarks.shapes import SETS, Case, Shape

TINY = Shape(1, 64, 1, 8)
CASES = [Case("gdn", timed, TINY) for timed in ("forward", "forward+backward")]


def test_a_run_has_the_first_calls_begun_elsewhere(monkeypatch: pytest.MonkeyPatch):
    scan = PROVIDERS["scan"]._replace(on_disk=True, tunes=False)
    monkeypatch.setattr(runner, "PROVIDERS", {"scan": scan})
    monkeypatch.setattr(providers, "PROVIDERS", runner.PROVIDERS)
    monkeypatch.setattr(ceilings, "measured", lambda repeats: Ceilings(2.0, 100.0))
    monkeypatch.setitem(SETS, "quick", (TINY,))
    commands = []
    processes = []
    popen = subprocess.Popen

    def sleeping(command: list[str], **options: Any) -> subprocess.Popen:
        if "benchmarks.first_calls" not in command:
            return popen(command, **options)
        commands.append(command)
        sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
        processes.append(popen(sleep, **options))
        return processes[0]

    monkeypatch.setattr(subprocess, "Popen", sleeping)
    plan = Plan(ops=("gdn",), passes=("backward",), repeats=1, commit="abc")
    row, *_ = runner.run(plan, lambda *_: None).rows
    assert row.ms is not None
    # Another process had a part in it.
    assert row.compile_seconds is None
    assert processes[0].returncode is not None
    (command,) = commands
    assert command[1:4] == ["-m", "benchmarks.first_calls", "scan"]
    built = []
    monkeypatch.setattr(
        providers, "PROVIDERS", {"scan": Provider(lambda case: built.append(case))}
    )
    first_calls.main(*command[3:])
    assert built == CASES


def test_waiting_ends_with_the_time(monkeypatch: pytest.MonkeyPatch):
    popen = subprocess.Popen

    def sleeping(command: list[str], env: dict[str, str], **options: Any):
        seconds = {"0": 0, "1": 600}[env["CUDA_VISIBLE_DEVICES"]]
        sleep = f"import time; time.sleep({seconds})"
        return popen([sys.executable, "-c", sleep], **options)

    monkeypatch.setattr(subprocess, "Popen", sleeping)
    jobs = [first_calls.Job("scan", tuple(CASES), gpu) for gpu in (0, 1)]
    with first_calls.begun(jobs) as processes:
        assert first_calls.wait(processes, 5.0) == 1
        assert processes[0].returncode == 0
    assert processes[1].returncode != 0


def test_a_call_that_fails_leaves_the_others_their_turn(
    monkeypatch: pytest.MonkeyPatch,
):
    called = []

    class Noting:
        def load(self, arrays: Any) -> Any:
            return arrays

        def first(self, loaded: Any) -> Results:
            called.append(sorted(loaded))
            return {}

        def release(self) -> None:
            called.append("released")

    def build(case: Case) -> Program:
        if case.timed == "forward":
            raise Refused("forward")
        return Noting()  # type: ignore[return-value]

    monkeypatch.setattr(providers, "PROVIDERS", {"some": Provider(build)})
    fields = [vars(case) | {"shape": vars(TINY)} for case in CASES]
    first_calls.main("some", first_calls.json.dumps(fields))
    assert called == [["beta", "do", "g", "k", "q", "v"], "released"]
