"""pytest plugin: Flash Linear Attention's test files run against jfla, and a JSON record says how every case went.

Loaded with `-p fla_plugin`, so that nothing is put into the checkout; FLA's own conftest.py stays in force.
"""

import importlib
import json
import pathlib
from collections.abc import Generator
from typing import Any

import fla_table
import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", type=pathlib.Path, required=True, help="JSON to write")
    parser.addoption(
        "--implementation", choices=("pallas", "xla"), help="what jfla chooses"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Has FLA's conftest.py and tests make their tensors on the CPU where there is no GPU."""
    import torch

    if not torch.cuda.is_available():
        utils = importlib.import_module("fla.utils")
        utils.device = "cpu"
        utils.device_torch_lib = torch.cpu


def pytest_configure(config: pytest.Config) -> None:
    """Before any test module imports the ops."""
    adapter = importlib.import_module("fla_adapter")
    modules = {name: importlib.import_module(name) for name in adapter.OPS}
    adapter.install(modules, config.getoption("implementation"))
    # workers send their reports to the first process
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(config.getoption("record")))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if reason := fla_table.left_out(item.nodeid):
            item.add_marker(pytest.mark.skip(reason=fla_table.NOT_SUPPORTED + reason))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """A call that jfla has no counterpart of is a skip with the reason, not a failure."""
    adapter = importlib.import_module("fla_adapter")
    adapter.CALLS.clear()
    try:
        return (yield)
    except adapter.NotSupported as reason:
        pytest.skip(fla_table.NOT_SUPPORTED + str(reason))
    finally:
        item.user_properties.append(("calls", [list(call) for call in adapter.CALLS]))


class Recorder:
    """Collects the reports of all phases of all cases, and writes what became of each case."""

    def __init__(self, path: pathlib.Path) -> None:
        self._path = path
        self._cases: dict[str, dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        new = {"outcome": "passed", "reason": "", "seconds": 0.0, "calls": []}
        case = self._cases.setdefault(report.nodeid, new)
        if report.when == "call":
            case["seconds"] = report.duration
            case["calls"] = dict(report.user_properties).get("calls", [])
        if report.failed:
            case["outcome"] = "failed"
            case["reason"] = _error(report)
        elif report.skipped:
            case["outcome"] = "skipped"
            case["reason"] = _skip_reason(report)
        if report.when == "teardown":  # a run that is killed leaves what it had
            self._write()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            failed = {
                "outcome": "failed",
                "reason": _error(report),
                "seconds": 0.0,
                "calls": [],
            }
            self._cases[report.nodeid] = failed

    def pytest_sessionfinish(self) -> None:
        self._write()

    def _write(self) -> None:
        self._path.write_text(json.dumps(self._cases, indent=1))


def _error(report: pytest.TestReport | pytest.CollectReport) -> str:
    """The error's own line, without the traceback."""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = str(report.longrepr) if crash is None else crash.message
    lines = text.strip().splitlines() or ["no message"]
    return lines[0] if crash is not None else lines[-1]


def _skip_reason(report: pytest.TestReport) -> str:
    text = (
        report.longrepr[2]
        if isinstance(report.longrepr, tuple)
        else str(report.longrepr)
    )
    return text.removeprefix("Skipped: ")
