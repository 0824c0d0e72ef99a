"""The run: draws calls, gives each several sets of numbers, counts, and writes the first failure.

A call is compiled for every draw, which takes most of the time; its cases are cheap beside that.
"""

import argparse
import collections
import contextlib
import dataclasses
import gc
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

import jfla
from benchmarks.results import current_commit
from benchmarks.soak.cases import (
    CPU_SIZES,
    GPU_SIZES,
    INTERPRETED_SIZES,
    Case,
    Sizes,
    draw_arrays,
    draw_call,
    draw_numbers,
)
from benchmarks.soak.check import Checked
from benchmarks.soak.computed import Refused, taken

ROOT = pathlib.Path(__file__).resolve().parents[2]
CALLS_KEPT = 50  # compiled calls that JAX keeps before they are dropped
SAY_EVERY = 60.0  # seconds


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to run. No case is begun after `minutes`, or after `cases` where that is given."""

    minutes: float = 60.0
    seed: int = 0
    implementation: str | None = None  # None: the one that a user's call takes
    cases: int | None = None
    each: int = 4  # cases of every compiled call
    # kernels run on the CPU in interpret mode, a few small cases a minute
    interpret: bool = False
    mma: bool = False  # the kernels of mma.sync, on a Hopper GPU too
    out: pathlib.Path = pathlib.Path("soak_failure.py")


@dataclasses.dataclass
class Tally:
    """What a run has seen."""

    cases: int = 0
    failures: int = 0
    by: collections.Counter[str] = dataclasses.field(
        default_factory=collections.Counter
    )
    refused: collections.Counter[str] = dataclasses.field(
        default_factory=collections.Counter
    )

    def rate(self, seconds: float) -> str:
        """Cases, how many a minute, failures."""
        a_minute = 60 * self.cases / max(seconds, 1e-9)
        return f"{self.cases} cases, {a_minute:.1f} a minute, {self.failures} failed"


def run(plan: Plan, say: Callable[[str], Any] = print) -> Tally:
    """Runs cases until the time is over, and says what it saw."""
    sizes = GPU_SIZES if jax.default_backend() == "gpu" else CPU_SIZES
    sizes = INTERPRETED_SIZES if plan.interpret else sizes
    rng = np.random.default_rng(plan.seed)
    tally = Tally()
    began = time.monotonic()
    said = began
    say(f"seed {plan.seed}, {jax.devices()[0].device_kind}, commit {current_commit()}")
    while not _over(plan, tally, began):
        with _mode(plan.interpret, plan.mma):
            _one_call(plan, sizes, rng, tally, began, say)
        if time.monotonic() - said >= SAY_EVERY:
            said = time.monotonic()
            say(f"{(said - began) / 60:6.1f} min  {tally.rate(said - began)}")
    say(f"seed {plan.seed}: {tally.rate(time.monotonic() - began)}")
    for name, number in sorted(tally.by.items()):
        say(f"{number:8}  {name}")
    for reason, number in tally.refused.most_common():
        say(f"{number:8}  calls not taken: {reason}")
    return tally


@contextlib.contextmanager
def _mode(interpret: bool, mma: bool) -> Iterator[None]:
    with contextlib.ExitStack() as modes:
        if interpret:
            modes.enter_context(jfla.pallas.interpret())
        if mma:
            modes.enter_context(jfla.pallas.mma_kernels())
        yield


def _over(plan: Plan, tally: Tally, began: float) -> bool:
    enough = plan.cases is not None and tally.cases >= plan.cases
    return enough or time.monotonic() - began >= 60 * plan.minutes


def _one_call(
    plan: Plan,
    sizes: Sizes,
    rng: np.random.Generator,
    tally: Tally,
    began: float,
    say: Callable[[str], Any],
) -> None:
    call = draw_call(rng, sizes, jax.device_count())
    drawn = [Case(call, draw_numbers(rng)) for _ in range(plan.each)]
    try:
        name = taken(call, plan.implementation, draw_arrays(drawn[0]))
    except Refused as reason:
        tally.refused[str(reason)] += 1
        return
    checked = Checked(call, plan.implementation)
    for case in drawn:
        if _over(plan, tally, began):
            break
        wrong = checked.problems(case.numbers)
        tally.cases += 1
        tally.by[f"{call.form}_{call.op} by {name}, {call.transform}"] += 1
        if wrong:
            tally.failures += 1
            say(f"failed: {case}\n  " + "\n  ".join(wrong))
            if tally.failures == 1:
                write_failure(plan, case, wrong)
                say(f"wrote {plan.out}")
    if sum(tally.by.values()) // plan.each % CALLS_KEPT == 0:
        jax.clear_caches()
        gc.collect()


_FAILURE = '''"""A failure of a soak run, shown again by running this file: exit status 1 while it is one.

Commit {commit}, JAX {jax}, {device}, seed {seed}.

{wrong}
"""

import sys

sys.path.insert(0, {root!r})

from benchmarks.soak import Call, Case, Numbers, reproduce

CASE = {case}

if __name__ == "__main__":
    sys.exit(reproduce(CASE, {implementation!r}, interpret={interpret}, mma={mma}))
'''


def write_failure(plan: Plan, case: Case, wrong: list[str]) -> None:
    """Writes a case as a Python file that needs this clone alone."""
    text = _FAILURE.format(
        commit=current_commit(),
        jax=jax.__version__,
        device=jax.devices()[0].device_kind,
        seed=plan.seed,
        wrong="\n".join(wrong).replace("\\", "/").replace('"""', "'''"),
        root=str(ROOT),
        case=case,
        implementation=plan.implementation,
        interpret=plan.interpret,
        mma=plan.mma,
    )
    plan.out.write_text(text)


def reproduce(
    case: Case,
    implementation: str | None = None,
    *,
    interpret: bool = False,
    mma: bool = False,
) -> int:
    """Runs one case and prints what is wrong with it: 1 if anything is, else 0."""
    with _mode(interpret, mma):
        wrong = Checked(case.call, implementation).problems(case.numbers)
    print(case, *(wrong or ["nothing is wrong"]), sep="\n  ")
    return int(bool(wrong))


def main(arguments: list[str] | None = None) -> int:
    """The command: 1 if a case failed, or none was run."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.soak", description=__doc__
    )
    add = parser.add_argument
    add(
        "--minutes",
        type=float,
        default=Plan.minutes,
        help="begin no case after that time; 60",
    )
    add("--seed", type=int, default=Plan.seed, help="0")
    add(
        "--implementation",
        choices=("pallas", "xla"),
        help="by name; that which a user gets",
    )
    add(
        "--interpret", action="store_true", help="kernels on the CPU, in interpret mode"
    )
    add(
        "--mma",
        action="store_true",
        help="the kernels of mma.sync, on a Hopper GPU too",
    )
    add("--cases", type=int, help="stop after so many")
    add("--each", type=int, default=Plan.each, help="cases of every compiled call; 4")
    add("--out", type=pathlib.Path, default=Plan.out, help="of the first failure")
    tally = run(
        Plan(**vars(parser.parse_args(arguments))), lambda text: print(text, flush=True)
    )
    return int(tally.failures > 0 or tally.cases == 0)
