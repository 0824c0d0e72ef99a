"""Training, memory and a published model measured at tiny sizes, and what the pages show of their records."""

import dataclasses
import json
import pathlib
import re

import numpy as np
import pytest

from benchmarks import ceilings, memory, model_pages, plot, published, records, training
from benchmarks.ceilings import Ceilings

TINY = training.Model(
    num_layers=1, hidden_size=16, num_heads=1, head_dim=8, rows=1, time=16, steps=6, every=2
)  # fmt: skip


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ceilings, "measured", lambda repeats: Ceilings(2.0, 100.0))
    text = np.frombuffer(b"def f(x):\n    return x + 1\n" * 50, np.uint8)
    monkeypatch.setattr(training, "corpus", lambda: text)


def test_training_ends_with_a_record_that_the_page_shows(tmp_path: pathlib.Path):
    path = tmp_path / "training" / "x.json"
    said: list[str] = []
    training.train(path, TINY, ("gdn",), 600.0, "abc", said.append)
    record = json.loads(path.read_text())
    runs = {run["variant"]: run for run in record["runs"]}
    assert list(runs) == ["kernels", "seed", "float32"]
    for run in runs.values():
        assert run["steps"] == TINY.steps
        assert len(run["bits"]) == TINY.steps // TINY.every
        assert run["tokens_per_s"] > 0
    exact = runs["float32"]["bits"]
    assert runs["kernels"]["bits"] == pytest.approx(exact, abs=0.02)
    assert runs["seed"]["bits"] != pytest.approx(exact, abs=0.02)
    assert runs["float32"]["implementation"] == "xla"
    (part,) = record["parts"]
    together = part["op_ms"] + part["optimizer_ms"] + part["rest_ms"]
    # each is rounded to 1e-4
    assert together == pytest.approx(part["step_ms"], abs=2e-4)

    # Whole runs are kept; a record of another model is not added to.
    before = path.read_text()
    training.train(path, TINY, ("gdn",), 600.0, "abc", said.append)
    assert path.read_text() == before
    with pytest.raises(ValueError, match="is of another model"):
        training.train(
            path, dataclasses.replace(TINY, rows=2), ("gdn",), 600.0, "abc", said.append
        )

    assert model_pages.sections(tmp_path) == []  # not of a GPU
    records.write(path, record | {"platform": "gpu", "device": "NVIDIA H100 80GB HBM3"})
    text = "\n\n".join(model_pages.sections(tmp_path))
    assert "## Training with the kernels and without" in text
    assert "commit abc" in text
    assert f"| GDN | {TINY.steps} |" in text


def test_without_time_nothing_is_begun(tmp_path: pathlib.Path):
    said: list[str] = []
    record = training.train(
        tmp_path / "x.json", TINY, ("kda",), 0.0, "abc", said.append
    )
    assert record["runs"] == []
    assert said[-1] == "kda float32: no time left"


def _trained(path: pathlib.Path) -> None:
    """An invented record: the kernels 0.01 bits below float32, the other seed 0.1 above the kernels."""
    runs = []
    for op in ("kda", "gdn"):
        for name, shift in (("kernels", -0.01), ("seed", 0.09), ("float32", 0.0)):
            bits = [
                round(6 / (1 + i / 20) + shift, 5)
                for i in range(60 if name == "float32" else 100)
            ]
            run = {
                "op": op,
                "variant": name,
                "parameters": 10**8,
                "bits": bits,
                "tokens_per_s": 400_000,
            }
            runs.append(run | {"step_ms": 20.0, "of_matmul": 0.5, "of_peak": 0.4})
    part = {"op": "kda", "op_ms": 5.0, "optimizer_ms": 1.0, "rest_ms": 14.0}
    record = {
        "device": "NVIDIA X",
        "platform": "gpu",
        "date": "2000-01-02",
        "commit": "abc",
        "versions": {"jax": "9.9"},
        "model": dataclasses.asdict(training.Model()),
        "matmul_tflop_per_s": 700.0,
        "runs": runs,
        "parts": [part],
    }
    records.write(path, record)


