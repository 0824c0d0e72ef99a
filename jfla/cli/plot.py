"""Draws curves of training: the demo's two tasks, and a fine-tuning's loss and right tokens."""

import contextlib
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import matplotlib
import numpy as np
from jaxtyping import Float

matplotlib.use("agg")
from matplotlib import pyplot as plt  # the backend comes first: no display is needed
from matplotlib.axes import Axes

INK = "#1f2430"
MUTED = "#6b7280"
GRID = "#e5e7eb"
BLUE = "#2563eb"
ORANGE = "#d9480f"
STYLE: Any = {
    "font.family": "sans-serif",
    "font.size": 10.5,
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": GRID,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.axisbelow": True,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
}


def smoothed(
    values: Sequence[float] | Float[np.ndarray, " n"],
) -> Float[np.ndarray, " n"]:
    """A centred Gaussian mean over about 1/50 of the steps; at the ends, over the steps there are.

    >>> print(smoothed([2.0, 2.0, 2.0]))
    [2. 2. 2.]
    """
    width = max(1.0, len(values) / 50)
    reach = int(4 * width)
    weights = np.exp(-0.5 * (np.arange(-reach, reach + 1) / width) ** 2)
    inside = slice(reach, reach + len(values))
    total = np.convolve(values, weights)[inside]
    weight = np.convolve(np.ones(len(values)), weights)[inside]
    return total / weight


def draw(
    path: pathlib.Path,
    title: str,
    text: Sequence[float],
    byte_entropy: float,
    recall: Sequence[float],
    chance: float,
) -> None:
    """Writes a PNG.

    `text`: bits per byte of each step; `recall`: fraction of right answers of each step.
    """
    with _two_panels(path, title) as (left, right):
        _draw_text(left, text, byte_entropy)
        _draw_accuracy(right, "Associative recall: right answers", recall)
        _baseline(right, 100 * chance, len(recall), f"guessing: {100 * chance:.0f} %")


def draw_finetuning(
    path: pathlib.Path, title: str, bits: Sequence[float], accuracy: Sequence[float]
) -> None:
    """Writes a PNG of the bits per token and the fraction of right tokens of each step."""
    with _two_panels(path, title) as (left, right):
        _title(left, "Documents: bits per token")
        _curve(left, np.asarray(bits), BLUE, "{:.2f} bits")
        _baseline(left, bits[0], len(bits), f"first step: {bits[0]:.2f} bits")
        left.set_ylim(0, 1.1 * max(bits))
        _draw_accuracy(right, "Likeliest token is right", accuracy)


@contextlib.contextmanager
def _two_panels(path: pathlib.Path, title: str) -> Iterator[tuple[Axes, Axes]]:
    """Two axes side by side, written as a PNG afterwards, whole or not at all."""
    with plt.rc_context(STYLE):
        figure, (left, right) = plt.subplots(
            1, 2, figsize=(11, 4.6), dpi=150, layout="constrained"
        )
        figure.suptitle(title, x=0.008, ha="left", fontsize=14, fontweight="bold")
        yield left, right
        temporary = path.with_name(f".{path.name}")
        figure.savefig(temporary, format="png")
        plt.close(figure)
    temporary.replace(path)


def _draw_text(axes: Axes, bits: Sequence[float], byte_entropy: float) -> None:
    _title(axes, "Python source: bits per byte")
    _curve(axes, np.asarray(bits), BLUE, "{:.2f} bits")
    label = f"byte frequencies alone: {byte_entropy:.2f} bits"
    _baseline(axes, byte_entropy, len(bits), label)
    axes.set_ylim(0, max(8.2, 1.05 * max(bits)))


def _draw_accuracy(axes: Axes, title: str, accuracy: Sequence[float]) -> None:
    _title(axes, title)
    _curve(axes, 100 * np.asarray(accuracy), ORANGE, "{:.0f} %")
    axes.set_ylim(-2, 107)
    percents = range(0, 101, 20)
    axes.set_yticks(percents, [f"{percent} %" for percent in percents])


def _title(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", color=MUTED, fontsize=11)


def _curve(axes: Axes, values: Float[np.ndarray, " n"], color: str, label: str) -> None:
    """Every step faint, the mean strong, its last value written at its end."""
    steps = np.arange(1, len(values) + 1)
    mean = smoothed(values)
    axes.plot(
        steps, values, color=color, alpha=0.22, linewidth=1, solid_capstyle="round"
    )
    axes.plot(steps, mean, color=color, linewidth=2.4, solid_capstyle="round")
    axes.plot(
        steps[-1:],
        mean[-1:],
        "o",
        color=color,
        markersize=6,
        markeredgecolor="white",
        clip_on=False,
        zorder=5,
    )
    axes.annotate(
        label.format(mean[-1]),
        (steps[-1], mean[-1]),
        xytext=(9, 0),
        textcoords="offset points",
        va="center",
        color=color,
        fontweight="bold",
        annotation_clip=False,
    )
    axes.set_xlim(0, max(len(values), 2))
    axes.set_xlabel("step", loc="right")


def _baseline(axes: Axes, value: float, steps: int, label: str) -> None:
    """What can be had without a model of the context."""
    axes.axhline(value, color=MUTED, linewidth=1.1, linestyle=(0, (4, 3)))
    axes.annotate(
        label,
        (steps, value),
        xytext=(0, 4),
        textcoords="offset points",
        ha="right",
        color=MUTED,
        fontsize=9.5,
    )
