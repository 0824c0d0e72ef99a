"""`python -m benchmarks.record_gates OP FOLDER`: trains the demo's model on text, and keeps its decays' quantiles.

They go to `recorded_gates.json`, from which the gate "recorded" draws. Checkpoints are in FOLDER: an interrupted
training goes on.
"""

import argparse
import functools
import json
import pathlib
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float
from rich.console import Console

from benchmarks.gates import RECORDED, gated
from benchmarks.shapes import OPS, Op
from jfla.cli import data
from jfla.cli.progress import train
from jfla.cli.train import Run, Settings, create
from jfla.nn import DeltaLM

NUM_QUANTILES = 65
ROWS = 64  # of held-out text, from which the decays are
SAVE_EVERY = 250


def record(
    op: Op, steps: int, folder: pathlib.Path, console: Console
) -> dict[str, Any]:
    """What `recorded_gates.json` says of an op."""
    settings = Settings(op=op)
    corpus = data.load_corpus()
    rows = functools.partial(data.text_rows, rows=1, time=settings.time)
    training = Run(*create(settings, steps, None), steps, folder)
    try:
        text = functools.partial(rows, text=corpus.train)
        dataset = data.batches(text, settings.rows, steps, settings.seed)
        train(training, dataset, op, settings.rows * settings.time, SAVE_EVERY, console)
    finally:
        training.close()
    held_out = data.batches(
        functools.partial(rows, text=corpus.held_out), ROWS, 1, settings.seed
    )
    tokens = jnp.asarray(held_out.batch(0).tokens)
    quantiles = quantiles_of(training.model, tokens)
    last = np.mean(training.curves["bits"][-100:])
    return {
        "source": f"the demo's model after {steps} steps of text, {last:.2f} bits per byte",
        "quantiles": np.round(quantiles, 5).tolist(),
    }


def quantiles_of(model: DeltaLM, tokens: Array) -> Float[np.ndarray, "heads quantiles"]:
    """Of the log decays of every head of every layer, over tokens and channels."""
    levels = np.linspace(0, 1, NUM_QUANTILES)
    found = []
    for g in _log_decays(model, tokens):
        by_head = np.moveaxis(np.asarray(g), 2, 0).reshape(g.shape[2], -1)
        found.append(np.quantile(by_head, levels, axis=1).T)
    return np.concatenate(found)


@nnx.jit
def _log_decays(model: DeltaLM, tokens: Array) -> list[Float[Array, "B T HV *K"]]:
    """Of every layer."""
    found = []
    for block, x in zip(model.blocks, model.hidden_states(tokens)):
        mixer: Any = block.mixer
        raw = mixer._decay_input(block.mixer_norm(x))
        found.append(gated(raw, mixer._gate()))
    return found


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.record_gates", description=__doc__
    )
    parser.add_argument("op", choices=OPS)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--steps", type=int, default=3000)
    given = parser.parse_args()
    known = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    known[given.op] = record(given.op, given.steps, given.folder, Console())
    RECORDED.write_text(json.dumps(known) + "\n")


if __name__ == "__main__":
    main()
