"""A published model here and in Transformers, side by side: hidden states, logits, greedy tokens.

    python -m benchmarks.parity FOLDER [--prompt TEXT | --tokens N] [--new N] [--dtype float32]

Needs torch and transformers, whose code is the reference, on the CPU; neither is among the
project's own requirements. The prompt is a text, where the folder has a tokenizer, or random
tokens. Ends with status 1 where greedy tokens differ, or an error is above `--tolerance`.
"""

import argparse
import dataclasses
import pathlib
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from jfla import nn

_TOLERANCE = {"float32": 1e-4, "bfloat16": 3e-2}


class Results(NamedTuple):
    """Of one model on one prompt: named arrays, and the tokens that follow greedily."""

    arrays: dict[str, np.ndarray]
    tokens: list[int]


def ours(folder: pathlib.Path, prompt: list[int], new: int, dtype: str) -> Results:
    """By `jfla.nn.load_hf`."""
    config = nn.hf_config(folder)
    config = dataclasses.replace(
        config, dtype=jnp.dtype(dtype), param_dtype=jnp.dtype(dtype)
    )
    model = nn.load_hf(folder, config)
    tokens = jnp.array([prompt])
    states = model.hidden_states(tokens)
    logits = model.logits(states[-1])
    # The peer does not show what leaves the last block before the final norm.
    shown = [*states[:-2], states[-1]]
    generated = model.generate(tokens, new, key=jax.random.key(0), temperature=0.0)
    return Results(_named(shown, logits), np.asarray(generated)[0].tolist())


def theirs(folder: pathlib.Path, prompt: list[int], new: int, dtype: str) -> Results:
    """By the model authors' code in Transformers."""
    import torch  # type: ignore[import-not-found]
    import transformers  # type: ignore[import-not-found]

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype)
    )
    model.eval()
    # An end of text does not end it here either.
    model.generation_config.eos_token_id = None
    tokens = torch.tensor([prompt])
    with torch.no_grad():
        out = model(tokens, output_hidden_states=True)
        states = [x.float().numpy() for x in out.hidden_states]
        generated = model.generate(
            tokens, do_sample=False, max_new_tokens=new, use_cache=True
        )
    return Results(
        _named(states, out.logits.float().numpy()), generated[0, len(prompt) :].tolist()
    )


def _named(states: list[Any], logits: Any) -> dict[str, np.ndarray]:
    names = [
        "embedding",
        *(f"block {i}" for i in range(len(states) - 2)),
        "final norm",
        "logits",
    ]
    arrays = [*states, logits]
    return {
        name: np.asarray(x[0], np.float64)
        for name, x in zip(names, arrays, strict=True)
    }


def errors(got: Results, expected: Results) -> dict[str, float]:
    """rms(got - expected) / rms(expected) of every array."""
    found = {}
    for name, x in expected.arrays.items():
        distance = np.linalg.norm(got.arrays[name] - x)
        found[name] = float(distance / np.linalg.norm(x))
    return found


def _prompt(arguments: argparse.Namespace, vocab_size: int) -> list[int]:
    if arguments.prompt is None:
        rng = np.random.default_rng(0)
        return rng.integers(0, vocab_size, arguments.tokens).tolist()
    import transformers  # type: ignore[import-not-found]

    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(arguments.folder)
    return tokenizer(arguments.prompt)["input_ids"]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.parity", description=__doc__
    )
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--prompt")
    parser.add_argument("--tokens", type=int, default=64, help="of a random prompt")
    parser.add_argument("--new", type=int, default=16, help="tokens to generate")
    parser.add_argument("--dtype", choices=tuple(_TOLERANCE), default="float32")
    parser.add_argument("--tolerance", type=float)
    return parser.parse_args()


def main() -> None:
    """Prints both sides."""
    arguments = _arguments()
    tolerance = arguments.tolerance or _TOLERANCE[arguments.dtype]
    prompt = _prompt(arguments, nn.hf_config(arguments.folder).vocab_size)
    run = (arguments.folder, prompt, arguments.new, arguments.dtype)
    expected = theirs(*run)
    got = ours(*run)
    table = Table(
        title=f"{arguments.folder.name}, {len(prompt)} tokens, {arguments.dtype}"
    )
    table.add_column("array")
    table.add_column("error, rms / rms", justify="right")
    found = errors(got, expected)
    for name, error in found.items():
        table.add_row(name, f"{error:.1e}", style=None if error <= tolerance else "red")
    console = Console()
    console.print(table)
    console.print("greedy tokens, jfla:        ", got.tokens)
    console.print("greedy tokens, Transformers:", expected.tokens)
    # Not <=: a NaN is no parity.
    if got.tokens != expected.tokens or not all(e <= tolerance for e in found.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
