"""Tables, plot and the README's block: what they show of given results, and that ours are of the newest results."""

import dataclasses
import pathlib

import pytest
from typer.testing import CliRunner

from jfla.bench import plot, readme, report, results
from jfla.bench.ceilings import Ceilings
from jfla.bench.measure import Timing
from jfla.bench.results import Results, Row
from jfla.bench.shapes import Case, Shape
from jfla.cli.app import app

CEILINGS = Ceilings(4.0, 800.0)
SHAPE = Shape(1, 8192, 32)


@pytest.fixture
def record() -> Results:
    """Invented times of an invented GPU."""
    rows = []
    for name, ms in (("pallas", 0.5), ("fla", 1.25)):
        forward = results.timed_row(Case("kda", "forward", SHAPE), name, _timing(ms), CEILINGS)
        forward.errors = {"output": 3e-3, "final_state": 2e-3}
        case = Case("kda", "forward+backward", SHAPE)
        both = results.timed_row(case, name, _timing(4 * ms), CEILINGS)
        both.errors = {"output": 3e-3, "dq": 4e-3, "dg": 6e-3}
        rows += [forward, both, results.backward_row(case, forward, both, CEILINGS)]
    rows.append(Row("kda", "forward", str(Shape(1, 65536, 32)), "strong", "fla", refused="out of memory"))
    rows.append(Row("kda", "forward", str(SHAPE), "strong", "cudnn", refused="closed today"))
    decode = results.timed_row(Case("kda", "decode", Shape(1, 1, 32)), "pallas", _timing(0.01), CEILINGS)
    return Results("NVIDIA X", "gpu", "2000-01-02", "abc", {"jax": "9.9"}, CEILINGS, [*rows, decode])


def _timing(ms: float) -> Timing:
    return Timing(ms, 0.9 * ms, 1.1 * ms, 1.5 * ms, "device", 7)


def test_the_table_has_a_line_for_every_row_and_the_reasons_below(record: Results):
    lines = report.plain(record).splitlines()
    assert lines[0] == "NVIDIA X, 2000-01-02, jax 9.9: copy 4 TB/s, matmul 800 TFLOP/s"
    assert len(lines) == 2 + len(record.rows) + 1 + 2
    forward = next(line for line in lines if "forward " in line and "pallas" in line)
    assert forward.split()[:8] == ["kda", "forward", "B1", "T8192", "H32", "D128", "strong", "pallas"]
    assert forward.split()[8:11] == ["0.5", "10", "%"]
    assert "no: cudnn: closed today (kda forward B1 T8192 H32 D128 strong)" in lines
    assert "output 3.0e-03" in forward


def test_the_readme_block_shows_times_errors_and_reasons(record: Results, tmp_path: pathlib.Path):
    path = tmp_path / "results.json"
    record.write(path)
    text = readme.block(path, tmp_path)
    assert "One NVIDIA X, 2000-01-02, commit abc; jax 9.9." in text
    shares = f"{100 * record.rows[0].copy_fraction:.0f} % | {100 * record.rows[0].matmul_fraction:.0f} %"
    assert f"| B1 T8192 H32 D128 | pallas | 0.5 | 1.5 | {shares} | 3.0e-03 | 6.0e-03 |" in text
    assert "| B1 T65536 H32 D128 | fla | no |" in text
    assert "no: fla: out of memory (kda forward B1 T65536 H32 D128 strong)" in text
    assert "cudnn" not in text  # nothing was measured of it
    assert "| decode | B1 T1 H32 D128 | pallas | 0.01 |" in text
    assert "GDN" not in text


def test_other_sets_are_folded_away(record: Results, tmp_path: pathlib.Path):
    packed = Case("gdn", "forward", Shape(1, 16384, 32, packing="skewed", segments=20))
    record.rows.append(results.timed_row(packed, "pallas", _timing(0.625), CEILINGS))
    record.settings = {"FLA_CACHE_MODE": "full"}
    record.write(tmp_path / "results.json")
    text = readme.block(tmp_path / "results.json", tmp_path)
    shown, folded = text.split("<details>")
    assert "GDN" not in shown
    assert "| 0.5 |" not in folded
    assert '<summary>The set "packed": <code>jfla bench --set packed</code></summary>' in folded
    assert "| B1 T16384 H32 D128 skewed S20 | pallas | 0.625 |" in folded
    assert "jax 9.9, FLA_CACHE_MODE full." in shown


def test_what_was_not_measured_again_is_shown_with_the_commit_it_was_measured_at(
    record: Results, tmp_path: pathlib.Path
):
    again = dataclasses.replace(record, rows=list(record.rows), commit="new")
    record.rows.append(
        results.timed_row(Case("gdn", "forward", Shape(1, 8192, 32)), "pallas", _timing(0.625), CEILINGS)
    )
    record.commit = "old"
    record.write(tmp_path / "day-before.json")
    again.write(tmp_path / "day.json")
    now, earlier = readme.block(tmp_path / "day.json", tmp_path).split("Measured earlier and not again")
    assert "commit new" in now
    assert "GDN" not in now
    assert "commit old: [day-before.json](day-before.json)" in earlier
    assert "| B1 T8192 H32 D128 | pallas | 0.625 |" in earlier
    assert "KDA" not in earlier
    assert "earlier" not in readme.block(tmp_path / "day-before.json", tmp_path)


def test_a_readme_that_was_written_agrees_until_something_changes(record: Results, tmp_path: pathlib.Path):
    path, page = tmp_path / "results.json", tmp_path / "README.md"
    record.write(path)
    page.write_text(f"before\n{readme.BEGIN}\nold\n{readme.END}\nafter\n")
    assert "block" in str(readme.disagreement(page, path))
    readme.write(page, path, plot.draw)
    assert readme.disagreement(page, path) is None
    assert page.read_text().startswith("before\n")
    assert page.read_text().endswith("\nafter\n")
    written = path.with_suffix(".svg").read_text()
    plot.draw(record, path.with_suffix(".svg"), "sha256:of something else")
    assert "not the plot" in str(readme.disagreement(page, path))
    path.with_suffix(".svg").write_text(written)
    page.write_text(page.read_text().replace("| 0.5 |", "| 0.4 |"))
    assert "block" in str(readme.disagreement(page, path))


def test_there_is_nothing_to_draw_without_times(record: Results, tmp_path: pathlib.Path):
    record.rows = [row for row in record.rows if row.ms is None]
    with pytest.raises(ValueError, match="no time"):
        plot.draw(record, tmp_path / "plot.png")


def test_the_markers_must_be_there(tmp_path: pathlib.Path):
    (tmp_path / "README.md").write_text("no markers")
    with pytest.raises(ValueError, match="bench:begin"):
        readme.disagreement(tmp_path / "README.md", None)


def test_the_readme_of_the_repository_is_that_of_its_newest_results():
    assert readme.disagreement(readme.README, readme.current()) is None


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--op", "mamba"], "ops must be among kda, gdn, got 'mamba'"),
        (["--set", "huge"], "sets must be among quick, paper"),
        (["--implementation", "triton"], "implementations must be among pallas, xla, scan"),
    ],
)
def test_the_command_names_wrong_options(arguments: list[str], said: str):
    result = CliRunner().invoke(app, ["bench", *arguments], env={"COLUMNS": "200", "TERM": "dumb"})
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())


def test_the_command_checks_the_readme():
    result = CliRunner().invoke(app, ["bench", "--readme", "check"])
    assert result.exit_code == 0
    assert "agrees" in result.output
