"""A random checkpoint of the size of Qwen3.5-0.8B: made, loaded, generated from, trained a step, and timed.

    python -m benchmarks.published [--out FILE.json] [--folder FOLDER] [--layers 24] [--hidden 1024]

Prints seconds of loading, tokens per second of prefill and of decoding, seconds of a training step,
and the device memory at its highest; `--out` gets the same as JSON, each value as soon as it is
there. The folder, made if it is empty, is a temporary one by default.
"""

import argparse
import pathlib
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from rich.console import Console

import jfla
from benchmarks import records
from benchmarks.records import Record
from jfla import nn


def settings(layers: int, hidden: int, vocab_size: int = 248320) -> dict[str, Any]:
    """The published settings of Qwen3.5-0.8B, with other numbers of layers, channels and tokens."""
    return {
        "model_type": "qwen3_5_text",
        "dtype": "bfloat16",
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": hidden * 7 // 2,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25},
        "tie_word_embeddings": True,
    }


def _seconds(run: Callable[[], Any], repeats: int = 3) -> float:
    """Of the fastest call behind the first, which compiles."""
    jax.block_until_ready(run())
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - start)
    return min(times)


def _training_step(model: nn.DeltaLM, tokens: jax.Array) -> Callable[[], jax.Array]:
    optimizer = nnx.Optimizer(model, optax.sgd(1e-4), wrt=nnx.Param)

    @nnx.jit
    def step(
        model: nn.DeltaLM, optimizer: nnx.Optimizer, tokens: jax.Array
    ) -> jax.Array:
        loss, grads = nnx.value_and_grad(
            lambda model: nn.next_token_loss(model(tokens), tokens)
        )(model)
        optimizer.update(model, grads)
        return loss

    return lambda: step(model, optimizer, tokens)


def measure(
    folder: pathlib.Path, args: argparse.Namespace
) -> Iterator[tuple[str, float]]:
    """Names and values, each as soon as it is measured."""
    if not (folder / "config.json").exists():
        made = nn.from_config(_settings(args), rngs=nnx.Rngs(0))
        nn.save_hf(made, folder)
        del made
    start = time.perf_counter()
    model = nn.load_hf(folder)
    jax.block_until_ready(nnx.state(model))
    yield "load, s", time.perf_counter() - start
    sizes = [x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param))]
    yield "parameters, M", sum(sizes) / 1e6
    yield from _peak("peak memory, loaded, GB")
    key = jax.random.key(0)
    vocab_size = model.config.vocab_size
    prompt = jax.random.randint(key, (args.batch, args.tokens), 0, vocab_size)
    one = _seconds(lambda: model.generate(prompt, 1, key=key, temperature=0.0))
    yield "prefill, tokens/s", prompt.size / one
    many = _seconds(
        lambda: model.generate(prompt, args.new + 1, key=key, temperature=0.0)
    )
    yield "decode, tokens/s", args.batch * args.new / max(many - one, 1e-9)
    yield from _peak("peak memory, generated, GB")
    step = _training_step(model, prompt)
    seconds = _seconds(step)
    yield "training step, s", seconds
    yield "training, tokens/s", prompt.size / seconds
    yield "loss, nats", float(step())
    yield from _peak("peak memory, trained, GB")


def _peak(name: str) -> Iterator[tuple[str, float]]:
    """The device's memory at its highest so far, where it is counted."""
    peak = records.peak_bytes()
    if peak is not None:
        yield name, peak / 1e9


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    return settings(args.layers, args.hidden, args.vocab)


def _choice(settings: dict[str, Any], batch: int, tokens: int) -> jfla.Choice:
    """Which implementation the linear layers take in prefill."""
    of_heads = (batch, tokens, settings["linear_num_value_heads"])
    x = jax.ShapeDtypeStruct((*of_heads, settings["linear_key_head_dim"]), jnp.bfloat16)
    gate = jax.ShapeDtypeStruct(of_heads, jnp.float32)
    return jfla.explain(jfla.chunk_gdn, x, x, x, gate, gate, return_final_state=True)


def run(args: argparse.Namespace, say: Callable[[str], None]) -> Record:
    """Says every value as it comes, and keeps it."""
    made = _settings(args)
    choice = _choice(made, args.batch, args.tokens)
    record = records.head(args.commit) | {
        "settings": made,
        "batch": args.batch,
        "tokens": args.tokens,
        "new": args.new,
        "implementation": choice.implementation,
        "rows": [],
    }
    say(f"{record['device']}, commit {record['commit']}, {record['versions']}")
    say(f"chunk_gdn by {choice.implementation}")
    with tempfile.TemporaryDirectory() as temporary:
        for name, value in measure(args.folder or pathlib.Path(temporary), args):
            record["rows"].append({"name": name, "value": float(f"{value:.5g}")})
            say(f"{name}: {value:,.5g}")
            if args.out is not None:
                records.write(args.out, record)
    return record


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """The command's options."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.published", description=__doc__
    )
    parser.add_argument("--out", type=pathlib.Path, help="the record, JSON")
    parser.add_argument("--folder", type=pathlib.Path)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--vocab", type=int, default=248320)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument(
        "--tokens", type=int, default=1024, help="of a prompt, and of a step"
    )
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--commit", help="where there is no git to ask")
    return parser.parse_args(given)


def main() -> None:
    """The command."""
    console = Console(width=160)
    run(arguments(), lambda text: console.print(text, highlight=False))


if __name__ == "__main__":
    main()
