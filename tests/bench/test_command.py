"""The command as a new user runs it, and who imports whom between the library and its benchmarks."""

import ast
import pathlib

import pytest
from typer.testing import CliRunner

import jfla
from benchmarks import results, shapes
from benchmarks.shapes import Shape
from jfla.cli.app import app

TINY = Shape(1, 64, 1, 8)
LIBRARY = pathlib.Path(jfla.__file__).parent
BENCHMARKS = results.FOLDER.parent


def imported(path: pathlib.Path) -> set[str]:
    """What the import statements of a file name."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(str(node.module))
    return found


def test_the_library_does_not_import_its_benchmarks_nor_hold_results():
    for path in LIBRARY.rglob("*.py"):
        assert not any(name.split(".")[0] == "benchmarks" for name in imported(path)), (
            path
        )
    assert not list(LIBRARY.rglob("*.json"))
    assert (LIBRARY / "py.typed").exists()


def test_the_benchmarks_meet_private_parts_of_the_library_in_one_file():
    inside = [
        path.name
        for path in BENCHMARKS.rglob("*.py")
        if any(x.startswith("jfla.") for x in imported(path))
    ]
    # The others train with the code of the demo.
    assert sorted(inside) == ["internals.py", "record_gates.py", "training.py"]


def test_the_command_measures_draws_and_merges(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    """The whole of `jfla bench` on this machine, on one tiny shape."""
    monkeypatch.setitem(shapes.SETS, "quick", (TINY,))
    run = lambda *arguments: CliRunner().invoke(
        app, arguments, env={"COLUMNS": "200", "TERM": "dumb"}
    )
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    figure, out = tmp_path / "times.png", tmp_path / "merged.json"
    common = (
        "--set",
        "quick",
        "--pass",
        "backward",
        "--implementation",
        "scan",
        "--repeats",
        "1",
    )
    for op, path in zip(("kda", "gdn"), files):
        done = run(
            "bench", *common, "--op", op, "--json", str(path), "--plot", str(figure)
        )
        assert done.exit_code == 0, done.output
        assert "forward+backward" in done.output
    assert figure.stat().st_size > 10_000
    done = run("bench-merge", *map(str, files), "--out", str(out))
    assert done.exit_code == 0, done.output
    assert "copy" in done.output
    rows = results.read(out).rows
    assert len(rows) == 6
    # which on a busy machine drowns in noise, and says so
    timed = [row for row in rows if row.timed != "backward"]
    assert len(timed) == 4
    assert all(row.ms is not None and row.ms > 0 and row.errors for row in timed)
    assert all((row.ms is None) == ("noise" in (row.refused or "")) for row in rows)
    out.write_text("{}")
    assert run("bench-merge", str(files[0]), str(out), "--out", str(out)).exit_code == 2
