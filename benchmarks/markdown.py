"""Tables of results in Markdown."""

from collections.abc import Iterable

from benchmarks.report import number, percent, refusals
from benchmarks.results import Row
from benchmarks.shapes import OPS, SETS

MAIN_SET = "paper"
OTHER_SETS = (
    "packed",
    "fla",
    "fla823",
)  # a shape of the main set is not shown again there

NOTES = {
    "packed": '"pallas" and the peers but jla are told how many sequences there are (`num_segments`, '
    '`cu_seqlens`). "pallas_chain" and jla have `segment_ids` alone: "pallas_chain" walks the sequences of a '
    'row one after the other. "pallas_states" has states going in and coming out.',
}


def table(header: tuple[str, ...], body: list[tuple[str, ...]]) -> str:
    """A table, or nothing when it would be empty.

    >>> print(table(("op", "ms"), [("kda", "0.3")]))
    | op | ms |
    | --- | --- |
    | kda | 0.3 |
    """
    rows = [header, ("---",) * len(header), *body] if body else []
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def sections(rows: list[Row]) -> list[str]:
    """All tables of some rows, each below a line that says of what it is."""
    parts = []
    for gate, op, some in _by_gate_and_op(rows):
        title = f"**{op.upper()}**, {gate} gates"
        if text := training(some, _names(MAIN_SET)):
            parts.append(f"{title}\n\n{text}")
        if text := others(some):
            parts.append(f"{title}: one token, and stages alone\n\n{text}")
    for name in OTHER_SETS:
        parts += _other_set(rows, name)
    return parts


def _by_gate_and_op(rows: list[Row]) -> Iterable[tuple[str, str, list[Row]]]:
    for gate in dict.fromkeys(row.gate for row in rows):
        for op in OPS:
            yield gate, op, [row for row in rows if (row.op, row.gate) == (op, gate)]


def _other_set(rows: list[Row], name: str) -> list[str]:
    """A further set of shapes below a heading, if it was measured."""
    shapes = [shape for shape in _names(name) if shape not in _names(MAIN_SET)]
    parts = []
    for gate, op, some in _by_gate_and_op(rows):
        if text := training(some, shapes):
            parts.append(f"**{op.upper()}**, {gate} gates\n\n{text}")
    if not parts:
        return []
    title = f'### The set "{name}": `jfla bench --set {name}`'
    note = [NOTES[name]] if name in NOTES else []
    return [title, *note, *parts]


def _names(name: str) -> list[str]:
    return [str(shape) for shape in SETS[name]]


def training(rows: list[Row], shapes: list[str]) -> str:
    """Forward and backward, by shape and implementation."""
    passes = ("forward", "backward", "forward+backward")
    shown = [row for row in rows if row.shape in shapes and row.timed in passes]
    found = {(row.shape, row.implementation, row.timed): row for row in shown}
    timed = [row for row in shown if row.timed == "forward" and row.ms is not None]
    names = dict.fromkeys(row.implementation for row in timed)
    body = []
    for shape in shapes:
        for name in names:
            forward = found.get((shape, name, "forward"))
            both = found.get((shape, name, "forward+backward"))
            backward = found.get((shape, name, "backward"), both)
            if forward is not None:
                body.append((shape, name, *_training_cells(forward, backward)))
    header = (
        "shape",
        "by",
        "forward",
        "backward",
        "copy",
        "matmul",
        "error of output",
        "of the worst gradient",
    )
    why = refusals(shown)  # of those that have no row of times, too
    return "\n\n".join([table(header, body), *why]) if body else ""


def _training_cells(forward: Row, backward: Row | None) -> tuple[str, ...]:
    worst = None
    if backward is not None and backward.timed == "backward":
        worst = max(backward.errors.values(), default=None)
    return (
        _time(forward),
        _time(backward),
        percent(forward.copy_fraction),
        percent(forward.matmul_fraction),
        _error(forward.errors.get("output")),
        _error(worst),
    )


def others(rows: list[Row]) -> str:
    """Decode, and the states and output alone."""
    shapes = _names(MAIN_SET)
    stages = [row for row in rows if row.timed == "scan+output" and row.shape in shapes]
    stages.sort(key=lambda row: shapes.index(row.shape))
    decode = [row for row in rows if row.timed == "decode"]
    body = []
    for row in [*decode, *stages]:
        if row.ms is not None:
            cells = (row.timed, row.shape, row.implementation, _time(row))
            fractions = (percent(row.copy_fraction), percent(row.matmul_fraction))
            body.append((*cells, *fractions, _error(row.errors.get("output"))))
    return table(
        ("pass", "shape", "by", "ms", "copy", "matmul", "error of output"), body
    )


def _time(row: Row | None) -> str:
    if row is None:
        return ""
    if row.ms is None:
        return "no"
    if row.timed == "forward+backward":
        return f"{number(row.ms)} with the forward"
    return number(row.ms)


def _error(x: float | None) -> str:
    return "" if x is None else f"{x:.1e}"
