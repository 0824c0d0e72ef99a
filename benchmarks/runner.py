"""The loop: for every case the same inputs to every implementation; a row each, on disk at once."""

import dataclasses
import functools
import gc
import math
import os
import pathlib
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax

from benchmarks import ceilings, first_calls, inputs, measure, overview, results
from benchmarks.exact import Exact
from benchmarks.gpu_lock import gpu_lock
from benchmarks.inputs import Arrays
from benchmarks.programs import Program, Refused
from benchmarks.providers import PROVIDERS, unavailable
from benchmarks.results import Results, Row
from benchmarks.shapes import GATES, OPS, PASSES, SETS, Case, cases, chosen

Notify = Callable[[int, int, str], None]  # done, total, what comes next
Work = Iterable[tuple[Case, "Plan"]]  # cases, each with what the plan says of it


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to measure.

    An empty tuple is the default: every op and pass, the gate "production", the sets "paper" and "decode" on
    a GPU and "quick" elsewhere, all shapes of the sets, and every implementation that can run here;
    on a GPU that runs the kernels without "xla" and "scan", which take minutes there. The set "readme"
    alone is run with what the README shows.
    """

    sets: tuple[str, ...] = ()
    ops: tuple[str, ...] = ()
    passes: tuple[str, ...] = ()
    gates: tuple[str, ...] = ()
    implementations: tuple[str, ...] = ()
    json: pathlib.Path | None = None
    repeats: int = 0  # 0: 7 on a GPU, 3 elsewhere
    seconds: float = float("inf")  # no case is begun after that time
    commit: str | None = None  # where there is no git to ask
    shapes: tuple[str, ...] = ()  # by their names
    first_calls_made: bool = False  # by other processes; none is timed

    def cases(self) -> list[Case]:
        """What is measured, of a filled plan."""
        return cases(
            chosen(list(self.sets), list(self.shapes)),
            list(self.ops),  # type: ignore[arg-type]
            list(self.passes),  # type: ignore[arg-type]
            list(self.gates),  # type: ignore[arg-type]
        )

    def filled(self) -> "Plan":
        """With every default filled in. Raises `ValueError` naming the option at fault."""
        gpu = jax.default_backend() == "gpu"
        names = {
            "sets": tuple(SETS),
            "ops": OPS,
            "passes": PASSES,
            "gates": GATES,
            "implementations": tuple(PROVIDERS),
        }
        for option, known in names.items():
            for value in getattr(self, option):
                if value not in known:
                    raise ValueError(
                        f"{option} must be among {', '.join(known)}, got {value!r}"
                    )
        for name in self.implementations:
            if reason := unavailable(name):
                raise ValueError(f"implementation {name} cannot run here: {reason}")
        return dataclasses.replace(
            self,
            sets=self.sets or (("paper", "decode") if gpu else ("quick",)),
            ops=self.ops or OPS,
            passes=self.passes
            or (PASSES if gpu else PASSES[:4]),  # the stages are kernels
            gates=self.gates or ("production",),
            implementations=self.implementations or _default_implementations(self.sets),
            repeats=self.repeats or (7 if gpu else 3),
        )


def _default_implementations(sets: tuple[str, ...]) -> tuple[str, ...]:
    """All that can run here and take no minutes; for the README's set alone those that it shows."""
    hopper = str(getattr(jax.devices()[0], "compute_capability", None)) == "9.0"
    slow = ("xla", "scan") if hopper else ()
    asked_for = ("mma", "pallas_chain", "pallas_states", *slow)
    known = overview.NAMES if sets == ("readme",) else PROVIDERS
    return tuple(
        name for name in known if name not in asked_for and not unavailable(name)
    )


