"""Draws times as grouped bars, forward beside backward, a group a shape, a bar a library; and losses of training."""

import pathlib
from typing import Any, NamedTuple

import matplotlib
import numpy as np

from benchmarks.overview import NAMES, Time
from benchmarks.report import number, ordered
from benchmarks.results import Results

matplotlib.use("agg")
from matplotlib import pyplot as plt  # the backend comes first: no display is needed
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator

PASSES = ("forward", "backward")
INK = "#1f2430"
MUTED = "#6b7280"
GRID = "#e5e7eb"
OURS = ("pallas", "mma", "pallas_chain", "pallas_states", "xla", "scan")
COLORS = {
    "pallas": "#2563eb",
    "mma": "#93c5fd",
    "pallas_chain": "#60a5fa",
    "pallas_states": "#1e40af",
    "xla": "#38bdf8",
    "scan": "#6b7280",
    "fla": "#94a3b8",
    "cudnn": "#0f766e",
    "flash_qla": "#b45309",
    "tokamax": "#9333ea",
    "flashinfer": "#4d7c0f",
    "jla": "#0891b2",
    "fla_kernels": "#be185d",
}
# Text stays text and the ground is white, so that the file is small and reads in a dark page, too.
STYLE: Any = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 10,
    "text.color": INK,
    "axes.edgecolor": GRID,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": MUTED,
    "ytick.color": INK,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "svg.fonttype": "none",
    "svg.hashsalt": "jfla",
}
BAR_INCHES = 0.21
ROOM_FOR_VALUE = 2.6  # how far the axis goes on behind the longest bar, as a factor


# Of the runs of `benchmarks.training`, widest first: color, width, label.
LINES = {
    "float32": ("#94a3b8", 3.5, '"xla" in float32'),
    "seed": ("#f59e0b", 1.0, "kernels, another seed"),
    "kernels": ("#2563eb", 1.2, "kernels, the seed of float32"),
}

Curves = dict[str, np.ndarray]  # bits per byte of each run


class Bar(NamedTuple):
    """One time in milliseconds."""

    row: str
    timed: str
    shape: str
    implementation: str
    ms: float
    mark: str = ""


def draw_results(results: Results, path: pathlib.Path) -> None:
    """Draws all forwards and backwards of a run.

    Raises `ValueError` where there is none.
    """
    bars = []
    for row in ordered(results.rows):
        if row.timed in PASSES and row.ms is not None:
            title = f"{row.op.upper()}, {row.gate} gates"
            bars.append(Bar(title, row.timed, row.shape, row.implementation, row.ms))
    draw(bars, f"{results.device}, milliseconds (shorter is better)", path)


def draw_overview(
    times: list[Time], device: str, path: pathlib.Path, digest: str
) -> None:
    """Draws the times of the README; `digest` goes into the metadata."""
    bars = []
    for time in times:
        key = (time.shape.removesuffix(" H32 D128"), time.implementation)
        for timed, ms in zip(PASSES, (time.forward, time.backward)):
            if ms is None:
                continue
            mark = " †" if time.drops(timed) else ""
            bars.append(Bar(time.op.upper(), timed, *key, ms, mark))
    title = (
        f"{device}, milliseconds (shorter is better); 32 heads, K = V = 128, bfloat16"
    )
    draw(bars, title, path, NAMES, digest)


