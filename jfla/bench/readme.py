"""The README's block between its markers and the plot in it: made of measured results, and checked."""

import dataclasses
import hashlib
import pathlib
from collections.abc import Callable, Iterator

from jfla.bench.report import number, percent, refusals
from jfla.bench.results import FOLDER, Results, Row, newest, read
from jfla.bench.shapes import OPS, SETS

BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"
README = FOLDER.parents[2] / "README.md"
MAIN_SET, FOLDED_SETS = "paper", ("packed", "fla", "fla823")  # a shape of the first is not shown again below
NOTHING = "There are no results of a GPU in this repository yet."


def block(results: pathlib.Path | None, root: pathlib.Path = README.parent) -> str:
    """What belongs between the markers: made of a file of results, and of earlier ones beside it for what it lacks.

    `root` is the folder of the README, from where its links go.
    """
    if results is None:
        return NOTHING
    record, link = read(results), lambda path: path.relative_to(root).as_posix()
    parts = [_caption(record, link(results)), f"![Time]({link(_plot(results))})", *_tables(record.rows)]
    for path, earlier, rows in _lacking(results, record):
        caption = (
            f"Measured earlier and not again, {earlier.date}, commit {earlier.commit}: [{link(path)}]({link(path)})."
        )
        parts += [caption, *tables] if (tables := _tables(rows)) else []
    return "\n\n".join(parts)


def _tables(rows: list[Row]) -> list[str]:
    parts = []
    for gate in dict.fromkeys(row.gate for row in rows):
        for op in OPS:
            some = [row for row in rows if (row.op, row.gate) == (op, gate)]
            main = _training(some, _names(MAIN_SET))
            for heading, table in (("", main), (": one token, and stages alone", _others(some))):
                parts += [f"**{op.upper()}**, {gate} gates{heading}\n\n{table}"] if table else []
    return parts + [text for name in FOLDED_SETS for text in _folded(rows, name)]


def _lacking(results: pathlib.Path, record: Results) -> Iterator[tuple[pathlib.Path, Results, list[Row]]]:
    """The earlier results of the same device, the latest first, each with the rows that no later one has."""
    found = {row.key for row in record.rows}
    files = [(read(path), path) for path in results.parent.glob("*.json") if path != results]
    for earlier, path in sorted(files, key=lambda x: (x[0].date, x[1]), reverse=True):
        if earlier.device == record.device and (earlier.date, path) < (record.date, results):
            yield path, earlier, [row for row in earlier.rows if row.key not in found]
            found |= {row.key for row in earlier.rows}


def _folded(rows: list[Row], name: str) -> list[str]:
    """A further set of shapes, folded away, if it was measured."""
    shapes, tables = [shape for shape in _names(name) if shape not in _names(MAIN_SET)], []
    for gate in dict.fromkeys(row.gate for row in rows):
        for op in OPS:
            table = _training([row for row in rows if (row.op, row.gate) == (op, gate)], shapes)
            tables += [f"**{op.upper()}**, {gate} gates\n\n{table}"] if table else []
    inside = "\n\n".join(tables)
    summary = f'The set "{name}": <code>jfla bench --set {name}</code>'
    return [f"<details><summary>{summary}</summary>\n\n{inside}\n\n</details>"] if tables else []


def _names(name: str) -> list[str]:
    return [str(shape) for shape in SETS[name]]


def write(
    readme: pathlib.Path, results: pathlib.Path | None, draw: Callable[[Results, pathlib.Path, str], None]
) -> None:
    """Writes the block into a README, and the plot beside the results with `draw(results, path, digest)`."""
    readme.write_text(_replaced(readme.read_text(), block(results, readme.parent)))
    if results is not None:
        record, shapes = read(results), _names(MAIN_SET)
        shown = dataclasses.replace(record, rows=[row for row in record.rows if row.shape in shapes])
        draw(shown, _plot(results), digest(results))


