"""The demo itself, on a tiny model: it learns, survives kill -9, goes on to the same bits, and knows its own folder."""

import functools
import io
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys

import numpy as np
import orbax.checkpoint as ocp
import pytest
from rich.console import Console

from jfla.cli import data, demo
from jfla.cli.train import Run, Settings, create

TINY = Settings(
    op="gdn",
    hidden_size=32,
    num_layers=1,
    num_heads=1,
    head_dim=16,
    rows=4,
    time=32,
    learning_rate=1e-2,
)
STEPS, SAVE_EVERY = 40, 5


def run(
    out: pathlib.Path, steps: int = STEPS, settings: Settings = TINY, mesh_shape=None
) -> tuple[dict, str]:
    """(results, what was printed)"""
    console = Console(file=io.StringIO(), width=200)
    results = demo.run(
        settings.op, steps, out, "xla", settings.seed, console, settings, mesh_shape
    )
    return results, console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]


def curves(out: pathlib.Path, name: str, step: int) -> dict[str, list[float]]:
    return json.loads((out / name / str(step) / "curves" / "metadata").read_text())


@pytest.fixture(scope="module", autouse=True)
def _save_often():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "SAVE_EVERY", SAVE_EVERY)
        yield


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, dict]:
    """A run that nobody interrupted."""
    out = tmp_path_factory.mktemp("demo") / "finished"
    return out, run(out)[0]


def test_a_run_learns_and_leaves_its_results(finished: tuple[pathlib.Path, dict]):
    out, results = finished
    bits = curves(out, "text", STEPS)["bits"]
    assert len(bits) == STEPS
    assert bits[0] > 7.5
    assert bits[-1] < bits[0] - 2
    assert results["text"]["bits"] < bits[0] - 2
    assert results["steps"] == STEPS
    assert results["sample"].startswith("def ")
    assert len(results["sample"]) == len("def ") + 400
    assert (out / "loss.png").stat().st_size > 10_000


def test_a_finished_run_is_shown_and_not_repeated(finished: tuple[pathlib.Path, dict]):
    out, results = finished
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    again, printed = run(out)
    assert again == results
    assert f"a finished run of {STEPS} steps" in printed
    assert f"{results['text']['bits']:.2f} bits per byte" in printed
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before


def test_a_killed_run_goes_on_to_the_same_bits(
    finished: tuple[pathlib.Path, dict], tmp_path: pathlib.Path
):
    out = tmp_path / "out"
    program = f"""
import os, pathlib, rich.console, signal
from jfla.cli import demo, train
save = train.Run._save
def save_and_die(self):
    save(self)  # goes on writing in the background
    if self.step > {2 * SAVE_EVERY}:
        os.kill(os.getpid(), signal.SIGKILL)
train.Run._save = save_and_die
demo.SAVE_EVERY = {SAVE_EVERY}
demo.run("gdn", {STEPS}, pathlib.Path({str(out)!r}), "xla", 0, rich.console.Console(), train.{TINY!r})
"""
    died = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert died.returncode == -signal.SIGKILL, died.stderr
    assert not (out / "results.json").exists()
    # What a kill in the middle of writing leaves behind, whether or not this one did.
    (out / "text" / f"{STEPS - 1}.orbax-checkpoint-tmp").mkdir(exist_ok=True)
    saved = [int(path.name) for path in (out / "text").iterdir() if path.name.isdigit()]

    results, printed = run(out)
    assert f"text: continuing after step {max(saved)}" in printed
    whole, expected = finished
    for name in ("text", "recall"):
        assert curves(out, name, STEPS) == curves(whole, name, STEPS)
        assert results[name] == expected[name]
    assert results["sample"] == expected["sample"]


def test_a_checkpoint_has_the_curves_of_its_step(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    """It is written in the background, while the next steps are done."""
    saved = {}

    def save(self, step: int, args, force: bool) -> None:
        saved[step] = args["curves"].item

    monkeypatch.setattr(ocp.CheckpointManager, "save", save)
    steps = 3
    training = Run(*create(TINY, steps, "xla"), steps, tmp_path)
    rows = functools.partial(data.recall_rows, rows=1, time=TINY.time)
    list(training.train(data.batches(rows, TINY.rows, steps, seed=0), save_every=1))
    training.close()
    assert {step: len(curves["bits"]) for step, curves in saved.items()} == {
        1: 1,
        2: 2,
        3: 3,
    }


def test_a_run_goes_on_under_a_mesh(
    finished: tuple[pathlib.Path, dict], tmp_path: pathlib.Path
):
    """Checkpoints of one device, restored on eight, lead to the loss of one device.

    Sums over devices are ordered differently: in float32 that changes the last bits of gradients,
    in the five steps that are left by 1e-6 bits per token and less than 1e-4. Another batch, or
    moments of the optimizer that were lost, change more than 1e-2.
    """
    whole, expected = finished
    out = tmp_path / "out"
    shutil.copytree(whole, out)
    (out / "results.json").unlink()
    for name in ("text", "recall"):
        shutil.rmtree(out / name / str(STEPS))
    results, printed = run(out, mesh_shape={"data": 2, "sequence": 4, "model": 1})
    for name in ("text", "recall"):
        assert f"{name}: continuing after step {STEPS - SAVE_EVERY}" in printed
        bits = curves(out, name, STEPS)["bits"]
        np.testing.assert_allclose(
            bits, curves(whole, name, STEPS)["bits"], rtol=0, atol=1e-4
        )
        assert results[name]["bits"] == pytest.approx(expected[name]["bits"], abs=1e-4)
    assert len(results["sample"]) == len(expected["sample"])


def test_more_steps_go_on_from_a_finished_run(finished: tuple[pathlib.Path, dict]):
    out, _ = finished
    first = curves(out, "recall", STEPS)["bits"]
    results, printed = run(out, STEPS + 3)
    assert f"recall: continuing after step {STEPS}" in printed
    assert results["steps"] == STEPS + 3
    after = curves(out, "recall", STEPS + 3)["bits"]
    assert after[:STEPS] == first
    assert len(after) == STEPS + 3


def test_a_folder_belongs_to_its_settings(finished: tuple[pathlib.Path, dict]):
    out, _ = finished
    with pytest.raises(
        demo.Refused,
        match="holds a run with op = gdn: give another folder or remove this one",
    ):
        demo.claim(out, Settings(**{**vars(TINY), "op": "kda"}))
