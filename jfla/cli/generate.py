"""`jfla generate`: a published model's text behind a prompt, shown token by token, and its speed."""

import dataclasses
import pathlib
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from rich.console import Console

from jfla.cli import published
from jfla.cli.cpu import cpu_name
from jfla.cli.tokenizer import Tokenizer, load_tokenizer
from jfla.nn import load_hf
from jfla.nn.layers.delta_mixer import RECURRENT_TOKENS
from jfla.types import Implementation


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The command's options; None leaves a choice to it."""

    model: pathlib.Path
    prompt: str
    max_tokens: int = 256
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    dtype: str | None = None
    implementation: Implementation | None = None
    seed: int = 0


class Speed(NamedTuple):
    """Of a stream.

    **Fields:** `tokens`; `first`, seconds up to the first of them; `rest`, seconds from then on;
    `stopped`, whether a stop token ended it.
    """

    tokens: int
    first: float
    rest: float
    stopped: bool


def run(options: Options, text: Console, notes: Console) -> list[int]:
    """Shows the tokens on `text` as they come, and all else on `notes`; returns them.

    **Raises:** `ValueError`, `FileNotFoundError` and `ImportError` as `load_hf`, and for a prompt,
    a sampling option or a `Refused` implementation that cannot be.
    """
    folder = options.model
    config = published.read_config(folder, implementation=options.implementation)
    plan = published.Plan()
    plan.add_model(folder, config)
    plan.add("device", *device())
    dtype = plan.add_dtype(options.dtype, config)
    config = dataclasses.replace(config, dtype=dtype, param_dtype=dtype)
    tokenizer, name, why = load_tokenizer(folder)
    plan.add("tokenizer", name, why)
    prompt = encode(tokenizer, options.prompt, config.vocab_size)
    sampling = _sampling(options, plan)
    stop, why = published.stop_tokens(folder, config.vocab_size)
    plan.add("stop tokens", ", ".join(map(str, stop)) or "none", why)
    form = "chunk" if len(prompt) > RECURRENT_TOKENS else "recurrent"
    calls = [published.Call(form, 1, len(prompt)), published.Call("recurrent", 1, 1)]
    plan.add_ops(config, calls)
    notes.print(plan.table())
    model = load_hf(folder, config)
    stream = model.stream(
        jnp.array([prompt]),
        options.max_tokens,
        key=jax.random.key(options.seed),
        stop_tokens=stop,
        **sampling,
    )
    tokens, speed = _show(stream, tokenizer, stop, text)
    notes.print(_summary(speed, len(prompt)), highlight=False)
    return tokens


def device() -> tuple[str, str]:
    """The device of a single sequence, and why that one."""
    devices = jax.devices()
    first = devices[0]
    name = cpu_name() if first.platform == "cpu" else first.device_kind
    why = (
        "the only one"
        if len(devices) == 1
        else f"one of {len(devices)}: there is one sequence"
    )
    return name, why


def encode(tokenizer: Tokenizer, text: str, vocab_size: int) -> list[int]:
    """The prompt's token ids, of which there is at least one."""
    tokens = tokenizer.encode(text)
    outside = [token for token in tokens if not 0 <= token < vocab_size]
    if outside or not tokens:
        got = f"got {outside}" if outside else "got none"
        raise ValueError(f"a prompt must be tokens in 0 .. {vocab_size - 1}, {got}")
    return tokens


def _sampling(options: Options, plan: published.Plan) -> dict[str, Any]:
    """Options first, then what the authors recommend, then the defaults of `DeltaLM.stream`."""
    recommended = published.sampling_defaults(options.model)
    chosen: dict[str, Any] = {}
    for name, default in (("temperature", 1.0), ("top_k", None), ("top_p", None)):
        given = getattr(options, name)
        if given is not None:
            value = given
            why = f"--{name.replace('_', '-')}"
        elif name in recommended:
            value = recommended[name]
            why = "generation_config.json"
        else:
            value = default
            why = "the whole distribution"
        chosen[name] = value
        plan.add(name.replace("_", "-"), "all" if value is None else value, why)
    return chosen


def _show(
    stream: Iterator[jax.Array],
    tokenizer: Tokenizer,
    stop: tuple[int, ...],
    text: Console,
) -> tuple[list[int], Speed]:
    """Prints as tokens come. A stop token ends the text and is not part of it."""
    tokens: list[int] = []
    piece = tokenizer.stream()
    start = time.perf_counter()
    first = start
    for array in stream:
        token = int(array[0])
        if not tokens:
            first = time.perf_counter()
        tokens.append(token)
        if token not in stop:
            text.out(piece(token), end="", highlight=False)
            text.file.flush()
    end = time.perf_counter()
    text.out("")
    return tokens, Speed(len(tokens), first - start, end - first, tokens[-1] in stop)


def _summary(speed: Speed, prompt: int) -> str:
    """The first token waits for the compiler, the others for the model alone."""
    end = "a stop token" if speed.stopped else "--max-tokens"
    line = f"{prompt} tokens read and the first written after {speed.first:.1f} s, with compiling"
    if speed.tokens > 1:
        per_second = (speed.tokens - 1) / speed.rest
        line += f"; {per_second:.1f} tokens/s behind it"
    return f"{line}; {speed.tokens} tokens, ended by {end}"
