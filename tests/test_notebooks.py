"""Each notebook's text and its rendered .ipynb say the same, and all of them install jfla in the same way."""

import json
import pathlib
import re

import pytest

FOLDER = pathlib.Path(__file__).parents[1] / "notebooks"
SOURCES = sorted(FOLDER.glob("*.py"))
MAX_BYTES = 400_000


def cells_of_text(source: pathlib.Path) -> list[tuple[str, str]]:
    """(type, source) of each cell of a notebook in the percent format."""
    _, *cells = re.split(r"^# %%", source.read_text(), flags=re.MULTILINE)
    result = []
    for cell in cells:
        head, _, body = cell.partition("\n")
        if "[markdown]" in head:
            body = re.sub(r"^# ?", "", body, flags=re.MULTILINE)
        result.append(("markdown" if "[markdown]" in head else "code", body.strip()))
    return result


def rendered(source: pathlib.Path) -> list[dict]:
    return json.loads(source.with_suffix(".ipynb").read_text())["cells"]


def test_there_are_notebooks():
    assert [source.stem[:2] for source in SOURCES] == [
        f"{n:02}" for n in range(1, len(SOURCES) + 1)
    ]
    assert len(SOURCES) >= 1


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_text_and_rendered_notebook_agree(source: pathlib.Path):
    cells = [
        (cell["cell_type"], "".join(cell["source"]).strip())
        for cell in rendered(source)
    ]
    assert cells == cells_of_text(source)


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_rendered_notebook_ran_to_its_end(source: pathlib.Path):
    code = [cell for cell in rendered(source) if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell["outputs"]]
    assert {output["output_type"] for output in outputs} <= {
        "stream",
        "display_data",
        "execute_result",
    }
    pictures = [
        any("image/png" in output.get("data", {}) for output in cell["outputs"])
        for cell in code
    ]
    assert pictures == [
        any("plt.show()" in x or "display(" in x for x in cell["source"])
        for cell in code
    ]
    assert any(pictures)
    assert all(output.get("name") != "stderr" for output in outputs), (
        "a warning is shown in the rendered notebook"
    )
    assert source.with_suffix(".ipynb").stat().st_size < MAX_BYTES


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_badge_and_installation(source: pathlib.Path):
    (_, title), (_, install), *_ = cells_of_text(source)
    assert install == cells_of_text(SOURCES[0])[1][1]
    repository = re.search(
        r'^REPOSITORY = "https://github.com/(.+)"$', install, re.MULTILINE
    )
    assert repository is not None
    badge = f"https://colab.research.google.com/github/{repository[1]}/blob/main/notebooks/{source.stem}.ipynb"
    assert f"]({badge})" in title
