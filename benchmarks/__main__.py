"""`python -m benchmarks`: the command for machines without the packages of the extra `cli`."""

import argparse
import pathlib
import sys
import time

from benchmarks import report, runner, spread
from benchmarks.providers import PROVIDERS, unavailable
from benchmarks.shapes import GATES, OPS, PASSES, SETS


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    several = {"nargs": "+", "default": []}
    add = parser.add_argument
    add(
        "--set",
        **several,
        choices=list(SETS),
        help="paper and decode on a GPU, else quick",
    )
    add("--shapes", **several, help="of the sets, by name: 'B1 T8192 H32 D128'; all")
    add("--ops", **several, choices=OPS)
    add("--passes", **several, choices=PASSES)
    add("--gates", **several, choices=GATES, help="production")
    add(
        "--implementations", **several, choices=list(PROVIDERS), help="all that can run"
    )
    add(
        "--json",
        type=pathlib.Path,
        help="written after every case; rows in it are kept",
    )
    add("--repeats", type=int, default=0)
    add(
        "--seconds",
        type=float,
        default=float("inf"),
        help="begin no case after that time",
    )
    add("--gpus", type=int, default=1, help="share the cases between so many")
    add("--commit", help="the commit, where there is no git to ask")
    add(
        "--merge",
        nargs="+",
        type=pathlib.Path,
        help="measure nothing; put these into --json",
    )
    return parser.parse_args()


def main() -> None:
    """Runs, prints a line per measurement and the table at the end."""
    arguments = _arguments()
    began = time.monotonic()
    if arguments.merge:
        report.show(runner.merge(arguments.merge, arguments.json))
        return
    runner.share_memory()
    plan = runner.Plan(
        sets=tuple(arguments.set),
        ops=tuple(arguments.ops),
        passes=tuple(arguments.passes),
        gates=tuple(arguments.gates),
        implementations=tuple(arguments.implementations),
        json=arguments.json,
        repeats=arguments.repeats,
        seconds=arguments.seconds,
        commit=arguments.commit,
        shapes=tuple(arguments.shapes),
    )
    for name in PROVIDERS:
        if reason := unavailable(name):
            print(f"{name} is left out: {reason}")

    def say(done: int, total: int, text: str) -> None:
        print(f"{time.monotonic() - began:6.0f} s  {done}/{total}  {text}", flush=True)

    try:
        several = arguments.gpus > 1
        results = (
            spread.run([plan], arguments.gpus) if several else runner.run(plan, say)
        )
    except ValueError as error:
        sys.exit(f"error: {error}")
    report.show(results)


# Processes of `spread` import this module.
if __name__ == "__main__":
    main()
