"""`jfla serve-demo`: random requests through a server of a small model -> throughput, latency, a picture."""

import dataclasses
import pathlib
import time
from collections.abc import Sequence
from typing import Literal, NamedTuple

import jax.numpy as jnp
import matplotlib
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from jfla.cli import plot
from jfla.nn import DeltaLM, DeltaLMConfig, Request, Server

matplotlib.use("agg")
from matplotlib import pyplot as plt  # the backend comes first: no display is needed
from matplotlib.axes import Axes

# How far below the greatest logit that of a chosen token may be, as a part of the logits' range. A GPU takes other
# kernels for matmuls of other numbers of rows, and rounds operands to tensorfloat32 in some of them, to 11 bits: near
# ties are decided otherwise. A random token is about half of the range below.
MOST_BELOW_GREATEST = 0.01


@dataclasses.dataclass(frozen=True)
class Workload:
    """How many requests there are, and of which sizes."""

    requests: int = 32
    slots: int = 8
    longest_prompt: int = 192
    longest_answer: int = 48
    seed: int = 0


class Planned(NamedTuple):
    """A request before it is submitted: `step` is how many steps of the server it comes after."""

    step: int
    prompt: tuple[int, ...]
    length: int


class Served(NamedTuple):
    """What a run of the server took."""

    requests: list[Request]
    start: float
    seconds: float

    @property
    def tokens(self) -> int:
        """Generated, of all requests."""
        return sum(len(request.tokens) for request in self.requests)


def run(
    op: Literal["kda", "gdn"],
    out: pathlib.Path,
    console: Console,
    workload: Workload | None = None,
) -> dict[int, Served]:
    """Serves the workload with one slot and with all; shows, draws and returns both.

    **Raises:** `RuntimeError` if a request gets a token that is not the model's first choice, but for rounding.
    """
    workload = workload or Workload()
    config = DeltaLMConfig(
        vocab_size=256, hidden_size=128, num_layers=2, op=op, num_heads=4, head_dim=32
    )
    model = DeltaLM(config, rngs=nnx.Rngs(workload.seed))
    plan = planned(workload)
    results = {}
    for slots in (1, workload.slots):
        serve(model, plan, slots, console, f"{slots} at a time, compiling")
        results[slots] = serve(model, plan, slots, console, f"{slots} at a time")
    below = max(below_greatest(model, served) for served in results.values())
    if below > MOST_BELOW_GREATEST:
        raise RuntimeError(
            f"a token's logit must be at most {MOST_BELOW_GREATEST:.0%} of the logits' range below the greatest, "
            f"got {below:.1%}"
        )
    out.mkdir(parents=True, exist_ok=True)
    draw(out / "serving.png", op, results[workload.slots], workload.slots)
    _show(console, results, below, out)
    return results


def planned(workload: Workload) -> list[Planned]:
    """Random prompts and lengths, which come a step and a half apart."""
    rng = np.random.default_rng(workload.seed)
    steps = np.cumsum(rng.poisson(1.5, workload.requests))
    requests = []
    for step in steps:
        prompt = rng.integers(0, 256, rng.integers(1, workload.longest_prompt + 1))
        length = int(rng.integers(1, workload.longest_answer + 1))
        requests.append(Planned(int(step), tuple(prompt.tolist()), length))
    return requests


