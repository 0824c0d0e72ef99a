"""Tables, picture and generated pages: what they show of given results, and that ours are of the newest results."""

import dataclasses
import pathlib
import re

import pytest
from typer.testing import CliRunner

from benchmarks import overview, pages, plot, report, results
from benchmarks.ceilings import Ceilings
from benchmarks.measure import Timing
from benchmarks.providers import PROVIDERS
from benchmarks.results import Results, Row
from benchmarks.shapes import Case, Shape
from jfla.cli.app import app

CEILINGS = Ceilings(4.0, 800.0)
SHAPE = Shape(1, 8192, 32)


@pytest.fixture
def record() -> Results:
    """Invented times of an invented GPU."""
    rows = []
    for name, ms in (("pallas", 0.5), ("fla", 1.25)):
        forward = results.timed_row(
            Case("kda", "forward", SHAPE, "strong"), name, _timing(ms), CEILINGS
        )
        forward.errors = {"output": 3e-3, "final_state": 2e-3}
        case = Case("kda", "forward+backward", SHAPE, "strong")
        both = results.timed_row(case, name, _timing(4 * ms), CEILINGS)
        both.errors = {"output": 3e-3, "dq": 4e-3, "dg": 6e-3}
        rows += [forward, both, results.backward_row(case, forward, both, CEILINGS)]
    rows.append(
        Row(
            "kda",
            "forward",
            str(Shape(1, 65536, 32)),
            "strong",
            "fla",
            refused="out of memory",
        )
    )
    rows.append(
        Row("kda", "forward", str(SHAPE), "strong", "cudnn", refused="closed today")
    )
    decode = results.timed_row(
        Case("kda", "decode", Shape(1, 1, 32), "strong"),
        "pallas",
        _timing(0.01),
        CEILINGS,
    )
    return Results(
        "NVIDIA X",
        "gpu",
        "2000-01-02",
        "abc",
        {"jax": "9.9"},
        CEILINGS,
        [*rows, decode],
    )


def _timing(ms: float) -> Timing:
    return Timing(ms, 0.9 * ms, 1.1 * ms, 1.5 * ms, "device", 7)


def test_the_table_has_a_line_for_every_row_and_the_reasons_below(record: Results):
    lines = report.plain(record).splitlines()
    assert lines[0] == "NVIDIA X, 2000-01-02, jax 9.9: copy 4 TB/s, matmul 800 TFLOP/s"
    assert len(lines) == 2 + len(record.rows) + 1 + 2
    forward = next(line for line in lines if "forward " in line and "pallas" in line)
    assert forward.split()[:8] == [
        "kda",
        "forward",
        "B1",
        "T8192",
        "H32",
        "D128",
        "strong",
        "pallas",
    ]
    assert forward.split()[8:11] == ["0.5", "10", "%"]
    assert "no: cudnn: closed today (kda forward B1 T8192 H32 D128 strong)" in lines
    assert "output 3.0e-03" in forward


def test_the_page_shows_times_errors_and_reasons(
    record: Results, tmp_path: pathlib.Path
):
    path = tmp_path / "results.json"
    record.write(path)
    text = pages.page(path)
    assert "## Measured on 2000-01-02" in text
    assert "One NVIDIA X, commit abc; jax 9.9." in text
    shares = f"{100 * record.rows[0].copy_fraction:.0f} % | {100 * record.rows[0].matmul_fraction:.0f} %"
    assert (
        f"| B1 T8192 H32 D128 | pallas | 0.5 | 1.5 | {shares} | 3.0e-03 | 6.0e-03 |"
        in text
    )
    assert "| B1 T65536 H32 D128 | fla | no |" in text
    assert "no: fla: out of memory (kda forward B1 T65536 H32 D128 strong)" in text
    assert "no: cudnn: closed today (kda forward B1 T8192 H32 D128 strong)" in text
    assert "| cudnn |" not in text  # nothing was measured of it
    assert "| decode | B1 T1 H32 D128 | pallas | 0.01 |" in text
    assert "**GDN**" not in text


def test_other_sets_have_a_heading(record: Results, tmp_path: pathlib.Path):
    packed = Case("gdn", "forward", Shape(1, 16384, 32, packing="skewed", segments=20))
    record.rows.append(results.timed_row(packed, "pallas", _timing(0.625), CEILINGS))
    record.settings = {"FLA_CACHE_MODE": "full"}
    record.write(tmp_path / "results.json")
    main, others = pages.page(tmp_path / "results.json").split(
        '### The set "packed": `jfla bench --set packed`'
    )
    assert "**GDN**" not in main
    assert "| 0.5 |" not in others
    assert "| B1 T16384 H32 D128 skewed S20 | pallas | 0.625 |" in others
    assert "jax 9.9, FLA_CACHE_MODE full." in main


def test_what_was_not_measured_again_is_shown_with_the_commit_it_was_measured_at(
    record: Results, tmp_path: pathlib.Path
):
    again = dataclasses.replace(record, rows=list(record.rows), commit="new")
    record.rows.append(
        results.timed_row(
            Case("gdn", "forward", Shape(1, 8192, 32)),
            "pallas",
            _timing(0.625),
            CEILINGS,
        )
    )
    record.commit = "old"
    record.write(tmp_path / "day-before.json")
    again.write(tmp_path / "day.json")
    elsewhere = dataclasses.replace(again, device="another", date="1999-12-31")
    elsewhere.write(tmp_path / "elsewhere.json")
    now = pages.page(tmp_path / "day.json")
    _, earlier, on_another = pages.earlier_page(tmp_path / "day.json").split(
        "## Measured on "
    )
    assert earlier.startswith("2000-01-02, and not again")
    assert "commit new" in now
    assert "**GDN**" not in now
    assert "commit old: [benchmarks/results/day-before.json](" in earlier
    assert "another, commit new: [benchmarks/results/elsewhere.json](" in on_another
    assert "**KDA**" in on_another
    assert "| B1 T8192 H32 D128 | pallas | 0.625 |" in earlier
    assert "**KDA**" not in earlier
    alone = pages.earlier_page(tmp_path / "day-before.json")
    assert "2000-01-02" not in alone


