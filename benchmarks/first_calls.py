"""First calls of implementations that compile for minutes, made by a process of their own while others are measured.

The process leaves its kernels on disk, where the first call of the measuring process finds them. On
the GPU it runs each call once.
"""

import contextlib
import dataclasses
import json
import pathlib
import subprocess
import sys
from collections.abc import Iterator

from benchmarks import inputs, providers
from benchmarks.shapes import Case, Shape

ROOT = pathlib.Path(__file__).parents[1]  # where the process finds this package


@contextlib.contextmanager
def in_the_background(name: str, todo: list[Case]) -> Iterator[subprocess.Popen]:
    """Begins the first calls of one implementation, in the order of the cases; ends them with the block."""
    cases = json.dumps([dataclasses.asdict(case) for case in todo])
    command = [sys.executable, "-m", "benchmarks.first_calls", name, cases]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def main(name: str, cases: str) -> None:
    """Makes the first call of every case that the implementation takes."""
    for fields in json.loads(cases):
        case = Case(**fields | {"shape": Shape(**fields["shape"])})
        # What it does not take, and what fails, the measuring process reports.
        with contextlib.suppress(Exception):
            program = providers.PROVIDERS[name].build(case)
            program.first(program.load(inputs.draw(case, 0)))
            program.release()


if __name__ == "__main__":
    main(*sys.argv[1:])
