"""The examples of the README run as they stand."""

import pathlib
import re

import pytest

README = pathlib.Path(__file__).parents[2] / "README.md"
EXAMPLES = re.findall(r"^```python\n(.*?)^```", README.read_text(), flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_example(number: int):
    names: dict = {}
    exec(compile(EXAMPLES[number], f"README.md, example {number + 1}", "exec"), names)
    if "next_out" in names:
        assert names["out"].shape == (2, 1000, 4, 64)
        assert names["next_out"].shape == (2, 1, 4, 64)
        assert names["state"].shape == (2, 4, 64, 64)
    else:
        assert names["logits"].shape == (1, 3, 256)
        assert names["tokens"].shape == (1, 20)


def test_there_are_examples():
    assert len(EXAMPLES) == 2
