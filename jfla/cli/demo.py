"""`jfla demo`: trains a model on Python's own source and one on associative recall."""

import functools
import pathlib
import time
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import UInt8
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from jfla.cli import data, info, mesh, plot, processes
from jfla.cli.progress import train
from jfla.cli.refused import Refused
from jfla.cli.run_folder import RESULTS, claim, finished, write_json
from jfla.cli.train import Curves, Run, Settings, create, evaluate
from jfla.nn import DeltaLM
from jfla.nn.models.config import GDNSpec
from jfla.types import Implementation

Row = Callable[[np.random.Generator], data.Batch]

SAVE_EVERY = 25
_EVALUATED = 16  # batches
_PROMPT = "def "
_SAMPLED = 400  # tokens
_NAMES = {"kda": "Kimi Delta Attention", "gdn": "Gated DeltaNet"}


class Task(NamedTuple):
    """What one model learns, and the batches that it is judged by afterwards."""

    name: str
    train: data.Batches
    test: data.Batches


def run(
    op: Literal["kda", "gdn"],
    steps: int,
    out: pathlib.Path,
    implementation: Implementation | None,
    seed: int,
    console: Console,
    settings: Settings | None = None,
    mesh_shape: mesh.MeshShape | None = None,
) -> dict[str, Any]:
    """Trains until both models have done `steps` steps; returns and shows the results.

    A run that was interrupted, or that is to get more steps, goes on from its checkpoints: also on
    another mesh, and in another number of processes. Without a `mesh_shape` one process takes one
    device, several divide the rows of a step among all of theirs.

    **Raises:** `Refused` for a folder of another run, a mesh that does not divide the work, and an
    implementation that cannot be had; `ValueError` for processes that were started differently.
    """
    settings = settings or Settings(op=op, seed=seed)
    if mesh_shape is None and jax.process_count() > 1:
        mesh_shape = {"data": jax.device_count(), "sequence": 1, "model": 1}
    if mesh_shape is not None:
        sizes = {
            "rows": settings.rows,
            "time": settings.time,
            "num_heads": settings.num_heads,
        }
        mesh.check(mesh_shape, **sizes)
    _check_implementation(settings, implementation)
    processes.agree("options", repr((settings, steps, implementation, mesh_shape)))
    claim(out, settings)
    results = finished(out, steps)
    if results is not None:
        done = results["steps"]
        console.print(
            f"{out} holds a finished run of {done} steps; a larger --steps goes on from there."
        )
        _show(console, results, out)
        return results
    started = time.perf_counter()
    corpus = _corpus(console)
    processes.agree(
        "source of Python", corpus.train.tobytes() + corpus.held_out.tobytes()
    )
    source = f"{corpus.files} files of Python's own source"
    console.print(f"{_NAMES[op]}, {steps} steps of text ({source}) and of recall")
    results = {"steps": steps, "byte_entropy": _entropy(corpus.train)}
    curves: dict[str, Curves] = {}
    for task in _tasks(settings, corpus, steps):
        with mesh.layout(mesh_shape):
            made = create(settings, steps, implementation)
            training = Run(*made, steps, out / task.name)
            model = _trained(training, task, settings, results, console)
        curves[task.name] = training.curves
        if task.name == "text":
            results["sample"] = _sample(model, settings.seed)
            results["parameters"] = _num_parameters(model)
    results["seconds"] = time.perf_counter() - started
    if processes.is_first():
        _plot(out, _NAMES[op], results, curves)
        write_json(out / RESULTS, results)
    _show(console, results, out)
    return results


def _trained(
    training: Run,
    task: Task,
    settings: Settings,
    results: dict[str, Any],
    console: Console,
) -> DeltaLM:
    """Does a run's steps, adds to `results` what came of them, and returns the model, gathered."""
    try:
        tokens = settings.rows * settings.time
        train(training, task.train, task.name, tokens, SAVE_EVERY, console)
    finally:
        training.close()
    test = evaluate(training.model, task.test, _EVALUATED)
    results[task.name] = {name: float(value) for name, value in test._asdict().items()}
    results["steps"] = max(results["steps"], training.step)
    return mesh.gathered(training.model)


