"""The tables of a run of FLA's tests: what counts as passed, what has a reason, and the exit status."""

import json
import os
import pathlib
import subprocess
import sys

import fla_table
import pytest
import run_fla
from fla_table import NOT_SUPPORTED, Call, Case

KERNEL = ["chunk_kda", "pallas", ""]
PORTABLE = ["chunk_kda", "xla", "K = 300"]
CHUNK = "tests/ops/test_kda.py::test_chunk[B1-T64]"
PACKED = "tests/ops/test_kda.py::test_chunk_varlen[H4-cu_seqlens[0, 15]]"
GATE = "tests/ops/test_gdn.py::test_gate[B1]"


def entry(outcome: str, *calls: list[str], reason: str = "") -> dict:
    return {"outcome": outcome, "reason": reason, "seconds": 1.5, "calls": list(calls)}


def test_a_run_with_everything_in_it():
    record = {
        CHUNK: entry("passed", KERNEL, PORTABLE),
        PACKED: entry("passed", KERNEL),
        GATE: entry("skipped", reason=NOT_SUPPORTED + "a kernel of the gate"),
        "tests/ops/test_gdn.py::test_chunk[NPU]": entry(
            "skipped", reason="needs an NPU"
        ),
        "tests/ops/test_gdn.py::test_chunk[B2]": entry("passed"),
    }
    found = fla_table.cases(record)
    outcomes = ["passed", "passed", "not supported", "skipped by FLA", "without jfla"]
    assert [case.outcome for case in found] == outcomes
    assert fla_table.exit_status(found) == 0
    text = fla_table.markdown({"device": "a CPU"}, found)
    for line in (
        "- device: a CPU",
        "5 cases: 2 passed, 1 not supported, 1 skipped by FLA, 1 without jfla.",
        "| test_kda.py::test_chunk | 1 | 1 | 0 | 0 | 1 | 1 | 1.5 |",
        "| test_gdn.py::test_gate | 1 | a kernel of the gate |",
        "| test_gdn.py::test_chunk | 1 | needs an NPU |",
        "| test_gdn.py::test_chunk | 1 | passed without a call of jfla |",
        "| chunk_kda | 1 | K = 300 | test_kda.py::test_chunk |",
    ):
        assert line in text.splitlines()
    assert "**Failed**" not in text


def test_a_failure_is_named_and_is_the_exit_status():
    record = {
        CHUNK: entry("passed", KERNEL),
        PACKED: entry("failed", KERNEL, reason="AssertionError: dq | dk"),
    }
    found = fla_table.cases(record)
    assert [case.id for case in fla_table.unexplained(found)] == [PACKED]
    assert fla_table.exit_status(found) == 1
    text = fla_table.markdown({}, found)
    assert f"| {PACKED} | 1 | AssertionError: dq \\| dk |" in text


@pytest.mark.parametrize(
    "record",
    [
        {},
        {GATE: entry("skipped", reason=NOT_SUPPORTED + "a kernel")},
        {CHUNK: entry("passed")},  # FLA's own ops were tested
    ],
)
def test_a_run_that_proves_nothing_is_no_success(record: dict):
    assert fla_table.exit_status(fla_table.cases(record)) == 1


@pytest.mark.parametrize(
    ("nodeid", "ours"),
    [
        (CHUNK, True),
        (PACKED, True),
        ("tests/ops/test_gdn.py::test_chunk_gate_in_kernel_gqa[B2]", True),
        ("tests/ops/test_kda.py::test_fused_recurrent_gate_in_kernel[B1]", True),
        (GATE, False),
        ("tests/ops/test_kda.py::test_gate[B1]", False),
        ("tests/ops/test_kda.py::test_fused_recurrent_vllm_decode[B16]", False),
        ("tests/ops/test_gdn.py::test_flash_qla_verifier_rejects", False),
        ("tests/ops/test_kda.py::test_flash_kda_chunk[B1]", False),
    ],
)
def test_what_is_left_out_is_no_more_than_is_said(nodeid: str, ours: bool):
    assert (fla_table.left_out(nodeid) is None) == ours


def test_test_of_takes_brackets_in_parameters():
    assert (
        Case(PACKED, "passed", "", 0.0, (Call(*KERNEL),)).test
        == "test_kda.py::test_chunk_varlen"
    )


