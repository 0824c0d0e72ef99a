"""`jfla bench` in the terminal: progress, table, plot, and the README's block."""

import pathlib

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from jfla.bench import readme as block
from jfla.bench import report, runner
from jfla.bench.providers import PROVIDERS, unavailable
from jfla.bench.runner import Plan

__all__ = ["Plan", "measure", "readme"]


def measure(plan: Plan, plot: pathlib.Path | None, console: Console) -> None:
    """Runs a plan. Raises `ValueError` for one that cannot be run."""
    runner.share_memory()
    plan = plan.filled()
    for name in PROVIDERS:
        if reason := unavailable(name):
            console.print(f"{name} is left out: {reason}", highlight=False)
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(f"ceilings of {jax.devices()[0].device_kind}", total=None)
        say = lambda done, total, text: progress.update(task, completed=done, total=total, description=text)
        results = runner.run(plan, say)
    report.show(results)
    if plot is not None:
        from jfla.bench.plot import draw

        draw(results, plot)
        console.print(f"Wrote {plot}", highlight=False)


def readme(what: str, console: Console) -> None:
    """Writes the README's block and plot from the newest results, or raises `ValueError` where they are not theirs."""
    results = block.current()
    if what == "check":
        if wrong := block.disagreement(block.README, results):
            raise ValueError(f"{wrong}; run: jfla bench --readme write")
        console.print("The README agrees with the newest results.")
        return
    from jfla.bench.plot import draw

    block.write(block.README, results, draw)
    console.print(f"Wrote {block.README}", highlight=False)
