"""The serving demo on a few short requests: what it returns, prints and draws."""

import io
import pathlib
from collections.abc import Callable

import numpy as np
import pytest
from matplotlib import image
from rich.console import Console

from jfla.cli import plot, serve

SMALL = {"requests": 5, "slots": 2, "longest_prompt": 9, "longest_answer": 4}


def test_requests_are_served_shown_and_drawn(tmp_path: pathlib.Path):
    workload = serve.Workload(**SMALL)
    console = Console(file=io.StringIO(), width=120)
    results = serve.run("gdn", tmp_path / "out", console, workload)
    lengths = [planned.length for planned in serve.planned(workload)]
    assert list(results) == [1, 2]
    for served in results.values():
        assert [len(request.tokens) for request in served.requests] == lengths
        assert served.tokens == sum(lengths)
        assert (
            0 < serve.waits(served).min() <= serve.waits(served).max() <= served.seconds
        )
        assert serve.gaps(served).min() > 0
    printed = console.file.getvalue()
    assert "5 requests, each with the tokens that it gets alone" in printed
    pixels = image.imread(tmp_path / "out" / "serving.png")
    for color in (plot.BLUE, plot.ORANGE):
        rgb = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        assert (np.abs(pixels[..., :3] - rgb).max(axis=-1) < 0.02).sum() > 100


def _with_another_token() -> Callable[..., serve.Served]:
    """`serve.serve`, of which the first request's last token is another where there are several slots."""
    right = serve.serve

    def wrong(model, plan, slots, *rest) -> serve.Served:
        served = right(model, plan, slots, *rest)
        if slots > 1:
            tokens = served.requests[0].tokens
            tokens[-1] = (tokens[-1] + 1) % 256
        return served

    return wrong


def test_a_token_that_is_not_the_first_choice_is_an_error(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(serve, "serve", _with_another_token())
    console = Console(file=io.StringIO())
    with pytest.raises(RuntimeError, match=r"at most 1% of .* below the greatest, got"):
        serve.run("kda", tmp_path, console, serve.Workload(**SMALL))


def test_tokens_that_rounding_changes_are_counted(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    """As where two logits are nearly the same: here whatever is chosen counts as such."""
    monkeypatch.setattr(serve, "serve", _with_another_token())
    monkeypatch.setattr(serve, "MOST_BELOW_GREATEST", 1.0)
    console = Console(file=io.StringIO(), width=300)
    serve.run("gdn", tmp_path, console, serve.Workload(**SMALL))
    printed = console.file.getvalue()
    assert "5 requests, 4 of them with the tokens that they get alone" in printed


def test_the_same_seed_plans_the_same_requests():
    one, other = (serve.planned(serve.Workload(seed=seed)) for seed in (3, 4))
    assert one == serve.planned(serve.Workload(seed=3))
    assert one != other
