"""First calls of implementations that leave their kernels on disk, made by processes of their own.

The first call of the process that measures finds the kernels there. A library that only compiles may be called beside a
measurement: a process makes each call once. One that tunes also times its kernels on the GPU, where nothing may be
measured meanwhile.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from benchmarks import inputs, providers
from benchmarks.shapes import Case, Shape

ROOT = pathlib.Path(__file__).parents[1]  # where processes find this package


class Job(NamedTuple):
    """What one process calls, in this order."""

    implementation: str
    cases: tuple[Case, ...]
    gpu: int | None = None  # of the host; None where this process has one


@contextlib.contextmanager
def begun(jobs: Iterable[Job]) -> Iterator[list[subprocess.Popen]]:
    """Begins a process for every job; ends with the block those that still run."""
    processes = [_begin(job) for job in jobs]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def wait(processes: list[subprocess.Popen], seconds: float) -> int:
    """How many processes still run when all are through or that time is over."""
    deadline = time.monotonic() + seconds
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
    return sum(process.poll() is None for process in processes)


def _begin(job: Job) -> subprocess.Popen:
    cases = json.dumps([dataclasses.asdict(case) for case in job.cases])
    gpu = {} if job.gpu is None else {"CUDA_VISIBLE_DEVICES": str(job.gpu)}
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.first_calls", job.implementation, cases],
        cwd=ROOT,
        env=os.environ | gpu,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,  # what fails, the measuring process reports
    )


def main(name: str, cases: str) -> None:
    """Makes the first call of every case that the implementation takes."""
    for fields in json.loads(cases):
        case = Case(**fields | {"shape": Shape(**fields["shape"])})
        with contextlib.suppress(Exception):
            program = providers.PROVIDERS[name].build(case)
            program.first(program.load(inputs.draw(case, 0)))
            program.release()


if __name__ == "__main__":
    main(*sys.argv[1:])