def test_the_command_says_what_a_checkout_lacks(tmp_path):
    command = [sys.executable, run_fla.__file__, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "there is no" in done.stderr
    assert "test_gdn.py" in done.stderr


def test_the_environment_has_the_checkout_before_what_is_installed(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    environment = run_fla.environment(tmp_path)
    paths = environment["PYTHONPATH"].split(os.pathsep)
    assert paths[0] == str(tmp_path)
    assert paths[-1] == "/elsewhere"
    assert environment["FLA_DISABLE_BACKEND_DISPATCH"] == "1"


@pytest.mark.parametrize(("status", "returned"), [(0, 0), (2, 2), (-15, -15)])
def test_a_run_that_ended_early_is_no_success(status, returned, tmp_path, monkeypatch):
    """Though all that it had come to passed, which the files have."""
    checkout = tmp_path / "checkout"
    (checkout / "tests/ops").mkdir(parents=True)
    for name in run_fla.TESTS:
        (checkout / name).touch()

    def pytest_run(command: list[str], **_) -> subprocess.CompletedProcess:
        record = pathlib.Path(command[command.index("--record") + 1])
        record.write_text(json.dumps({CHUNK: entry("passed", KERNEL)}))
        return subprocess.CompletedProcess(command, status)

    monkeypatch.setattr(run_fla.subprocess, "run", pytest_run)
    monkeypatch.setattr(run_fla, "described", lambda *_: {"device": "a CPU"})
    out = tmp_path / "out"
    monkeypatch.setattr(sys, "argv", ["run_fla.py", str(checkout), "--out", str(out)])
    assert run_fla.main() == returned
    assert "1 cases: 1 passed." in (out / "table.md").read_text()
    assert ("not all cases" in (out / "table.md").read_text()) == (status != 0)
    assert (
        json.loads((out / "cases.json").read_text())["cases"][0]["outcome"] == "passed"
    )


@pytest.mark.parametrize(
    ("workers", "runs"), [(["-n", "4"], [["-n", "4"], []]), ([], [[]])]
)
def test_cases_without_memory_run_again_alone(workers, runs, tmp_path, monkeypatch):
    """Only where other workers held the memory; a case that fails for another reason stays failed."""
    checkout = tmp_path / "checkout"
    (checkout / "tests/ops").mkdir(parents=True)
    for name in run_fla.TESTS:
        (checkout / name).touch()
    first = {
        CHUNK: entry("failed", KERNEL, reason="AssertionError: dq"),
        PACKED: entry("failed", reason="torch.OutOfMemoryError: CUDA out of memory."),
    }
    second = {PACKED: entry("passed", KERNEL)}
    records = [first, second]
    seen = []

    def pytest_run(command: list[str], **_) -> subprocess.CompletedProcess:
        at = command.index("--record") + 1
        pathlib.Path(command[at]).write_text(json.dumps(records[len(seen)]))
        seen.append(command[at + 1 :])
        return subprocess.CompletedProcess(command, 1 - len(seen) // 2)

    monkeypatch.setattr(run_fla.subprocess, "run", pytest_run)
    monkeypatch.setattr(run_fla, "described", lambda *_: {"device": "a CPU"})
    out = tmp_path / "out"
    command = ["run_fla.py", str(checkout), "--out", str(out), *workers]
    monkeypatch.setattr(sys, "argv", command)
    assert run_fla.main() == 1
    files = [str(checkout / name) for name in run_fla.TESTS]
    tests = [files, [str(checkout / PACKED)]][: len(runs)]
    assert seen == [run + names for run, names in zip(runs, tests, strict=True)]
    outcomes = [
        case["outcome"]
        for case in json.loads((out / "cases.json").read_text())["cases"]
    ]
    assert outcomes == ["failed", "passed" if workers else "failed"]
    assert ("run again alone" in (out / "table.md").read_text()) == bool(workers)


def test_a_copy_inside_of_a_repository_has_no_commit_of_its_own(tmp_path):
    git = ["git", "-C", str(tmp_path)]
    subprocess.run([*git, "init", "-q"], check=True)
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    empty = ["commit", "-q", "--allow-empty", "-m", "first"]
    subprocess.run([*git, *identity, *empty], check=True)
    inside = tmp_path / "copy"
    inside.mkdir()
    assert run_fla.commit(inside) == "no git repository"
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True)
    assert run_fla.commit(tmp_path) == head.stdout[:10]
