"""`jfla serve-demo`: random requests through a server of a small model -> throughput, latency, a picture."""

import dataclasses
import pathlib
import time
from collections.abc import Sequence
from typing import Literal, NamedTuple

import matplotlib
import numpy as np
from flax import nnx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from jfla.cli import plot
from jfla.nn import DeltaLM, DeltaLMConfig, Request, Server

matplotlib.use("agg")
from matplotlib import pyplot as plt  # the backend comes first: no display is needed
from matplotlib.axes import Axes


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

    **Raises:** `RuntimeError` if a request gets other tokens among others than alone.
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
    one = results[1]
    many = results[workload.slots]
    for alone, among in zip(one.requests, many.requests, strict=True):
        if alone.tokens != among.tokens:
            raise RuntimeError(
                f"a request got {among.tokens} among others, {alone.tokens} alone"
            )
    out.mkdir(parents=True, exist_ok=True)
    draw(out / "serving.png", op, many, workload.slots)
    _show(console, results, out)
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


def waits(served: Served) -> np.ndarray:
    """Seconds of every request from its submission to its first token."""
    return np.array([(x.first or 0.0) - x.submitted for x in served.requests])


def gaps(served: Served) -> np.ndarray:
    """Seconds a token of every request that has several, from its first to its last."""
    several = [x for x in served.requests if len(x.tokens) > 1]
    return np.array(
        [((x.last or 0.0) - (x.first or 0.0)) / (len(x.tokens) - 1) for x in several]
    )


def _show(console: Console, results: dict[int, Served], out: pathlib.Path) -> None:
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
    number = len(next(iter(results.values())).requests)
    console.print(table)
    console.print(
        f"{number} requests, each with the tokens that it gets alone; {out}/serving.png"
    )


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
