"""The examples of the README run as they stand."""

import pathlib
import re

import pytest

README = pathlib.Path(__file__).parents[2] / "README.md"
EXAMPLES = re.findall(
    r"^```python\n(.*?)^```", README.read_text(), flags=re.DOTALL | re.MULTILINE
)

SHAPES: list[dict[str, tuple[int, ...]]] = [
    {"out": (2, 1000, 4, 64), "next_out": (2, 1, 4, 64), "state": (2, 4, 64, 64)},
    {"logits": (1, 3, 256), "tokens": (1, 20)},
    {"y": (1, 100, 64), "next_y": (1, 1, 64)},
]


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_example(number: int, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)  # one of them saves
    names: dict = {}
    exec(compile(EXAMPLES[number], f"README.md, example {number + 1}", "exec"), names)
    assert {name: names[name].shape for name in SHAPES[number]} == SHAPES[number]


def test_there_are_examples():
    assert len(EXAMPLES) == len(SHAPES)
