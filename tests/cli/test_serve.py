"""The serving demo on a few short requests: what it returns, prints and draws."""

import io
import pathlib

import numpy as np
from matplotlib import image
from rich.console import Console

from jfla.cli import plot, serve


def test_requests_are_served_shown_and_drawn(tmp_path: pathlib.Path):
    workload = serve.Workload(requests=5, slots=2, longest_prompt=9, longest_answer=4)
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


def test_the_same_seed_plans_the_same_requests():
    one, other = (serve.planned(serve.Workload(seed=seed)) for seed in (3, 4))
    assert one == serve.planned(serve.Workload(seed=3))
    assert one != other