def serve(
    model: DeltaLM, plan: Sequence[Planned], slots: int, console: Console, name: str
) -> Served:
    """Steps a server until all requests are done; each is submitted when its step has come."""
    server = Server(model, num_slots=slots)
    requests: list[Request] = []
    total = sum(request.length for request in plan)
    columns = (
        TextColumn("{task.description}", style="bold"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
    )
    start = time.perf_counter()
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task(name, total=total, note="")
        step = 0
        while server.busy or len(requests) < len(plan):
            while len(requests) < len(plan) and plan[len(requests)].step <= step:
                _, prompt, length = plan[len(requests)]
                requests.append(server.submit(prompt, length))
            server.step()
            step += 1
            done = sum(len(request.tokens) for request in requests)
            speed = done / (time.perf_counter() - start)
            note = f"{len(server.running)} run, {len(server.waiting)} wait, {speed:,.0f} tokens/s"
            progress.update(bar, completed=done, note=note)
    return Served(requests, start, time.perf_counter() - start)


def below_greatest(model: DeltaLM, served: Served) -> float:
    """How far the logits of generated tokens are below the greatest, at most, as a part of the logits' range.

    By one pass over all prompts with their tokens.
    """
    texts = [(*request.prompt, *request.tokens) for request in served.requests]
    rows = np.zeros((len(texts), max(map(len, texts))), np.int32)
    for row, text in zip(rows, texts):
        row[: len(text)] = text
    farthest = 0.0
    for request, logits in zip(
        served.requests, np.asarray(_logits(model, jnp.asarray(rows)))
    ):
        first = len(request.prompt) - 1
        logits = logits[first : first + len(request.tokens)]
        chosen = np.take_along_axis(logits, np.array(request.tokens)[:, None], axis=1)
        greatest = logits.max(axis=1, keepdims=True)
        below = (greatest - chosen) / np.ptp(logits, axis=1, keepdims=True)
        farthest = max(farthest, float(below.max()))
    return farthest


@nnx.jit
def _logits(model: DeltaLM, rows: Int[Array, "N T"]) -> Float[Array, "N T vocabulary"]:
    return model(rows)


def waits(served: Served) -> np.ndarray:
    """Seconds of every request from its submission to its first token."""
    return np.array([(x.first or 0.0) - x.submitted for x in served.requests])


def gaps(served: Served) -> np.ndarray:
    """Seconds a token of every request that has several, from its first to its last."""
    several = [x for x in served.requests if len(x.tokens) > 1]
    return np.array(
        [((x.last or 0.0) - (x.first or 0.0)) / (len(x.tokens) - 1) for x in several]
    )


def _show(
    console: Console, results: dict[int, Served], below: float, out: pathlib.Path
) -> None:
    table = Table(
        "at a time",
        "tokens/s",
        "first token, median",
        "slowest",
        "between tokens, median",
    )
    for slots, served in results.items():
        first = waits(served)
        table.add_row(
            str(slots),
            f"{served.tokens / served.seconds:,.0f}",
            f"{1e3 * np.median(first):.0f} ms",
            f"{1e3 * first.max():.0f} ms",
            f"{1e3 * np.median(gaps(served)):.1f} ms",
        )
    console.print(table)
    of_runs = zip(*(served.requests for served in results.values()), strict=True)
    alike = [alone.tokens == among.tokens for alone, among in of_runs]
    if all(alike):
        tokens = "each with the tokens that it gets alone"
    else:
        tokens = (
            f"{sum(alike)} of them with the tokens that they get alone, the others with some that are as good but for "
            f"rounding: {below:.2%} of the logits' range below the greatest, at most"
        )
    console.print(f"{len(alike)} requests, {tokens}; {out}/serving.png")


def draw(path: pathlib.Path, op: str, served: Served, slots: int) -> None:
    """Writes a PNG: when each request waited and ran, and how many ran together."""
    with plt.rc_context(plot.STYLE):
        figure, (left, right) = plt.subplots(
            1, 2, figsize=(11, 4.6), dpi=150, layout="constrained"
        )
        speed = served.tokens / served.seconds
        title = f"{op.upper()}, {slots} slots: {speed:,.0f} tokens a second"
        figure.suptitle(title, x=0.008, ha="left", fontsize=14, fontweight="bold")
        _draw_requests(left, served)
        _draw_running(right, served, slots)
        temporary = path.with_name(f".{path.name}")
        figure.savefig(temporary, format="png")
        plt.close(figure)
    temporary.replace(path)


def _draw_requests(axes: Axes, served: Served) -> None:
    axes.set_title(
        "Requests: waiting, and running", loc="left", color=plot.MUTED, fontsize=11
    )
    for row, request in enumerate(served.requests):
        came, first, last = _times(request, served.start)
        axes.barh(row, first - came, left=came, height=0.6, color=plot.GRID)
        axes.barh(row, last - first, left=first, height=0.6, color=plot.BLUE)
    axes.invert_yaxis()
    axes.set_xlabel("seconds", loc="right")
    axes.set_ylabel("request")


def _draw_running(axes: Axes, served: Served, slots: int) -> None:
    axes.set_title(
        "Requests that run together", loc="left", color=plot.MUTED, fontsize=11
    )
    spans = np.array([_times(request, served.start)[1:] for request in served.requests])
    at = np.linspace(0, served.seconds, 400)
    running = np.sum((spans[:, :1] <= at) & (at < spans[:, 1:]), axis=0)
    axes.fill_between(
        at, running, color=plot.ORANGE, alpha=0.25, step="mid", linewidth=0
    )
    axes.step(at, running, color=plot.ORANGE, where="mid", linewidth=1.6)
    axes.axhline(slots, color=plot.MUTED, linewidth=1.1, linestyle=(0, (4, 3)))
    axes.set_ylim(0, slots + 0.7)
    axes.set_xlim(0, served.seconds)
    axes.set_xlabel("seconds", loc="right")


def _times(request: Request, start: float) -> tuple[float, float, float]:
    """When a finished request came, and got its first and last token."""
    assert request.first is not None
    assert request.last is not None
    return request.submitted - start, request.first - start, request.last - start
