"""Tables of results: for the terminal, with rich where it is installed, and for the README between its markers."""

import pathlib
from collections.abc import Iterable

from jfla.bench.exact import HEADS, MAX_TIME, PREFIX
from jfla.bench.results import Results, Row, newest, read, shape_sort
from jfla.bench.shapes import OPS, PASSES, SETS

BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"
COLUMNS = (
    "op", "pass", "shape", "gate", "by", "ms", "+-", "wall ms", "TB/s", "copy", "TFLOP/s", "matmul", "worst error",
    "MiB", "first call",
)  # fmt: skip
NAMES = 5  # of the columns, those that every row has
WIDTH = 180  # where the output is not a terminal


def title(results: Results) -> str:
    """Device, date and ceilings in a line."""
    c = results.ceilings
    return (
        f"{results.device}, {results.date}, jax {results.versions.get('jax')}: copy {c.copy_tb_per_s:.3g} TB/s, "
        f"matmul {c.matmul_tflop_per_s:.3g} TFLOP/s"
    )


def lines(results: Results) -> list[tuple[str, ...]]:
    """One line of text cells per row; the reason in the place of the time where an implementation refused."""
    return [_cells(row) for row in ordered(results.rows)]


def _cells(row: Row) -> tuple[str, ...]:
    name = (row.op, row.timed, row.shape, row.gate, row.implementation)
    if row.ms is None:
        return (*name, "no", *[""] * (len(COLUMNS) - len(name) - 1))
    spread = (row.high_ms or 0) - (row.low_ms or 0)
    worst = max(row.errors, key=row.errors.__getitem__, default=None)
    return (
        *name,
        _number(row.ms) + {"device": "", "queued": " q", "blocked": " b"}[str(row.method)],
        _percent(spread / 2 / row.ms),
        _number(row.wall_ms),
        _number(row.tb_per_s),
        _percent(row.copy_fraction),
        _number(row.tflop_per_s),
        _percent(row.matmul_fraction),
        "not checked" if worst is None else f"{worst} {row.errors[worst]:.1e}",
        "" if row.peak_mib is None else f"{row.peak_mib:.0f}",
        "" if row.compile_seconds is None else f"{row.compile_seconds:.1f} s",
    )


def notes(results: Results) -> str:
    """What the columns are, and who refused what and why."""
    reasons: dict[str, list[str]] = {}
    for row in ordered(results.rows):
        if row.ms is None:
            reasons.setdefault(f"{row.implementation}: {row.refused}", []).append(
                f"{row.op} {row.timed} {row.shape} {row.gate}"
            )
    refused = [f"no: {reason} ({len(calls)} calls, the first {calls[0]})" for reason, calls in reasons.items()]
    text = (
        "ms: device time by the profiler; q: wall time of queued calls; b: wall time of blocked calls. "
        "+-: half the distance of the quartiles. backward: forward+backward minus forward. "
        "Errors: against the float64 recurrence. MiB: temporaries and results."
    )
    return "\n".join([text, *refused])


def ordered(rows: Iterable[Row]) -> list[Row]:
    """By op, gate, shape, pass; implementations in the order in which they ran."""
    return sorted(rows, key=lambda r: (OPS.index(r.op), r.gate, shape_sort(r.shape), r.shape, PASSES.index(r.timed)))


def plain(results: Results) -> str:
    """The table in aligned text, for machines without rich."""
    table = [COLUMNS, *lines(results)]
    widths = [max(len(row[i]) for row in table) for i in range(len(COLUMNS))]
    text = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in table)
    return "\n".join([title(results), *text, notes(results)])


