"""The table of results in the terminal: by rich where it is installed, else in aligned text."""

from collections.abc import Iterable

from benchmarks.results import Results, Row, shape_sort
from benchmarks.shapes import OPS, PASSES

COLUMNS = (
    "op",
    "pass",
    "shape",
    "gate",
    "by",
    "ms",
    "+-",
    "wall ms",
    "TB/s",
    "copy",
    "TFLOP/s",
    "matmul",
    "worst error",
    "MiB",
    "first call",
)
NAMES = 5  # of the columns, those that every row has
WIDTH = 180  # where the output is not a terminal


def title(results: Results) -> str:
    """Device, date and ceilings in a line."""
    c = results.ceilings
    jax = results.versions.get("jax")
    return (
        f"{results.device}, {results.date}, jax {jax}: copy {c.copy_tb_per_s:.3g} TB/s, "
        f"matmul {c.matmul_tflop_per_s:.3g} TFLOP/s"
    )


def lines(results: Results) -> list[tuple[str, ...]]:
    """One line of text cells per row; "no" in the place of the time where one was refused."""
    return [_cells(row) for row in ordered(results.rows)]


def _cells(row: Row) -> tuple[str, ...]:
    name = (row.op, row.timed, row.shape, row.gate, row.implementation)
    if row.ms is None:
        return (*name, "no", *[""] * (len(COLUMNS) - len(name) - 1))
    spread = (row.high_ms or 0) - (row.low_ms or 0)
    worst = max(row.errors, key=row.errors.__getitem__, default=None)
    return (
        *name,
        number(row.ms)
        + {"device": "", "queued": " q", "blocked": " b"}[str(row.method)],
        percent(spread / 2 / row.ms),
        number(row.wall_ms),
        number(row.tb_per_s),
        percent(row.copy_fraction),
        number(row.tflop_per_s),
        percent(row.matmul_fraction),
        "not checked" if worst is None else f"{worst} {row.errors[worst]:.1e}",
        "" if row.peak_mib is None else f"{row.peak_mib:.0f}",
        "" if row.compile_seconds is None else f"{row.compile_seconds:.1f} s",
    )


def notes(results: Results) -> str:
    """What the columns are, and who refused what and why."""
    text = (
        "ms: device time by the profiler; q: wall time of queued calls; b: of blocked calls. "
        "+-: half the distance of the quartiles. backward: forward+backward minus forward. "
        "Errors: against the float64 recurrence. MiB: temporaries and results."
    )
    return "\n".join([text, *refusals(results.rows)])


def refusals(rows: Iterable[Row]) -> list[str]:
    """One line for every implementation and reason, with the calls that have no time for it."""
    reasons: dict[str, list[str]] = {}
    for row in ordered(rows):
        if row.ms is None:
            calls = reasons.setdefault(f"{row.implementation}: {row.refused}", [])
            calls.append(f"{row.op} {row.timed} {row.shape} {row.gate}")
    found = []
    for reason, calls in reasons.items():
        more = f" and {len(calls) - 1} more" if len(calls) > 1 else ""
        found.append(f"no: {reason} ({calls[0]}{more})")
    return found


def ordered(rows: Iterable[Row]) -> list[Row]:
    """By op, gate, shape, pass; implementations in the order in which they ran."""

    def key(row: Row) -> tuple:
        op = OPS.index(row.op)
        return op, row.gate, shape_sort(row.shape), row.shape, PASSES.index(row.timed)

    return sorted(rows, key=key)


def plain(results: Results) -> str:
    """The table in aligned text, for machines without rich."""
    table = [COLUMNS, *lines(results)]
    widths = [max(len(row[i]) for row in table) for i in range(len(COLUMNS))]
    text = []
    for row in table:
        cells = [cell.ljust(width) for cell, width in zip(row, widths)]
        text.append("  ".join(cells).rstrip())
    return "\n".join([title(results), *text, notes(results)])


def show(results: Results) -> None:
    """Prints the table."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ModuleNotFoundError:
        print(plain(results))
        return
    table = Table(title=title(results), title_justify="left", header_style="bold")
    for i, column in enumerate(COLUMNS):
        table.add_column(
            column, overflow="fold", justify="left" if i < NAMES else "right"
        )
    for row in lines(results):
        table.add_row(*row)
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    console.print(table)
    console.print(notes(results), highlight=False)


# Numbers.


def number(x: float | None) -> str:
    """Three digits, or all before the point.

    >>> number(0.07123), number(45.678), number(1234.5), number(None)
    ('0.0712', '45.7', '1234', '')
    """
    if x is None:
        return ""
    return f"{x:.3g}" if abs(x) < 100 else f"{x:.0f}"


def percent(x: float | None) -> str:
    """A fraction in whole per cent."""
    return "" if x is None else f"{100 * x:.0f} %"
