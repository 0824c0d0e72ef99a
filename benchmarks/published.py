"""A random checkpoint of the size of Qwen3.5-0.8B: made, loaded, generated from, trained a step, and timed.

    python -m benchmarks.published [--folder FOLDER] [--layers 24] [--hidden 1024]

Prints seconds of loading, tokens per second of prefill and of decoding, seconds of a training step,
and the device memory at its highest. The folder, made if it is empty, is a temporary one by default.
"""

import argparse
import pathlib
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import optax
from flax import nnx
from rich.console import Console

from jfla import nn


def settings(layers: int, hidden: int) -> dict[str, Any]:
    """The published settings of Qwen3.5-0.8B, with other numbers of layers and channels."""
    return {
        "model_type": "qwen3_5_text",
        "dtype": "bfloat16",
        "vocab_size": 248320,
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
    def step(model: nn.DeltaLM, optimizer: nnx.Optimizer, tokens: jax.Array) -> jax.Array:
        loss, grads = nnx.value_and_grad(lambda model: nn.next_token_loss(model(tokens), tokens))(
            model
        )
        optimizer.update(model, grads)
        return loss

    return lambda: step(model, optimizer, tokens)


def measure(folder: pathlib.Path, args: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Names and values as text, each as soon as it is measured."""
    if not (folder / "config.json").exists():
        made = nn.from_config(settings(args.layers, args.hidden), rngs=nnx.Rngs(0))
        nn.save_hf(made, folder)
        del made
    start = time.perf_counter()
    model = nn.load_hf(folder)
    jax.block_until_ready(nnx.state(model))
    yield "load, s", f"{time.perf_counter() - start:.2f}"
    sizes = [x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param))]
    yield "parameters", f"{sum(sizes) / 1e9:.3f} B"
    key = jax.random.key(0)
    vocab_size = model.config.vocab_size
    prompt = jax.random.randint(key, (args.batch, args.tokens), 0, vocab_size)
    one = _seconds(lambda: model.generate(prompt, 1, key=key, temperature=0.0))
    many = _seconds(lambda: model.generate(prompt, args.new + 1, key=key, temperature=0.0))
    yield "prefill, tokens/s", f"{prompt.size / one:.0f}"
    yield "decode, tokens/s", f"{args.batch * args.new / (many - one):.1f}"
    step = _training_step(model, prompt)
    yield "training step, s", f"{_seconds(step):.3f}"
    yield "loss", f"{float(step()):.4f}"
    memory = jax.devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in memory:
        yield "peak memory, GB", f"{memory['peak_bytes_in_use'] / 1e9:.2f}"


def main() -> None:
    """Prints every value as it comes."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.published", description=__doc__)
    parser.add_argument("--folder", type=pathlib.Path)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=1024, help="of a prompt, and of a step")
    parser.add_argument("--new", type=int, default=64)
    args = parser.parse_args()
    console = Console()
    console.print(jax.devices()[0].device_kind)
    with tempfile.TemporaryDirectory() as temporary:
        for name, value in measure(args.folder or pathlib.Path(temporary), args):
            console.print(f"{name}: {value}", highlight=False)


if __name__ == "__main__":
    main()
