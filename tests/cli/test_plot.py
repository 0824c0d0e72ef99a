"""The curve: a smoothing that neither lags nor leaves the data, and a picture that replaces the last one."""

import pathlib

import numpy as np
from matplotlib import image

from jfla.cli import plot


def test_smoothing_follows_a_slope_and_keeps_constants():
    line = np.linspace(0, 1, 300)
    np.testing.assert_allclose(plot.smoothed(line)[50:-50], line[50:-50], atol=1e-12)
    np.testing.assert_allclose(plot.smoothed([0.5] * 7), 0.5)
    assert plot.smoothed([3.0]).tolist() == [3.0]


def test_the_picture_shows_both_curves(tmp_path: pathlib.Path):
    for steps in (1, 40):
        path = tmp_path / "loss.png"
        plot.draw(
            path,
            "title",
            np.linspace(8, 3, steps).tolist(),
            4.5,
            np.linspace(0, 1, steps).tolist(),
            0.1,
        )
        pixels = image.imread(path)
        assert min(pixels.shape[:2]) > 500
        assert [path.name for path in tmp_path.iterdir()] == ["loss.png"]
        check_colors(pixels)


def test_the_picture_of_a_finetuning_shows_both_curves(tmp_path: pathlib.Path):
    path = tmp_path / "loss.png"
    accuracy = np.linspace(0.2, 0.6, 30).tolist()
    plot.draw_finetuning(path, "title", np.linspace(3, 2, 30).tolist(), accuracy)
    check_colors(image.imread(path))
    assert [path.name for path in tmp_path.iterdir()] == ["loss.png"]


def check_colors(pixels: np.ndarray) -> None:
    """Of both curves."""
    for color in (plot.BLUE, plot.ORANGE):
        rgb = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        assert (np.abs(pixels[..., :3] - rgb).max(axis=-1) < 0.02).sum() > 100
