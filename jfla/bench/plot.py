"""Draws results: time per token and value head by every implementation, and that of a copy of the same bytes."""

import pathlib

import matplotlib

from jfla.bench.cost import cost
from jfla.bench.report import ordered
from jfla.bench.results import Results, Row
from jfla.bench.shapes import SETS, Shape
from jfla.cli.plot import BLUE, GRID, INK, MUTED, ORANGE, STYLE

matplotlib.use("agg")
from matplotlib import pyplot as plt  # the backend comes first: no display is needed
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

SHAPES = {str(shape): shape for shapes in SETS.values() for shape in shapes}
PANELS = ("forward", "backward")
_PEERS = ("#0f766e", "#9333ea", "#be185d", "#a16207", "#475569")


def draw(results: Results, path: pathlib.Path, digest: str = "") -> None:
    """Writes an SVG or a PNG, by the name of `path`; `digest` goes into its metadata.

    Raises `ValueError` where there is no time of a forward or backward.
    """
    rows = [row for row in ordered(results.rows) if row.timed in PANELS and row.ms is not None]
    if not rows:
        raise ValueError("there is no time of a forward or backward to draw")
    ops, gates = (list(dict.fromkeys(getattr(row, name) for row in rows)) for name in ("op", "gate"))
    lines = [(op, gate) for op in ops for gate in gates if any((row.op, row.gate) == (op, gate) for row in rows)]
    shapes = [list(dict.fromkeys(row.shape for row in rows if (row.op, row.gate) == line)) for line in lines]
    heights = [len(axis) + 1.0 for axis in shapes]
    style = STYLE | {"svg.hashsalt": "jfla", "axes.grid.axis": "both"}
    with plt.rc_context(style):
        figure, panels = plt.subplots(
            len(lines), 2, figsize=(11, 1.2 + 0.45 * sum(heights)), height_ratios=heights, squeeze=False,
            layout="constrained", sharey="row",
        )  # fmt: skip
        figure.suptitle(f"{results.device}: ns per token and value head", x=0.008, ha="left", fontweight="bold")
        names = list(dict.fromkeys(row.implementation for row in rows))
        for (op, gate), axis, line in zip(lines, shapes, panels):
            for panel, name in zip(line, PANELS):
                panel.set_yticks(range(len(axis)), axis)
                panel.set_ylim(len(axis) - 0.5, -0.5)
                shown = [row for row in rows if (row.op, row.gate, row.timed) == (op, gate, name)]
                _dots(panel, shown, axis, results, names)
                panel.set_title(f"{op.upper()} {name}, {gate} gates", loc="left", color=MUTED, fontsize=11)
        handles = [Line2D([], [], marker="o", linestyle="", color=_color(name, names), label=name) for name in names]
        handles.append(Line2D([], [], marker="|", linestyle="", color=INK, label="copy of its bytes"))
        figure.legend(handles=handles, loc="outside lower left", ncols=len(handles), frameon=False)
        metadata = {"Description": digest} | ({"Date": None} if path.suffix == ".svg" else {})
        figure.savefig(path, metadata=metadata, dpi=150)
        plt.close(figure)


def _dots(panel: Axes, rows: list[Row], shapes: list[str], results: Results, names: list[str]) -> None:
    """One line per shape, one dot per implementation, on a logarithmic axis."""
    panel.set_xscale("log")
    panel.grid(color=GRID, linewidth=0.8)
    for row in rows:
        shape, at = SHAPES[row.shape], shapes.index(row.shape)
        floor = cost(row.op, row.timed, shape).bytes / results.ceilings.copy_tb_per_s * 1e-9  # type: ignore[arg-type]
        panel.plot(_per_token(floor, shape), at, "|", color=INK, markersize=13)
        panel.plot(_per_token(row.ms or 0.0, shape), at, "o", color=_color(row.implementation, names), markersize=7)


def _per_token(ms: float, shape: Shape) -> float:
    return ms * 1e6 / (shape.batch * shape.time * shape.value_heads)


def _color(name: str, names: list[str]) -> str:
    ours = {"pallas": BLUE, "xla": ORANGE, "scan": MUTED}
    peers = [other for other in names if other not in ours]
    return ours[name] if name in ours else _PEERS[peers.index(name) % len(_PEERS)]
