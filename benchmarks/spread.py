"""Plans on several GPUs: each takes the next op, shape and gate, all passes and implementations of it."""

import dataclasses
import itertools
import multiprocessing
import os
import pathlib
import queue
import tempfile
import time
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax

from benchmarks import first_calls, gpu_lock, results, runner
from benchmarks.providers import PROVIDERS
from benchmarks.results import Results
from benchmarks.runner import Plan
from benchmarks.shapes import Case

# At most, for all first calls; what is not through then compiles while others measure.
FIRST_CALLS_SECONDS = 300
# For a process that measures, of the three quarters of a GPU's memory that JAX's allocator may take: an allocator does
# not give back what its largest call took.
PROCESS_BYTES = 24e9


class Unit(NamedTuple):
    """Every pass of one op, shape and gate, because the backward is a difference; and its plan."""

    cases: tuple[Case, ...]
    plan: Plan


def run(plans: list[Plan], gpus: int) -> Results:
    """Measures plans on GPUs 0 .. `gpus` - 1 into the file that the first one names.

    First calls of what leaves kernels on disk are made before anything is measured, and not timed. Then every
    process has a file beside that one. All implementations of a unit run on one GPU within minutes; the processes
    of a GPU compile beside one another and are timed one at a time. Units whose rows are in those files are not
    measured again, so that an interrupted run goes on.
    """
    began = time.monotonic()
    whole = plans[0].json
    if whole is None:
        raise ValueError("json must name a file, got None")
    plans = [
        dataclasses.replace(plan.filled(), first_calls_made=True) for plan in plans
    ]
    parts = {
        whole.with_suffix(f".gpu{gpu}-{number}.json"): gpu
        for number in range(_processes_per_gpu())
        for gpu in range(gpus)
    }
    left = [unit for unit in units(plans) if not _is_done(unit, parts)]
    seconds = plans[0].seconds
    with first_calls.begun(_first_calls(left, gpus)) as begun:
        late = first_calls.wait(begun, min(seconds, FIRST_CALLS_SECONDS))
    print(f"{late} of {len(begun)} first calls were not through", flush=True)
    seconds -= time.monotonic() - began
    context = multiprocessing.get_context("spawn")
    waiting = context.Queue()
    for unit in left:
        waiting.put(unit)
    processes = []
    for part, gpu in parts.items():
        mine = dataclasses.replace(plans[0], json=part, seconds=seconds)
        process = context.Process(target=_serve, args=(gpu, mine, waiting))
        process.start()
        processes.append(process)
    for process in processes:
        process.join()
    waiting.cancel_join_thread()
    written = [part for part in parts if part.exists()]
    if not written:
        raise ValueError(f"no case was begun within {plans[0].seconds:.0f} s")
    return runner.merge(written, whole)


def units(plans: list[Plan]) -> list[Unit]:
    """The cases of filled plans by op, shape and gate."""
    found = []
    for plan in plans:
        together: dict[tuple, list[Case]] = {}
        for case in plan.cases():
            together.setdefault((case.op, case.shape, case.gate), []).append(case)
        found += [Unit(tuple(some), plan) for some in together.values()]
    return found


def _is_done(unit: Unit, parts: Iterable[pathlib.Path]) -> bool:
    """Whether one file holds a row of every implementation for every case of the unit.

    What found no room in the memory that other processes left is measured again.
    """
    wanted = {
        (case.op, case.timed, str(case.shape), case.gate, name)
        for case in unit.cases
        for name in unit.plan.implementations
    }
    found = [results.read(part) for part in parts if part.exists()]
    return any(
        wanted <= {row.key for row in record.rows if row.refused != "out of memory"}
        for record in found
    )


def _processes_per_gpu() -> int:
    """How many find room on one: while one measures, the others compile."""
    memory = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", 0)
    return max(1, int(memory / PROCESS_BYTES))


def _first_calls(left: list[Unit], gpus: int) -> list[first_calls.Job]:
    """One for each pass and kind of shape of what leaves kernels on disk, over the GPUs in turn.

    Kernels serve all lengths of a kind, so the shortest stands for it.
    """
    jobs: dict[tuple, Case] = {}
    for unit in sorted(left, key=lambda unit: unit.cases[0].shape.time):
        for case, name in itertools.product(unit.cases, unit.plan.implementations):
            shape = case.shape
            sizes = (shape.heads, shape.value_heads, shape.dim, shape.packing is None)
            if PROVIDERS[name].on_disk:
                jobs.setdefault((name, case.op, case.timed, *sizes), case)
    return [
        first_calls.Job(name, (case,), number % gpus)
        for number, ((name, *_), case) in enumerate(jobs.items())
    ]


def _serve(gpu: int, plan: Plan, waiting: Any) -> None:
    """One process: measures units on its GPU until none is left."""
    os.environ["CUDA_VISIBLE_DEVICES"] = str(gpu)
    os.environ[gpu_lock.FILE] = f"{tempfile.gettempdir()}/jfla-bench-gpu{gpu}"
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