@pytest.fixture
def at_production(record: Results) -> Results:
    """Invented times of KDA at the bounded gate: ours and those of peers that cut, or have no backward."""
    for shape in (SHAPE, Shape(8, 4096, 32)):
        for name, ms in (("pallas", 2.0), ("cudnn", 1.0), ("jla", 3.0)):
            forward = results.timed_row(
                Case("kda", "forward", shape, "production"), name, _timing(ms), CEILINGS
            )
            case = Case("kda", "forward+backward", shape, "production")
            both = results.timed_row(case, name, _timing(ms + 4), CEILINGS)
            record.rows += [
                forward,
                both,
                results.backward_row(case, forward, both, CEILINGS),
            ]
    case = Case("kda", "forward", Shape(8, 4096, 32), "production")
    record.rows.append(results.timed_row(case, "flashinfer", _timing(0.5), CEILINGS))
    return record


def test_the_overview_has_the_gates_of_models_and_says_who_drops_what(
    at_production: Results,
):
    text = overview.overview(at_production)
    # FLA has times at strong gates alone. The fastest of the others is not jla.
    assert (
        "| KDA 1 x 8192 | 2.00 / 4.00 | 1.25 / **3.75** | **1.00** † cuDNN | 4.00 cuDNN |"
        in text
    )
    assert (
        "| KDA 8 x 4096 | 2.00 / **4.00** |  | **0.500** FlashInfer | **4.00** cuDNN |"
        in text
    )
    assert "KDA 1 x 65536" not in text  # of ours there is none
    assert "Not in every row: FLA (out of memory), cuDNN (closed today)." in text
    assert "2000-01-02, commit abc;" in text
    assert "KDA of jfla" in text
    assert "The others: FLA 0.6.0, cuDNN frontend 1.32.0, FlashInfer 0.7.2." in text
    assert "jla" not in text


def test_without_times_at_the_gate_of_models_those_at_strong_gates_are_shown(
    record: Results,
):
    assert "| KDA 1 x 8192 | **0.500** / **1.50** |" in overview.overview(record)


def test_pages_that_were_written_agree_until_something_changes(
    record: Results, tmp_path: pathlib.Path
):
    path = tmp_path / "results.json"
    record.write(path)
    site = pages.Pages(tmp_path)
    site.tables.parent.mkdir()
    site.readme.write_text(f"before\n{pages.BEGIN}\nold\n{pages.END}\nafter\n")
    assert "the block of README.md" in str(pages.disagreement(site, path))
    pages.write(site, path, plot.draw_overview, plot.draw_curves)
    assert pages.disagreement(site, path) is None
    assert site.readme.read_text().startswith("before\n")
    assert site.readme.read_text().endswith("\nafter\n")
    for page, said in (
        (site.readme, "the block of"),
        (site.tables, "benchmarks.md"),
        (site.picture, "picture"),
    ):
        written = page.read_text()
        page.write_text(written.replace("1.25", "1.26").replace("sha256:", "sha255:"))
        assert said in str(pages.disagreement(site, path))
        page.write_text(written)
    assert pages.disagreement(site, path) is None


def test_the_picture_is_small_and_names_everybody():
    text = pages.REPOSITORY.picture.read_text()
    width, height = (
        float(x) for x in re.search(r'viewBox="0 0 (\S+) (\S+)"', text).groups()
    )
    assert height <= 900
    assert width <= 900
    assert len(text) < 60_000
    newest = pages.current()
    assert newest is not None
    times = overview.chosen(results.read(newest))
    names = {overview.NAMES[time.implementation] for time in times}
    assert "jfla" in names
    for name in (*names, "KDA: forward", "GDN: backward"):
        assert name in text


def test_every_implementation_has_a_color():
    assert plot.COLORS.keys() == PROVIDERS.keys()


def test_there_is_nothing_to_draw_without_times(
    record: Results, tmp_path: pathlib.Path
):
    record.rows = [row for row in record.rows if row.ms is None]
    with pytest.raises(ValueError, match="no time"):
        plot.draw_results(record, tmp_path / "plot.png")


def test_the_markers_must_be_there(tmp_path: pathlib.Path):
    (tmp_path / "README.md").write_text("no markers")
    with pytest.raises(ValueError, match="bench:begin"):
        pages.disagreement(pages.Pages(tmp_path), None)


def test_the_pages_of_the_repository_are_those_of_its_newest_results():
    assert pages.disagreement(pages.REPOSITORY, pages.current()) is None


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--op", "mamba"], "ops must be among kda, gdn, got 'mamba'"),
        (["--set", "huge"], "sets must be among quick, readme, paper"),
        (
            ["--implementation", "triton"],
            "implementations must be among pallas, pallas_chain, pallas_states",
        ),
    ],
)
def test_the_command_names_wrong_options(arguments: list[str], said: str):
    result = CliRunner().invoke(
        app, ["bench", *arguments], env={"COLUMNS": "200", "TERM": "dumb"}
    )
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())


def test_the_command_checks_the_pages():
    result = CliRunner().invoke(app, ["bench", "--readme", "check"])
    assert result.exit_code == 0
    assert "agree with the newest results" in result.output
