"""`jfla demo`: trains one model on Python's own source and one on associative recall, and shows what they learned."""

import dataclasses
import functools
import json
import pathlib
import time
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import grain
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import UInt8
from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from jfla._types import Implementation
from jfla.cli import choice, data, plot
from jfla.cli.train import Curves, Run, Settings, evaluate

SAVE_EVERY = 25
_EVALUATED = 16  # batches
_PROMPT, _SAMPLED = "def ", 400
_NAMES = {"kda": "Kimi Delta Attention", "gdn": "Gated DeltaNet"}


class Refused(ValueError):
    """An option that cannot be had; `option` is its name."""

    def __init__(self, option: str, message: str):
        super().__init__(message)
        self.option = option


class Task(NamedTuple):
    """What one model learns, and the batches that it is judged by afterwards."""

    name: str
    train: grain.MapDataset[data.Batch]
    test: grain.MapDataset[data.Batch]


def run(
    op: Literal["kda", "gdn"],
    steps: int,
    out: pathlib.Path,
    implementation: Implementation | None,
    seed: int,
    console: Console,
    settings: Settings | None = None,
) -> dict[str, Any]:
    """Trains, or goes on training, until both models have done `steps` steps; returns and shows the results."""
    settings = settings or Settings(op=op, seed=seed)
    _check_implementation(settings, implementation)
    claim(out, settings)
    results_path = out / "results.json"
    if results_path.exists() and (results := json.loads(results_path.read_text()))["steps"] >= steps:
        console.print(f"{out} holds a finished run of {results['steps']} steps; a larger --steps goes on from there.")
        _show(console, results, out)
        return results
    started = time.perf_counter()
    corpus = _corpus(console)
    console.print(f"{_NAMES[op]}, {steps} steps of text ({corpus.files} files of Python's own source) and of recall")
    results: dict[str, Any] = {"steps": steps, "byte_entropy": _entropy(corpus.train)}
    curves: dict[str, Curves] = {}
    for task in _tasks(settings, corpus, steps):
        training = Run(settings, steps, out / task.name, implementation)
        try:
            _train(training, task, settings, console)
        finally:
            training.close()
        test = evaluate(training.model, task.test)
        results[task.name] = {name: float(value) for name, value in test._asdict().items()}
        results["steps"] = max(results["steps"], training.step)
        curves[task.name] = training.curves
        if task.name == "text":
            results["sample"] = _sample(training.model, settings.seed)
            results["parameters"] = sum(x.size for x in jax.tree.leaves(nnx.state(training.model, nnx.Param)))
    results["seconds"] = time.perf_counter() - started
    title = f"{_NAMES[op]}, {results['parameters'] / 1e6:.2f} M parameters, {results['steps']} steps"
    plot.draw(
        out / "loss.png",
        title,
        text=curves["text"]["bits"],
        byte_entropy=results["byte_entropy"],
        recall=curves["recall"]["accuracy"],
        chance=1 / data.SYMBOLS,
    )
    _write(results_path, results)
    _show(console, results, out)
    return results


def _corpus(console: Console) -> data.Corpus:
    try:
        return data.load_corpus()
    except FileNotFoundError as error:
        console.print(f"[red]{error}")
        raise SystemExit(1) from None


def claim(out: pathlib.Path, settings: Settings) -> None:
    """Makes the folder this run's own: new, empty, or begun under the same settings."""
    wanted = dataclasses.asdict(settings)
    path = out / "run.json"
    if path.exists():
        found = json.loads(path.read_text())
        if found != wanted:
            other = ", ".join(f"{name} = {value}" for name, value in found.items() if wanted.get(name) != value)
            raise Refused("out", f"{out} holds a run with {other}: give another folder or remove this one")
        return
    if out.exists() and any(not child.name.startswith(".") for child in out.iterdir()):
        raise Refused("out", f"{out} is not empty and not a folder of this demo: give another one")
    out.mkdir(parents=True, exist_ok=True)
    _write(path, wanted)


def _check_implementation(settings: Settings, implementation: Implementation | None) -> None:
    lengths: dict[choice.Form, int] = {"chunk": settings.time, "recurrent": 1}
    for form, length in lengths.items():
        shapes = choice.shapes(settings.op, settings.rows, length, settings.num_heads, settings.head_dim, jnp.float32)
        if implementation == "pallas" and (why := choice.reason(settings.op, form, shapes)):
            raise Refused("implementation", f"pallas cannot run this model here: {why}")


