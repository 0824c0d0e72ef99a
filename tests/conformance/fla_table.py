"""What became of Flash Linear Attention's cases: which are not jfla's and why, and the tables that a run writes."""

import collections
import dataclasses
import fnmatch
from typing import Any, Literal, NamedTuple

NOT_SUPPORTED = "not supported: "  # begins the reason of a skip that is jfla's

# By the pattern of "file::function". What is not here has to pass.
LEFT_OUT = {
    "test_kda.py::test_naive_chunk": "compares two PyTorch functions of FLA",
    "test_kda.py::test_chunk_invalid_chunk_size": "jfla has no chunk_size to be invalid",
    "test_kda.py::test_fused_recurrent_vllm_decode": (
        "calls an inner function of FLA with a paged pool of states; jfla's form of it is `state_slots`"
    ),
    "test_*.py::test_gate": "tests a kernel of FLA for the gate alone",
    "test_kda.py::test_chunk_return_intermediate_states": (
        "wants the state before every chunk in bfloat16; jfla's `return_states_every` gives those behind"
    ),
    "test_*.py::test_flash_*": "tests which kernels FLA dispatches to",
    "test_kda.py::test_triton_ascend_backend_routing": "tests which kernels FLA dispatches to",
    "test_gdn.py::test_prepare_wy_repr_bwd_no_g": "tests a kernel of FLA inside the chunk",
    "test_gdn.py::*_blackwell_triton_guard": "tests the tuning of a kernel of FLA",
}

Outcome = Literal["passed", "failed", "not supported", "skipped by FLA", "without jfla"]


class Call(NamedTuple):
    """One call of jfla: the function, the implementation, and why it was not "pallas" if it was not."""

    function: str
    implementation: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Case:
    """One parametrised case of FLA's tests."""

    id: str
    outcome: Outcome
    reason: str
    seconds: float
    calls: tuple[Call, ...]

    @property
    def test(self) -> str:
        """ "file::function"."""
        return test_of(self.id)


def test_of(nodeid: str) -> str:
    """ "file::function" of a case.

    >>> test_of("tests/ops/test_kda.py::test_chunk[B1-T64]")
    'test_kda.py::test_chunk'
    """
    return nodeid.partition("[")[0].rpartition("/")[2]


def left_out(nodeid: str) -> str | None:
    """Why a case is not one of jfla's, or None."""
    for pattern, reason in LEFT_OUT.items():
        if fnmatch.fnmatchcase(test_of(nodeid), pattern):
            return reason
    return None


def out_of_memory(record: dict[str, dict[str, Any]]) -> list[str]:
    """The ids of the failed cases whose error is PyTorch's, JAX's or CUDA's word for a lack of GPU memory."""
    words = ("out of memory", "RESOURCE_EXHAUSTED", "OutOfMemory")
    return [
        nodeid
        for nodeid, entry in record.items()
        if entry["outcome"] == "failed"
        and any(word in entry["reason"] for word in words)
    ]


def cases(record: dict[str, dict[str, Any]]) -> list[Case]:
    """The cases of a record by the plugin.

    A case that passed without a call of jfla proves nothing, and does not count as passed.
    """
    found = []
    for nodeid, entry in record.items():
        calls = tuple(Call(*call) for call in entry["calls"])
        outcome = entry["outcome"]
        reason = entry["reason"]
        if outcome == "skipped":
            ours = reason.startswith(NOT_SUPPORTED)
            outcome = "not supported" if ours else "skipped by FLA"
            reason = reason.removeprefix(NOT_SUPPORTED)
        elif outcome == "passed" and not calls:
            outcome = "without jfla"
            reason = "passed without a call of jfla"
        found.append(Case(nodeid, outcome, reason, entry["seconds"], calls))
    return found


def unexplained(found: list[Case]) -> list[Case]:
    """The cases for which there is no reason but a defect: those that failed."""
    return [case for case in found if case.outcome == "failed"]


def exit_status(found: list[Case]) -> int:
    """0 if something passed and every other case has its reason."""
    passed = any(case.outcome == "passed" for case in found)
    return 0 if passed and not unexplained(found) else 1


def markdown(head: dict[str, str], found: list[Case]) -> str:
    """The report: what was run where, the table by test, and a table of reasons of each kind."""
    count = collections.Counter(case.outcome for case in found)
    total = ", ".join(f"{number} {outcome}" for outcome, number in count.items())
    parts = [
        "\n".join(f"- {name}: {value}" for name, value in head.items()),
        f"{len(found)} cases: {total}.",
        _by_test(found),
    ]
    for title, outcome in (
        ("Failed", "failed"),
        ("Not supported", "not supported"),
        ("Skipped by FLA itself", "skipped by FLA"),
        ("Passed without a call of jfla", "without jfla"),
    ):
        chosen = [case for case in found if case.outcome == outcome]
        if chosen:
            parts.append(
                f"**{title}**\n\n{_reasons(chosen, whole=outcome == 'failed')}"
            )
    if why := _why_xla(found):
        parts.append(f'**Why "xla"**\n\n{why}')
    return "\n\n".join(parts) + "\n"


def _table(header: tuple[str, ...], rows: list[tuple[Any, ...]]) -> str:
    lines = [header, tuple("---" for _ in header), *rows]
    cells = [[str(cell).replace("|", "\\|") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def _by_test(found: list[Case]) -> str:
    tests: dict[str, list[Case]] = {}
    for case in found:
        tests.setdefault(case.test, []).append(case)
    rows = []
    for test, group in tests.items():
        outcomes = collections.Counter(case.outcome for case in group)
        calls = collections.Counter(
            call.implementation for case in group for call in case.calls
        )
        other = len(group) - outcomes["passed"] - outcomes["failed"]
        seconds = sum(case.seconds for case in group)
        counts = (len(group), outcomes["passed"], outcomes["failed"], other)
        rows.append((test, *counts, calls["pallas"], calls["xla"], f"{seconds:.1f}"))
    header = (
        "test",
        "cases",
        "passed",
        "failed",
        "other",
        'calls of "pallas"',
        'of "xla"',
        "s",
    )
    return _table(header, rows)


def _reasons(chosen: list[Case], whole: bool) -> str:
    """By test and reason; with `whole`, by case."""
    count = collections.Counter(
        (case.id if whole else case.test, case.reason) for case in chosen
    )
    rows = [(name, number, reason) for (name, reason), number in count.items()]
    return _table(("case" if whole else "test", "cases", "reason"), rows)


def _why_xla(found: list[Case]) -> str:
    tests: dict[tuple[str, str], list[str]] = {}
    for case in found:
        for call in case.calls:
            if call.implementation != "pallas":
                tests.setdefault((call.function, call.reason), []).append(case.test)
    rows = [
        (function, len(names), reason, ", ".join(dict.fromkeys(names)))
        for (function, reason), names in tests.items()
    ]
    return _table(("function", "calls", "reason", "tests"), rows) if rows else ""