def draw_curves(
    curves: dict[str, Curves], every: int, path: pathlib.Path, digest: str
) -> None:
    """Draws losses, an axis an op, a curve a run, a point the mean of `every` steps."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            1, len(curves), figsize=(11, 4.2), squeeze=False, layout="constrained"
        )
        for panel, (op, runs) in zip(axes[0], curves.items()):
            for name, (color, width, _) in LINES.items():
                if name in runs:
                    steps = every * (np.arange(len(runs[name])) + 1)
                    panel.plot(
                        steps,
                        runs[name],
                        color=color,
                        linewidth=width,
                        solid_capstyle="round",
                    )
            last = min(bits[-1] for bits in runs.values())
            first = max(float(np.quantile(bits, 0.97)) for bits in runs.values())
            panel.set_ylim(0.95 * last, first)
            panel.set_title(
                f"{op.upper()}: bits per byte", loc="left", color=MUTED, fontsize=10
            )
            panel.set_xlabel("step", color=MUTED)
            panel.grid(color=GRID, linewidth=0.8)
        shown = {name for runs in curves.values() for name in runs}
        handles = [
            Patch(color=color, label=label)
            for name, (color, _, label) in LINES.items()
            if name in shown
        ]
        figure.legend(
            handles=handles, loc="outside lower left", ncols=len(handles), frameon=False
        )
        figure.savefig(
            path, metadata=_metadata(path, digest), dpi=100, facecolor="white"
        )
        plt.close(figure)


def _metadata(path: pathlib.Path, digest: str) -> dict[str, str | None]:
    """Without the date, which would change the file at every drawing."""
    return {"Description": digest} | ({"Date": None} if path.suffix == ".svg" else {})


def draw(
    bars: list[Bar],
    title: str,
    path: pathlib.Path,
    labels: dict[str, str] | None = None,
    digest: str = "",
) -> None:
    """Writes an SVG or a PNG, by the name of `path`. Raises `ValueError` without bars.

    `labels`: of implementations in the legend, where it should not be their names.
    """
    if not bars:
        raise ValueError("there is no time of a forward or backward to draw")
    rows = list(dict.fromkeys(bar.row for bar in bars))
    names = list(dict.fromkeys(bar.implementation for bar in bars))
    heights = [_height([bar for bar in bars if bar.row == row]) for row in rows]
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            len(rows),
            len(PASSES),
            figsize=(11, 1.1 + sum(heights)),
            height_ratios=heights,
            squeeze=False,
            layout="constrained",
        )
        if any(bar.mark for bar in bars):
            title = f"{title}; † drops small decays"
        figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
        for row, pair in zip(rows, axes):
            for timed, panel in zip(PASSES, pair):
                shown = [bar for bar in bars if (bar.row, bar.timed) == (row, timed)]
                _panel(panel, shown)
                panel.set_title(f"{row}: {timed}", loc="left", color=MUTED, fontsize=10)
        handles = []
        for name in names:
            label = (labels or {}).get(name, name)
            handles.append(Patch(color=COLORS[name], label=label))
        figure.legend(
            handles=handles, loc="outside lower left", ncols=len(handles), frameon=False
        )
        figure.savefig(
            path, metadata=_metadata(path, digest), dpi=100, facecolor="white"
        )
        plt.close(figure)


def _height(bars: list[Bar]) -> float:
    """Inches of a row of panels: that of its fuller one."""
    counts = []
    for timed in PASSES:
        shown = [bar for bar in bars if bar.timed == timed]
        counts.append(len(shown) + len({bar.shape for bar in shown}))
    return 0.6 + BAR_INCHES * max(counts)


def _panel(panel: Axes, bars: list[Bar]) -> None:
    """Horizontal bars on a logarithmic axis, each with its value behind its end."""
    ticks = {}
    at = 0.0
    for shape in dict.fromkeys(bar.shape for bar in bars):
        group = [bar for bar in bars if bar.shape == shape]
        ticks[shape] = at + (len(group) - 1) / 2
        for bar in group:
            panel.barh(at, bar.ms, height=0.82, color=COLORS[bar.implementation])
            panel.annotate(
                f"{number(bar.ms)}{bar.mark}",
                (bar.ms, at),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
                fontsize=9,
                fontweight="bold" if bar.implementation in OURS else "normal",
            )
            at += 1
        at += 0.8
    panel.set_yticks(list(ticks.values()), list(ticks))
    panel.invert_yaxis()
    panel.set_xscale("log")
    if bars:
        times = [bar.ms for bar in bars]
        panel.set_xlim(min(times) / 2, max(times) * ROOM_FOR_VALUE)
    panel.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panel.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    panel.minorticks_off()
    panel.grid(axis="x", color=GRID, linewidth=0.8)