def show(results: Results) -> None:
    """Prints the table."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ModuleNotFoundError:
        print(plain(results))
        return
    table = Table(title=title(results), title_justify="left", header_style="bold", caption_justify="left")
    for i, column in enumerate(COLUMNS):
        table.add_column(column, overflow="fold", justify="left" if i < NAMES else "right")
    for row in lines(results):
        table.add_row(*row)
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    console.print(table)
    console.print(notes(results), highlight=False)


# The README's block.


def readme_block() -> str:
    """What belongs between the markers: made of the newest results of a GPU in the repository and of nothing else."""
    path = newest()
    if path is None:
        return "There are no results of a GPU in this repository yet."
    results = read(path)
    shapes = [str(shape) for shape in SETS["paper"]]
    parts = []
    for op in OPS:
        for gate in dict.fromkeys(row.gate for row in results.rows):
            table = _readme_table(results, op, gate, shapes)
            parts += [f"**{op.upper()}**, {gate} gates\n\n{table}"] if table else []
    return "\n\n".join([_readme_caption(results, path), *parts])


def _readme_caption(results: Results, path: pathlib.Path) -> str:
    packages = ", ".join(f"{name} {version}" for name, version in results.versions.items())
    c = results.ceilings
    return (
        f"One {results.device}, {results.date}, commit {results.commit}; {packages}. bfloat16. Medians in ms; "
        '"backward" is forward and backward minus forward. Per cent of the forward: of this GPU\'s copy '
        f"({c.copy_tb_per_s:.2f} TB/s) and matrix product ({c.matmul_tflop_per_s:.0f} TFLOP/s), measured in the same "
        "run, for the bytes and operations in `jfla/bench/cost.py`. Errors are those of the timed calls against the "
        f"float64 recurrence, on {HEADS} heads of the first sequence; beyond T = {MAX_TIME} on the output of the first "
        f"{PREFIX} tokens. All rows, with spread, memory and compile times: `jfla/bench/results/{path.name}`."
    )


def _readme_table(results: Results, op: str, gate: str, shapes: list[str]) -> str:
    rows = {(row.shape, row.implementation, row.timed): row for row in results.rows if (row.op, row.gate) == (op, gate)}
    names = dict.fromkeys(name for _, name, _ in rows)
    header = "| shape | by | forward, ms | backward, ms | copy | matmul | error of output | of the worst gradient |"
    body = []
    for shape in shapes:
        for name in names:
            forward, backward = rows.get((shape, name, "forward")), rows.get((shape, name, "backward"))
            if forward is None:
                continue
            both = backward or rows.get((shape, name, "forward+backward"))
            speeds = (_percent(forward.copy_fraction), _percent(forward.matmul_fraction))
            worst = max(both.errors.values()) if backward and both and both.errors else None
            cells = (_time(forward), _time(both), *speeds, _error(forward.errors.get("output")), _error(worst))
            body.append(f"| {' | '.join((shape, name, *cells))} |")
    return "\n".join([header, "|---" * 8 + "|", *body]) if body else ""


def write_readme(path: pathlib.Path) -> bool:
    """Puts the block between the markers of a file; says whether the file was changed."""
    text = path.read_text()
    new = _replaced(text)
    if new != text:
        path.write_text(new)
    return new != text


def readme_agrees(path: pathlib.Path) -> bool:
    """Whether a file's block is the one that the newest results make."""
    text = path.read_text()
    return _replaced(text) == text


def _replaced(text: str) -> str:
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"the file must have {BEGIN} and {END} once each")
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{readme_block()}\n{END}{rest.split(END)[1]}"


# Numbers.


def _time(row: Row | None) -> str:
    if row is None:
        return ""
    return f"no: {row.refused}" if row.ms is None else _number(row.ms)


def _number(x: float | None) -> str:
    """Three digits: 0.0712, 1.23, 45.6, 789."""
    if x is None:
        return ""
    return f"{x:.3g}" if abs(x) < 100 else f"{x:.0f}"


def _percent(x: float | None) -> str:
    return "" if x is None else f"{100 * x:.0f} %"


def _error(x: float | None) -> str:
    return "" if x is None else f"{x:.1e}"