def _num_parameters(model: DeltaLM) -> int:
    return sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))


def _plot(
    out: pathlib.Path, name: str, results: dict[str, Any], curves: dict[str, Curves]
) -> None:
    millions = results["parameters"] / 1e6
    plot.draw(
        out / "loss.png",
        f"{name}, {millions:.2f} M parameters, {results['steps']} steps",
        text=curves["text"]["bits"],
        byte_entropy=results["byte_entropy"],
        recall=curves["recall"]["accuracy"],
        chance=1 / data.SYMBOLS,
    )


def _corpus(console: Console) -> data.Corpus:
    try:
        return data.load_corpus()
    except FileNotFoundError as error:
        console.print(f"[red]{error}")
        raise SystemExit(1) from None


def _check_implementation(
    settings: Settings, implementation: Implementation | None
) -> None:
    """Training calls the chunked form, sampling the recurrent one."""
    if implementation != "pallas":
        return
    for form, length in (("chunk", settings.time), ("recurrent", 1)):
        name = f"{form}_{settings.op}"
        mixer = GDNSpec(num_heads=settings.num_heads, head_dim=settings.head_dim)
        choice = info.explain(name, settings.rows, length, mixer, jnp.float32)
        if choice.implementation != "pallas":
            why = choice.reasons["pallas"]
            raise Refused("implementation", f"pallas cannot run this model here: {why}")


def _tasks(settings: Settings, corpus: data.Corpus, steps: int) -> list[Task]:
    """Text and recall; what they are judged by comes from held-out files and from another seed."""
    sizes = {"rows": 1, "time": settings.time}
    recall = functools.partial(data.recall_rows, **sizes)
    text = functools.partial(data.text_rows, text=corpus.train, **sizes)
    held_out = functools.partial(data.text_rows, text=corpus.held_out, **sizes)
    train_seed, test_seed = map(
        int, np.random.SeedSequence(settings.seed).generate_state(2)
    )

    def task(name: str, train: Row, test: Row) -> Task:
        return Task(
            name,
            train=data.batches(train, settings.rows, steps, train_seed),
            test=data.batches(test, settings.rows, _EVALUATED, test_seed),
        )

    return [task("text", text, held_out), task("recall", recall, recall)]


def _sample(model: DeltaLM, seed: int) -> str:
    """Text that the model writes behind `_PROMPT`, one byte at a time with a carried state."""
    prompt = jnp.array([list(_PROMPT.encode())])
    tokens = model.generate(
        prompt, _SAMPLED, key=jax.random.key(seed), temperature=0.7, top_k=40
    )
    return _PROMPT + bytes(np.asarray(tokens[0], np.uint8)).decode(
        "ascii", errors="replace"
    )


def _entropy(text: UInt8[np.ndarray, " n"]) -> float:
    """Bits per byte for who knows only how often each byte occurs."""
    frequency = np.bincount(text) / len(text)
    frequency = frequency[frequency > 0]
    return float(-np.sum(frequency * np.log2(frequency)))


def _show(console: Console, results: dict[str, Any], out: pathlib.Path) -> None:
    text = results["text"]
    recall = results["recall"]
    next_bytes = f"{text['accuracy']:.0%} of next bytes right"
    entropy = f"byte frequencies alone: {results['byte_entropy']:.2f} bits"
    guessing = f"guessing: {1 / data.SYMBOLS:.1%}"
    parameters = f"{results['parameters']:,} parameters"
    duration = f"{results['steps']} steps, {results['seconds']:.0f} s"
    bits = f"[bold]{text['bits']:.2f} bits per byte"
    right = f"[bold]{recall['accuracy']:.1%} right"
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_row("text, held-out files", bits, f"{next_bytes}; {entropy}")
    table.add_row("recall, new rows", right, f"{data.PAIRS} pairs per row, {guessing}")
    table.add_row("model", parameters, duration)
    table.add_row("curve", str(out / "loss.png"))
    sample = Panel(
        Text(results["sample"]),
        title="written by the model, byte by byte, with a carried state",
        title_align="left",
    )
    console.print(sample, table)