def test_losses_are_compared_over_the_steps_that_all_have(tmp_path: pathlib.Path):
    path = tmp_path / "training" / "x.json"
    _trained(path)
    text = "\n\n".join(model_pages.sections(tmp_path))
    row = re.search(
        r"\| KDA \| 600 \| (\S+) \| (\S+) \| (\S+) \| (\S+) \| (\S+) \|", text
    )
    assert row is not None
    kernels, seed, exact, apart, of_seeds = map(float, row.groups())
    assert (apart, of_seeds) == (0.01, 0.1)
    assert exact - kernels == pytest.approx(0.01, abs=2e-4)
    assert seed - kernels == pytest.approx(0.1, abs=2e-4)
    assert "| KDA | kernels | 400,000 | 50 % | 40 % | 20 | 5 | 1 | 14 |" in text


def test_the_curves_are_drawn_once_an_op(tmp_path: pathlib.Path):
    _trained(tmp_path / "training" / "x.json")
    curves, every = model_pages.all_curves(tmp_path) or ({}, 0)
    plot.draw_curves(curves, every, tmp_path / "curves.svg", "sha256:1")
    text = (tmp_path / "curves.svg").read_text()
    width, height = map(float, re.search(r'viewBox="0 0 (\S+) (\S+)"', text).groups())  # type: ignore[union-attr]
    assert height <= 900
    assert width <= 900
    assert len(text) < 100_000
    for said in (
        "KDA: bits per byte",
        "GDN: bits per byte",
        "sha256:1",
        "another seed",
    ):
        assert said in text


def test_memory_falls_with_what_is_kept(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "memory" / "x.json"
    remat = {name: memory.REMAT[name] for name in ("False", "save_op")}
    monkeypatch.setattr(memory, "REMAT", remat)
    record = memory.measure(path, "gdn", ["tiny:128"], 600.0, "abc", lambda _: None)
    everything, of_op = record["rows"]
    assert everything["kept_mib"] > of_op["kept_mib"] > 0
    assert everything["peak_mib"] >= of_op["peak_mib"] > 0
    assert of_op["step_ms"] > 0
    before = path.read_text()
    assert (
        memory.measure(path, "gdn", ["tiny:128"], 600.0, "abc", lambda _: None)
        == record
    )
    assert path.read_text() == before
    records.write(path, record | {"platform": "gpu"})
    described = record | {
        "platform": "described",
        "rows": [everything | {"model": "larger"}],
    }
    records.write(path.with_name("y.json"), described)
    text = "\n\n".join(model_pages.sections(tmp_path))
    assert "| GDN | tiny | 128 | save_op |" in text
    assert "| GDN | larger | 128 | False |" in text


@pytest.mark.aot
def test_memory_is_known_for_a_gpu_that_is_not_there(
    tmp_path: pathlib.Path, monkeypatch
):
    monkeypatch.setattr(memory, "REMAT", {"True": True})
    cases = ["tiny:128"]
    record = memory.measure(
        tmp_path / "x.json", "gdn", cases, 600.0, "abc", lambda _: None, described=True
    )
    (row,) = record["rows"]
    assert record["platform"] == "described"
    assert row["refused"] == "not run"
    assert row["peak_mib"] > row["kept_mib"] > 0


def test_a_published_model_is_measured_at_any_size(tmp_path: pathlib.Path):
    path = tmp_path / "published" / "x.json"
    sizes = [
        "--layers",
        "1",
        "--hidden",
        "16",
        "--vocab",
        "64",
        "--tokens",
        "16",
        "--new",
        "2",
    ]
    said: list[str] = []
    published.run(
        published.arguments([*sizes, "--out", str(path), "--commit", "abc"]),
        said.append,
    )
    record = json.loads(path.read_text())
    assert {"device", "commit", "versions", "implementation"} <= record.keys()
    values = {row["name"]: row["value"] for row in record["rows"]}
    for name in (
        "prefill, tokens/s",
        "decode, tokens/s",
        "training, tokens/s",
        "loss, nats",
    ):
        assert values[name] > 0
        assert any(line.startswith(f"{name}: ") for line in said)
    records.write(path, record | {"platform": "gpu"})
    assert "| decode, tokens/s |" in "\n\n".join(model_pages.sections(tmp_path))
