"""One plan on several GPUs: each takes the next op, shape and gate, all passes and implementations of it."""

import concurrent.futures
import contextlib
import dataclasses
import functools
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
from typing import Any

from benchmarks import alone, results, runner
from benchmarks.providers import PROVIDERS
from benchmarks.results import Results
from benchmarks.runner import Plan
from benchmarks.shapes import Case, cases, chosen

ROOT = pathlib.Path(__file__).parents[1]  # where processes find this package
PROCESSES = 3  # of a GPU: two compile while one measures
FIRST_CALLS = 16  # of a GPU at the same time, a process each
FIRST_CALLS_SECONDS = 200  # after which one is given up

Unit = list[Case]  # every pass of one op, shape and gate: the backward is a difference


def run(plan: Plan, gpus: int) -> Results:
    """Measures the plan on GPUs 0 .. `gpus` - 1 and writes `plan.json`, a file of every process beside it.

    All implementations of a unit run on one GPU within minutes. The processes of a GPU compile beside one another
    and are timed one at a time. Units whose rows are in those files are not measured again, so that an interrupted
    run goes on. With `plan.first_calls_done` no process makes first calls before.
    """
    whole = plan.json
    if whole is None:
        raise ValueError("json must name a file, got None")
    plan = plan.filled()
    parts = {
        whole.with_suffix(f".gpu{gpu}-{number}.json"): gpu
        for gpu in range(gpus)
        for number in range(PROCESSES)
    }
    left = [unit for unit in units(plan) if not _is_done(unit, plan, parts)]
    if not plan.first_calls_done:
        _make_first_calls(plan, left, gpus)
    context = multiprocessing.get_context("spawn")
    waiting = context.Queue()
    for unit in left:
        waiting.put(unit)
    processes = []
    for part, gpu in parts.items():
        mine = dataclasses.replace(plan, json=part, first_calls_done=True)
        process = context.Process(target=_serve, args=(gpu, mine, waiting))
        process.start()
        processes.append(process)
    for process in processes:
        process.join()
    waiting.cancel_join_thread()
    return runner.merge([part for part in parts if part.exists()], whole)


def units(plan: Plan) -> list[Unit]:
    """The cases of a plan, those of one op, shape and gate together."""
    todo = cases(
        chosen(list(plan.sets), list(plan.shapes)),
        list(plan.ops),  # type: ignore[arg-type]
        list(plan.passes),  # type: ignore[arg-type]
        list(plan.gates),  # type: ignore[arg-type]
    )
    together: dict[tuple, Unit] = {}
    for case in todo:
        together.setdefault((case.op, case.shape, case.gate), []).append(case)
    return list(together.values())


def _is_done(unit: Unit, plan: Plan, parts: Iterable[pathlib.Path]) -> bool:
    """Whether one file holds a row of every implementation for every case of the unit."""
    wanted = {
        (case.op, case.timed, str(case.shape), case.gate, name)
        for case in unit
        for name in plan.implementations
    }
    found = [results.read(part) for part in parts if part.exists()]
    return any(wanted <= {row.key for row in record.rows} for record in found)


def _make_first_calls(plan: Plan, left: list[Unit], gpus: int) -> None:
    """Leaves compiled kernels on disk: processes beside one another make the first calls of all units."""
    # Kernels are the same for every gate.
    shapes = {(unit[0].op, unit[0].shape): unit for unit in left}
    names = [name for name in plan.implementations if PROVIDERS[name].on_disk]
    # What compiles for minutes goes first.
    names.sort(key=lambda name: not PROVIDERS[name].compiles_long)
    jobs = [(name, unit) for name in names for unit in shapes.values()]

    def make(gpu: int, job: tuple[str, Unit]) -> None:
        name, todo = job
        text = json.dumps([dataclasses.asdict(case) for case in todo])
        # What fails here, the measuring process reports.
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(
                [sys.executable, "-m", "benchmarks.first_calls", name, text],
                cwd=ROOT,
                env=os.environ | {"CUDA_VISIBLE_DEVICES": str(gpu)},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=FIRST_CALLS_SECONDS,
                check=False,
            )

    with concurrent.futures.ThreadPoolExecutor(gpus * FIRST_CALLS) as pool:
        list(pool.map(make, itertools.cycle(range(gpus)), jobs))


def _serve(gpu: int, plan: Plan, waiting: Any) -> None:
    """One process: measures units on its GPU until none is left."""
    os.environ["CUDA_VISIBLE_DEVICES"] = str(gpu)
    os.environ[alone.FILE] = f"{tempfile.gettempdir()}/jfla-bench-gpu{gpu}"
    began = time.monotonic()

    def say(done: int, _: int, text: str) -> None:
        seconds = time.monotonic() - began
        print(f"{seconds:6.0f} s  GPU {gpu}, case {done}  {text}", flush=True)

    runner.run(plan, say, functools.partial(_taken, waiting))


def _taken(waiting: Any, _: list[Case]) -> Iterator[Case]:
    """The cases of the units that this process gets."""
    while True:
        try:
            unit = waiting.get(timeout=1)
        except queue.Empty:
            return
        yield from unit
