"""Shows a run's steps as they are done: bits per token, right answers, tokens per second."""

import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from jfla.cli import data
from jfla.cli.train import Run


def train(
    training: Run,
    dataset: data.Batches,
    name: str,
    tokens: int,
    save_every: int,
    console: Console,
) -> None:
    """Shows a bar while the steps, of `tokens` each, go by; where there is no terminal, ten lines."""
    if training.step:
        console.print(f"{name}: continuing after step {training.step}")
    columns = (
        TextColumn("{task.description}", style="bold"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeRemainingColumn(compact=True),
    )
    steps = training.steps
    with Progress(*columns, console=console, speed_estimate_period=10) as progress:
        bar = progress.add_task(
            name, total=steps, completed=training.step, note="compiling"
        )
        note = _notes(progress, bar, tokens)
        for result in training.train(dataset, save_every):
            line = note(training.step, float(result.bits), float(result.accuracy))
            if not console.is_terminal and training.step % max(1, steps // 10) == 0:
                console.print(f"{name} step {training.step}: {line}")


def _notes(
    progress: Progress, bar: TaskID, tokens: int
) -> Callable[[int, float, float], str]:
    """What is written next to the bar; the speed is that since the first step, which compiles."""
    start = 0.0
    first_step: int | None = None

    def note(step: int, bits: float, accuracy: float) -> str:
        nonlocal start, first_step
        now = time.perf_counter()
        speed = "-"
        if first_step is None:
            start = now
            first_step = step
        else:
            per_second = tokens * (step - first_step) / (now - start)
            speed = f"{per_second:,.0f} tokens/s"
        line = f"{bits:.2f} bits/token  {accuracy:4.0%} right  {speed}"
        progress.update(bar, completed=step, note=line)
        return line

    return note