def _tasks(settings: Settings, corpus: data.Corpus, steps: int) -> list[Task]:
    """Text and recall; what they are judged by comes from held-out files and from another seed."""
    sizes = {"rows": settings.rows, "time": settings.time}
    recall = functools.partial(data.recall_rows, **sizes)
    text, held_out = (functools.partial(data.text_rows, text=part, **sizes) for part in (corpus.train, corpus.held_out))
    train_seed, test_seed = map(int, np.random.SeedSequence(settings.seed).generate_state(2))
    return [
        Task("text", data.batches(text, steps, train_seed), data.batches(held_out, _EVALUATED, test_seed)),
        Task("recall", data.batches(recall, steps, train_seed), data.batches(recall, _EVALUATED, test_seed)),
    ]


def _train(training: Run, task: Task, settings: Settings, console: Console) -> None:
    """Shows a bar while the steps go by; where there is no terminal, ten lines."""
    if training.step:
        console.print(f"{task.name}: continuing after step {training.step}")
    columns = (
        TextColumn("{task.description}", style="bold"), BarColumn(), MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"), TimeRemainingColumn(compact=True),
    )  # fmt: skip
    with Progress(*columns, console=console, speed_estimate_period=10) as progress:
        bar = progress.add_task(task.name, total=training.steps, completed=training.step, note="compiling")
        note = _notes(progress, bar, settings.rows * settings.time)
        for result in training.train(task.train, SAVE_EVERY):
            line = note(training.step, float(result.bits), float(result.accuracy))
            if not console.is_terminal and training.step % max(1, training.steps // 10) == 0:
                console.print(f"{task.name} step {training.step}: {line}")


def _notes(progress: Progress, bar: TaskID, tokens: int) -> Callable[[int, float, float], str]:
    """What is written next to the bar; the speed is that since the first step, which compiles."""
    began: list[tuple[float, int]] = []

    def note(step: int, bits: float, accuracy: float) -> str:
        began.append((time.perf_counter(), step))
        (start, first), (now, _) = began[0], began[-1]
        speed = f"{tokens * (step - first) / (now - start):,.0f} tokens/s" if step > first else "-"
        line = f"{bits:.2f} bits/token  {accuracy:4.0%} right  {speed}"
        progress.update(bar, completed=step, note=line)
        return line

    return note


def _sample(model: Any, seed: int) -> str:
    """Text that the model writes behind `_PROMPT`, one byte at a time with a carried state."""
    prompt = jnp.array([list(_PROMPT.encode())])
    tokens = model.generate(prompt, _SAMPLED, key=jax.random.key(seed), temperature=0.7, top_k=40)
    return _PROMPT + bytes(np.asarray(tokens[0], np.uint8)).decode("ascii", errors="replace")


def _entropy(text: UInt8[np.ndarray, " n"]) -> float:
    """Bits per byte for who knows only how often each byte occurs."""
    frequency = np.bincount(text) / len(text)
    frequency = frequency[frequency > 0]
    return float(-np.sum(frequency * np.log2(frequency)))


def _show(console: Console, results: dict[str, Any], out: pathlib.Path) -> None:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    text, recall = results["text"], results["recall"]
    table.add_row(
        "text, held-out files",
        f"[bold]{text['bits']:.2f} bits per byte",
        f"{text['accuracy']:.0%} of next bytes right; byte frequencies alone: {results['byte_entropy']:.2f} bits",
    )
    table.add_row(
        "recall, new rows",
        f"[bold]{recall['accuracy']:.1%} right",
        f"{data.PAIRS} pairs per row, guessing: {1 / data.SYMBOLS:.1%}",
    )
    table.add_row(
        "model", f"{results['parameters']:,} parameters", f"{results['steps']} steps, {results['seconds']:.0f} s"
    )
    table.add_row("curve", str(out / "loss.png"))
    sample = Panel(
        Text(results["sample"]), title="written by the model, byte by byte, with a carried state", title_align="left"
    )
    console.print(sample, table)


def _write(path: pathlib.Path, value: dict[str, Any]) -> None:
    """JSON, whole or not at all."""
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(json.dumps(value, indent=2) + "\n")
    temporary.replace(path)