def disagreement(readme: pathlib.Path, results: pathlib.Path | None) -> str | None:
    """What does not belong to the results, or None."""
    text = readme.read_text()
    if _replaced(text, block(results, readme.parent)) != text:
        return f"the block of {readme.name} is not that of {results or 'no results'}"
    if results is not None and (not _plot(results).exists() or digest(results) not in _plot(results).read_text()):
        return f"{_plot(results).name} is not the plot of {results.name}"
    return None


def current() -> pathlib.Path | None:
    """The results that the README shows."""
    return newest()


def digest(results: pathlib.Path) -> str:
    """Names the content of a file of results; the plot carries it."""
    return f"sha256:{hashlib.sha256(results.read_bytes()).hexdigest()}"


def _plot(results: pathlib.Path) -> pathlib.Path:
    return results.with_suffix(".svg")


def _replaced(text: str, new: str) -> str:
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"the file must have {BEGIN} and {END} once each")
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{new}\n{END}{rest.split(END)[1]}"


def _caption(results: Results, link: str) -> str:
    packages = ", ".join(f"{name} {version}" for name, version in (results.versions | results.settings).items())
    c = results.ceilings
    return (
        f"One {results.device}, {results.date}, commit {results.commit}; {packages}. bfloat16. Medians in ms; "
        '"backward" is forward and backward minus forward. "copy" and "matmul" say how near the forward comes to this '
        f"GPU's copy ({c.copy_tb_per_s:.2f} TB/s) and matrix product ({c.matmul_tflop_per_s:.0f} TFLOP/s), the best "
        "measured in the same runs, for the bytes and operations in [cost.py](jfla/bench/cost.py). Errors are those of "
        f"the timed calls against the float64 recurrence, on {results.checked}. "
        f"All rows, with spread, memory and compile times: [{link}]({link})."
    )


def _training(rows: list[Row], shapes: list[str]) -> str:
    """Forward and backward, by shape and implementation."""
    found = {(row.shape, row.implementation, row.timed): row for row in rows}
    shown = [row for row in rows if row.shape in shapes and row.timed in ("forward", "backward", "forward+backward")]
    names = dict.fromkeys(row.implementation for row in shown if row.timed == "forward" and row.ms is not None)
    body = []
    for shape in shapes:
        for name in names:
            forward, backward = found.get((shape, name, "forward")), found.get((shape, name, "backward"))
            if forward is None:
                continue
            backward = backward or found.get((shape, name, "forward+backward"))
            worst = max(backward.errors.values(), default=None) if backward and backward.timed == "backward" else None
            cells = (_time(forward), _time(backward), percent(forward.copy_fraction), percent(forward.matmul_fraction))
            body.append((shape, name, *cells, _error(forward.errors.get("output")), _error(worst)))
    header = ("shape", "by", "forward", "backward", "copy", "matmul", "error of output", "of the worst gradient")
    why = refusals(row for row in shown if row.implementation in names)
    return "\n".join([_markdown(header, body), *(f"\n{line}" for line in why)]) if body else ""


def _others(rows: list[Row]) -> str:
    """Decode, and the states and output alone."""
    shapes = _names(MAIN_SET)
    body = [
        (row.timed, row.shape, row.implementation, _time(row), percent(row.copy_fraction),
         percent(row.matmul_fraction), _error(row.errors.get("output")))
        for row in sorted(rows, key=lambda row: (row.timed, shapes.index(row.shape) if row.shape in shapes else -1))
        if row.timed == "decode" or (row.timed == "scan+output" and row.shape in shapes)
        if row.ms is not None
    ]  # fmt: skip
    return _markdown(("pass", "shape", "by", "ms", "copy", "matmul", "error of output"), body)


def _markdown(header: tuple[str, ...], body: list[tuple[str, ...]]) -> str:
    """A table, or nothing when it would be empty."""
    rows = [header, ("---",) * len(header), *body] if body else []
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


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
