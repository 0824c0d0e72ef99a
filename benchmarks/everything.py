"""All that docs/benchmarks.md shows of the ops, into one file: `python -m benchmarks.everything --json FILE`.

The README's shapes with every implementation, the first of them at every gate, packed shapes in the three forms
that this library has for them, and the shapes of other libraries.
"""

import argparse
import dataclasses
import functools
import pathlib
import sys

from benchmarks import report, runner, spread
from benchmarks.providers import unavailable
from benchmarks.runner import Plan
from benchmarks.shapes import GATES, OPS, README, SETS

PEERS = ("fla", "flash_qla", "flashinfer", "cudnn", "jla")
PACKED = ("pallas", "pallas_chain", "pallas_states", *PEERS)
# Those that are far behind, or compile anew for every shape, take the README's shapes alone.
README_ALONE = ("mma", "xla", "fla_kernels", "tokamax")


def plans(json: pathlib.Path, commit: str | None, seconds: float) -> list[Plan]:
    """Each with what can run here of its implementations."""
    others = [
        str(shape)
        for name in ("paper", "fla", "fla823")
        for shape in SETS[name]
        if shape not in README
    ]
    all_ = Plan(
        ops=OPS,
        passes=("backward",),
        gates=GATES[:1],
        repeats=7,
        json=json,
        commit=commit,
        seconds=seconds,
        implementations=_here("pallas", *PEERS),
    )
    change = functools.partial(dataclasses.replace, all_)
    return [
        change(
            sets=("readme",), implementations=_here("pallas", *README_ALONE, *PEERS)
        ),
        change(sets=("readme",), shapes=(str(README[0]),), gates=GATES[1:]),
        change(sets=("packed",), implementations=_here(*PACKED), repeats=3),
        change(sets=("paper", "fla", "fla823"), shapes=tuple(others), repeats=3),
    ]


def _here(*names: str) -> tuple[str, ...]:
    return tuple(name for name in names if not unavailable(name))


def main() -> None:
    """Measures, and prints the table at the end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=pathlib.Path, required=True)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--commit", help="the commit, where there is no git to ask")
    parser.add_argument(
        "--seconds",
        type=float,
        default=float("inf"),
        help="begin no case after that time; the same command goes on with what is left",
    )
    given = parser.parse_args()
    runner.share_memory()
    wanted = plans(given.json, given.commit, given.seconds)
    try:
        report.show(spread.run(wanted, given.gpus))
    except ValueError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