def share_memory() -> None:
    """Leaves peers their part of the GPU's memory. To be called before the GPU is first used."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def run(plan: Plan, notify: Notify, work: Work | None = None) -> Results:
    """Measures all that the plan asks for; or `work`, which goes into the same file.

    Rows that `plan.json` holds already are kept, unless measured again. Raises `ValueError` for a
    plan that cannot be run.
    """
    share_memory()
    began = time.monotonic()
    plan = plan.filled()
    todo = plan.cases()
    with gpu_lock():
        best = ceilings.measured(plan.repeats)
    record = results.started(best, plan.commit, plan.json)
    exact = Exact(gradients="forward+backward" in {case.timed for case in todo})
    jobs = [
        first_calls.Job(name, tuple(todo))
        for name in plan.implementations
        if PROVIDERS[name].compiles_beside and not plan.first_calls_made
    ]
    with first_calls.begun(jobs):
        for number, (case, part) in enumerate(work or [(x, plan) for x in todo]):
            if time.monotonic() - began > plan.seconds:
                left = len(todo) - number
                text = f"stopped after {plan.seconds:.0f} s, {left} cases left"
                notify(number, len(todo), text)
                break
            say = functools.partial(notify, number, len(todo))
            for row in _case_rows(case, part, record, exact, say):
                if part.first_calls_made:
                    row.compile_seconds = None
                record.add(row)
            if plan.json is not None:
                record.write(plan.json)
    return record


def merge(paths: list[pathlib.Path], json: pathlib.Path | None) -> Results:
    """Puts several runs of one device, date and commit together, and writes them to `json`."""
    record = results.merged(paths)
    if json is not None:
        record.write(json)
    return record


def turns(names: tuple[str, ...]) -> tuple[str, ...]:
    """The order in which implementations take a case: ours between one half of the peers and the
    other, so that a clock that drifts within a run favours nobody.

    >>> turns(("pallas", "fla", "flash_qla", "cudnn", "jla"))
    ('fla', 'flash_qla', 'pallas', 'cudnn', 'jla')
    """
    ours = [name for name in names if PROVIDERS[name].ours]
    peers = [name for name in names if not PROVIDERS[name].ours]
    half = (len(peers) + 1) // 2
    return (*peers[:half], *ours, *peers[half:])


def _case_rows(
    case: Case, plan: Plan, record: Results, exact: Exact, say: Callable[[str], None]
) -> list[Row]:
    """The rows of one case, and the backward's where its second half is there."""
    try:
        with gpu_lock():
            arrays = _drawn(case)
            exact.begin(case, arrays[0])
    # A case may be too large for this device; the others are worth having.
    except Exception as failure:
        return [_refused(case, name, failure) for name in plan.implementations]
    forwards = {
        row.implementation: row
        for row in record.rows
        if row.key[:4] == (case.op, "forward", str(case.shape), case.gate)
        and row.ms is not None
    }
    rows = []
    for name in turns(plan.implementations):
        say(f"{case}: {name}")
        row = _row(case, name, arrays, plan.repeats, record, exact)
        rows.append(row)
        if case.timed == "forward+backward" and row.ms is not None and name in forwards:
            rows.append(
                results.backward_row(case, forwards[name], row, record.ceilings)
            )
        gc.collect()
    return rows


def _drawn(case: Case) -> list[Arrays]:
    """As many sets of inputs as the timing rotates through."""
    first = inputs.draw(case, 0)
    sets = measure.input_sets(inputs.size(first), jax.default_backend() == "gpu")
    return [first, *(inputs.draw(case, seed) for seed in range(1, sets))]


def _row(
    case: Case,
    name: str,
    arrays: list[Arrays],
    repeats: int,
    record: Results,
    exact: Exact,
) -> Row:
    try:
        program = PROVIDERS[name].build(case)
        try:
            return _measured(case, name, program, arrays, repeats, record, exact)
        finally:
            program.release()
    # A peer or the compiler may fail; the other rows are worth having.
    except Exception as failure:
        return _refused(case, name, failure)


def _refused(case: Case, name: str, reason: Exception) -> Row:
    row = Row(case.op, case.timed, str(case.shape), case.gate, name)
    if isinstance(reason, Refused | NotImplementedError):
        row.refused = _first_line(reason)
        return row
    text = f"{type(reason).__name__}: {reason}"
    memory = (
        "RESOURCE_EXHAUSTED" in text or "OutOfMemory" in text or "out of memory" in text
    )
    row.refused = "out of memory" if memory else f"failed: {_first_line(text)}"
    return row


def _measured(
    case: Case,
    name: str,
    program: Program,
    arrays: list[Arrays],
    repeats: int,
    record: Results,
    exact: Exact,
) -> Row:
    with gpu_lock():
        loaded: list[Any] = [program.load(x) for x in arrays]
    # Compiled before the GPU is taken, or other processes would wait for that. A library that times kernels
    # while it compiles does so in its first call below, alone on the GPU.
    if PROVIDERS[name].compiles_beside:
        program.first(loaded[0])
    elif not PROVIDERS[name].tunes:
        program.compile(loaded[0])
    exact.wait()
    with gpu_lock():
        found = program.first(loaded[0])
        errors = exact.errors(case, arrays[0], program, found)
        del found
        wrong = [name for name, error in errors.items() if not math.isfinite(error)]
        if wrong:
            raise ArithmeticError(f"not finite: {', '.join(wrong)}")
        time_ = measure.timing(program, program.wait, loaded, repeats)
    row = results.timed_row(case, name, time_, record.ceilings)
    row.errors = errors
    # Another process made that call first.
    if not PROVIDERS[name].compiles_beside:
        row.compile_seconds = program.compile_seconds
    row.peak_mib = None if program.peak_bytes is None else program.peak_bytes / 2**20
    return row


def _first_line(text: object) -> str:
    lines = str(text).strip().splitlines() or [type(text).__name__]
    return lines[0][:200]
