"""Plans on several GPUs: each takes the next op, shape and gate, all passes and implementations of it."""

import contextlib
import dataclasses
import itertools
import json
import multiprocessing
import os
import pathlib
import queue
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from benchmarks import alone, results, runner
from benchmarks.providers import PROVIDERS
from benchmarks.results import Results
from benchmarks.runner import Plan
from benchmarks.shapes import Case

ROOT = pathlib.Path(__file__).parents[1]  # where processes find this package
PROCESSES = 5  # of a GPU: while one measures, the others compile


class Unit(NamedTuple):
    """Every pass of one op, shape and gate, because the backward is a difference; and its plan."""

    cases: tuple[Case, ...]
    plan: Plan


def run(plans: list[Plan], gpus: int) -> Results:
    """Measures plans on GPUs 0 .. `gpus` - 1 into the file that the first one names.

    Every process has a file beside it. All implementations of a unit run on one GPU within minutes; the processes
    of a GPU compile beside one another and are timed one at a time. Units whose rows are in those files are not
    measured again, so that an interrupted run goes on. First calls are not timed: other processes had a part in
    them.
    """
    whole = plans[0].json
    if whole is None:
        raise ValueError("json must name a file, got None")
    plans = [
        dataclasses.replace(plan.filled(), first_calls_elsewhere=True) for plan in plans
    ]
    parts = {
        whole.with_suffix(f".gpu{gpu}-{number}.json"): gpu
        for number in range(PROCESSES)
        for gpu in range(gpus)
    }
    seconds = plans[0].seconds
    left = [unit for unit in units(plans) if not _is_done(unit, parts)]
    context = multiprocessing.get_context("spawn")
    waiting = context.Queue()
    for unit in left:
        waiting.put(unit)
    with first_calls_beside(left, gpus):
        processes = []
        for part, gpu in parts.items():
            mine = dataclasses.replace(plans[0], json=part)
            process = context.Process(target=_serve, args=(gpu, mine, waiting))
            process.start()
            processes.append(process)
        for process in processes:
            process.join()
    waiting.cancel_join_thread()
    written = [part for part in parts if part.exists()]
    if not written:
        raise ValueError(f"no case was begun within {seconds:.0f} s")
    return runner.merge(written, whole)


def units(plans: list[Plan]) -> list[Unit]:
    """The cases of filled plans by op, shape and gate; first those of the first op."""
    found = []
    for plan in plans:
        together: dict[tuple, list[Case]] = {}
        for case in plan.cases():
            together.setdefault((case.op, case.shape, case.gate), []).append(case)
        found += [Unit(tuple(some), plan) for some in together.values()]
    order = plans[0].ops
    return sorted(found, key=lambda unit: order.index(unit.cases[0].op))


def _is_done(unit: Unit, parts: Iterable[pathlib.Path]) -> bool:
    """Whether one file holds a row of every implementation for every case of the unit."""
    wanted = {
        (case.op, case.timed, str(case.shape), case.gate, name)
        for case in unit.cases
        for name in unit.plan.implementations
    }
    found = [results.read(part) for part in parts if part.exists()]
    return any(wanted <= {row.key for row in record.rows} for record in found)


@contextlib.contextmanager
def first_calls_beside(left: list[Unit], gpus: int) -> Iterator[list[subprocess.Popen]]:
    """Begins the first calls of what leaves kernels on disk, a process for each pass and kind of shape.

    Kernels serve all lengths of a kind, so the shortest stands for it.
    """
    jobs: dict[tuple, Case] = {}
    for unit in sorted(left, key=lambda unit: unit.cases[0].shape.time):
        for case, name in itertools.product(unit.cases, unit.plan.implementations):
            shape = case.shape
            sizes = (shape.heads, shape.value_heads, shape.dim, shape.packing is None)
            if PROVIDERS[name].on_disk:
                jobs.setdefault((name, case.op, case.timed, *sizes), case)
    processes = []
    for gpu, ((name, *_), case) in zip(itertools.cycle(range(gpus)), jobs.items()):
        text = json.dumps([dataclasses.asdict(case)])
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.first_calls", name, text],
            cwd=ROOT,
            env=os.environ | {"CUDA_VISIBLE_DEVICES": str(gpu)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,  # what fails here, the measuring process reports
        )
        processes.append(process)
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _serve(gpu: int, plan: Plan, waiting: Any) -> None:
    """One process: measures units on its GPU until none is left."""
    os.environ["CUDA_VISIBLE_DEVICES"] = str(gpu)
    os.environ[alone.FILE] = f"{tempfile.gettempdir()}/jfla-bench-gpu{gpu}"
    began = time.monotonic()

    def say(done: int, _: int, text: str) -> None:
        seconds = time.monotonic() - began
        print(f"{seconds:6.0f} s  GPU {gpu}, case {done}  {text}", flush=True)

    runner.run(plan, say, _taken(waiting))


def _taken(waiting: Any) -> Iterator[tuple[Case, Plan]]:
    """The cases of the units that this process gets."""
    while True:
        try:
            unit = waiting.get(timeout=1)
        except queue.Empty:
            return
        for case in unit.cases:
            yield case, unit.plan
