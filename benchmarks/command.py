"""What `jfla bench` does in the terminal: progress, table, plot, and the generated pages."""

import pathlib

import jax
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)

from benchmarks import pages, report, runner
from benchmarks.providers import PROVIDERS, unavailable
from benchmarks.runner import Plan


def measure(plan: Plan, plot: pathlib.Path | None, console: Console) -> None:
    """Runs a plan. Raises `ValueError` for one that cannot be run."""
    runner.share_memory()
    plan = plan.filled()
    for name in PROVIDERS:
        if reason := unavailable(name):
            console.print(f"{name} is left out: {reason}", highlight=False)
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(
            f"ceilings of {jax.devices()[0].device_kind}", total=None
        )

        def say(done: int, total: int, text: str) -> None:
            progress.update(task, completed=done, total=total, description=text)

        results = runner.run(plan, say)
    report.show(results)
    if plot is not None:
        from benchmarks.plot import draw_results

        draw_results(results, plot)
        console.print(f"Wrote {plot}", highlight=False)


def merge(files: list[pathlib.Path], out: pathlib.Path) -> None:
    """Puts several runs into one file. Raises `ValueError` where they do not belong together."""
    report.show(runner.merge(files, out))


def readme(what: str, console: Console) -> None:
    """Writes the generated pages from the newest results; or, to "check" them, raises `ValueError`
    where they are not theirs.
    """
    results = pages.current()
    if what == "check":
        if wrong := pages.disagreement(pages.REPOSITORY, results):
            raise ValueError(f"{wrong}; run: jfla bench --readme write")
        console.print(
            "The README and docs/benchmarks.md agree with the newest results."
        )
        return
    from benchmarks.plot import draw_curves, draw_overview

    pages.write(pages.REPOSITORY, results, draw_overview, draw_curves)
    site = pages.REPOSITORY
    for path in (site.readme, site.tables, site.earlier, site.picture):
        console.print(f"Wrote {path}", highlight=False)
