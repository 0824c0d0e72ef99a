"""`python -m jfla.bench`: the command for machines without the packages of the extra `cli`."""

import argparse
import pathlib
import sys
import time

from jfla.bench import report, runner
from jfla.bench.providers import PROVIDERS, unavailable
from jfla.bench.shapes import GATES, OPS, PASSES, SETS


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m jfla.bench", description=__doc__)
    parser.add_argument(
        "--set", nargs="+", default=[], choices=list(SETS), help="paper and decode on a GPU, else quick"
    )
    parser.add_argument("--shapes", nargs="+", default=[], help="of the sets, by name: 'B1 T8192 H32 D128'; all")
    parser.add_argument("--ops", nargs="+", default=[], choices=OPS)
    parser.add_argument("--passes", nargs="+", default=[], choices=PASSES)
    parser.add_argument("--gates", nargs="+", default=[], choices=GATES, help="strong")
    parser.add_argument("--implementations", nargs="+", default=[], choices=list(PROVIDERS), help="all that can run")
    parser.add_argument("--json", type=pathlib.Path, help="written after every case; rows it holds already are kept")
    parser.add_argument("--repeats", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no case after that time")
    parser.add_argument("--commit", help="the commit, where there is no git to ask")
    parser.add_argument(
        "--merge", nargs="+", type=pathlib.Path, help="measure nothing; write these files' rows to --json"
    )
    return parser.parse_args()


def main() -> None:
    """Runs, prints a line per measurement and the table at the end."""
    a, began = _arguments(), time.monotonic()
    if a.merge:
        report.show(runner.merge(a.merge, a.json))
        return
    runner.share_memory()
    plan = runner.Plan(
        tuple(a.set), tuple(a.ops), tuple(a.passes), tuple(a.gates), tuple(a.implementations), a.json, a.repeats,
        a.seconds, a.commit, tuple(a.shapes),
    )  # fmt: skip
    for name in PROVIDERS:
        if reason := unavailable(name):
            print(f"{name} is left out: {reason}")
    say = lambda done, total, text: print(f"{time.monotonic() - began:6.0f} s  {done}/{total}  {text}", flush=True)
    try:
        results = runner.run(plan, say)
    except ValueError as error:
        sys.exit(f"error: {error}")
    report.show(results)


main()
