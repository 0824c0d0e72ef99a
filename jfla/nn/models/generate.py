"""Sampling: one pass over the prompt, then a compiled loop of tokens that carries the cache."""

import functools
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int, PRNGKeyArray

from jfla.types import SegmentIds

Tokens = Int[Array, "B T"]
Hidden = Float[Array, "B T D"]
Cache = Any  # a pytree that is the model's own


class LanguageModel(Protocol):
    """What sampling asks of an NNX module."""

    def init_cache(self, batch: int, max_len: int) -> Cache:
        """The cache before the first token."""
        ...

    def hidden(
        self, tokens: Tokens, segment_ids: SegmentIds | None, cache: Cache
    ) -> tuple[Hidden, Cache]:
        """What the head reads, and the cache behind the tokens."""
        ...

    def logits(self, x: Hidden) -> Float[Array, "B T vocab"]:
        """The head."""
        ...


def generate(
    model: LanguageModel,
    vocab_size: int,
    prompt: Tokens,
    length: int,
    key: PRNGKeyArray,
    temperature: float,
    top_k: int | None,
    segment_ids: SegmentIds | None,
) -> Int[Array, "B length"]:
    """Samples `length` tokens behind each prompt; the arguments are those of `DeltaLM.generate`."""
    prompt = jnp.asarray(prompt)
    if prompt.ndim != 2 or prompt.shape[1] == 0:
        shape = list(prompt.shape)
        raise ValueError(f"prompt must be [B, T] with at least one token, got {shape}")
    if length < 1:
        raise ValueError(f"length must be at least 1, got {length}")
    if temperature < 0:
        raise ValueError(f"temperature must be at least 0, got {temperature}")
    if top_k is not None and not 1 <= top_k <= vocab_size:
        raise ValueError(f"top_k must be None or in 1 .. {vocab_size}, got {top_k}")
    graph, state = nnx.split(model)
    greedy = temperature == 0
    return _run(graph, state, prompt, segment_ids, key, temperature, length, top_k, greedy)


@functools.partial(jax.jit, static_argnames=("graph", "length", "top_k", "greedy"))
def _run(
    graph: nnx.GraphDef[LanguageModel],
    state: nnx.GraphState,
    prompt: Tokens,
    segment_ids: SegmentIds | None,
    key: PRNGKeyArray,
    temperature: float,
    length: int,
    top_k: int | None,
    greedy: bool,
) -> Int[Array, "B length"]:
    model = nnx.merge(graph, state)
    batch, time = prompt.shape

    def choose(x: Float[Array, "B 1 D"], key: PRNGKeyArray) -> Int[Array, " B"]:
        logits = model.logits(x)[:, 0]
        if greedy:
            return jnp.argmax(logits, axis=-1)
        return sample(logits / temperature, top_k, key)

    def step(
        carry: tuple[Int[Array, " B"], Cache], key: PRNGKeyArray
    ) -> tuple[tuple[Int[Array, " B"], Cache], Int[Array, " B"]]:
        token, cache = carry
        x, cache = model.hidden(token[:, None], None, cache)
        token = choose(x, key)
        return (token, cache), token

    cache = model.init_cache(batch, time + length)
    x, cache = model.hidden(prompt, segment_ids, cache)
    num_tokens = jnp.full(batch, time)
    if segment_ids is not None:
        num_tokens = jnp.sum(segment_ids > 0, axis=1)
    last = jnp.maximum(num_tokens - 1, 0)
    x = jnp.take_along_axis(x, last[:, None, None], axis=1)
    keys = jax.random.split(key, length)
    first = choose(x, keys[0])
    _, others = lax.scan(step, (first, cache), keys[1:])
    return jnp.concatenate([first[:, None], others.T], axis=1)


def sample(
    logits: Float[Array, "B vocab"], top_k: int | None, key: PRNGKeyArray
) -> Int[Array, " B"]:
    """A token per row, drawn from softmax(logits) or from its `top_k` largest entries."""
    if top_k is None:
        return jax.random.categorical(key, logits)
    values, tokens = lax.top_k(logits, top_k)
    choice = jax.random.categorical(key, values)
    return jnp.take_along_axis(tokens, choice[:, None], axis=1)[:, 0]
