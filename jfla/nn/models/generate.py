"""Sampling: one pass over the prompt, then a compiled loop of tokens that carries the cache."""

import dataclasses
import functools
from collections.abc import Collection
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

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


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["temperature", "top_p", "stop_tokens"],
    meta_fields=["top_k", "greedy"],
)
@dataclasses.dataclass(frozen=True)
class Sampling:
    """How tokens are chosen: the arguments of `DeltaLM.generate`."""

    temperature: float | Array
    top_p: float | Array | None
    stop_tokens: Int[Array, " n"] | None
    top_k: int | None
    greedy: bool


def sampling(
    vocab_size: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    stop_tokens: Collection[int],
) -> Sampling:
    """The arguments, checked."""
    if not temperature >= 0:
        raise ValueError(f"temperature must be at least 0, got {temperature}")
    if top_k is not None and not 1 <= top_k <= vocab_size:
        raise ValueError(f"top_k must be None or in 1 .. {vocab_size}, got {top_k}")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p must be None or above 0 and at most 1, got {top_p}")
    outside = [token for token in stop_tokens if not 0 <= token < vocab_size]
    if outside:
        raise ValueError(f"stop_tokens must be in 0 .. {vocab_size - 1}, got {outside}")
    stop = jnp.array(sorted(stop_tokens), jnp.int32) if stop_tokens else None
    return Sampling(temperature, top_p, stop, top_k, greedy=temperature == 0)


def generate(
    model: LanguageModel,
    prompt: Tokens,
    length: int,
    key: PRNGKeyArray,
    how: Sampling,
    segment_ids: SegmentIds | None,
) -> Int[Array, "B length"]:
    """Samples `length` tokens behind each prompt; the arguments are those of `DeltaLM.generate`."""
    prompt = jnp.asarray(prompt)
    if prompt.ndim != 2 or prompt.shape[1] == 0:
        shape = list(prompt.shape)
        raise ValueError(f"prompt must be [B, T] with at least one token, got {shape}")
    if length < 1:
        raise ValueError(f"length must be at least 1, got {length}")
    graph, state = nnx.split(model)
    return _run(graph, state, prompt, segment_ids, key, how, length)


@functools.partial(jax.jit, static_argnames=("graph", "length"))
def _run(
    graph: nnx.GraphDef[LanguageModel],
    state: nnx.GraphState,
    prompt: Tokens,
    segment_ids: SegmentIds | None,
    key: PRNGKeyArray,
    how: Sampling,
    length: int,
) -> Int[Array, "B length"]:
    model = nnx.merge(graph, state)
    batch, time = prompt.shape
    keys = jax.random.split(key, length)

    def unfinished(carry: _Carry) -> Bool[Array, ""]:
        return (carry.count < length) & ~jnp.all(carry.done)

    def step(carry: _Carry) -> _Carry:
        x, cache = model.hidden(carry.token[:, None], None, carry.cache)
        token = _choose(model.logits(x)[:, 0], how, keys[carry.count])
        # A row that has stopped repeats its stop token.
        token = jnp.where(carry.done, carry.token, token)
        return _Carry(
            carry.count + 1,
            token,
            _stops(token, how.stop_tokens),
            carry.tokens.at[:, carry.count].set(token),
            cache,
        )

    cache = model.init_cache(batch, time + length)
    x, cache = model.hidden(prompt, segment_ids, cache)
    num_tokens = jnp.full(batch, time)
    if segment_ids is not None:
        num_tokens = jnp.sum(segment_ids > 0, axis=1)
    last = jnp.maximum(num_tokens - 1, 0)
    x = jnp.take_along_axis(x, last[:, None, None], axis=1)
    first = _choose(model.logits(x)[:, 0], how, keys[0])
    tokens = jnp.broadcast_to(first[:, None], (batch, length))
    start = _Carry(jnp.int32(1), first, _stops(first, how.stop_tokens), tokens, cache)
    end = lax.while_loop(unfinished, step, start)
    # The loop ends before the last token where all rows have stopped.
    reached = jnp.arange(length)[None] < end.count
    return jnp.where(reached, end.tokens, end.token[:, None])


class _Carry(NamedTuple):
    """Of the loop: how many tokens there are, the last ones, which rows have stopped, all tokens."""

    count: Int[Array, ""]
    token: Int[Array, " B"]
    done: Bool[Array, " B"]
    tokens: Int[Array, "B length"]
    cache: Cache


def _stops(token: Int[Array, " B"], stop_tokens: Int[Array, " n"] | None) -> Bool[Array, " B"]:
    if stop_tokens is None:
        return jnp.zeros(token.shape, bool)
    return jnp.any(token[:, None] == stop_tokens[None], axis=1)


def _choose(logits: Float[Array, "B vocab"], how: Sampling, key: PRNGKeyArray) -> Int[Array, " B"]:
    if how.greedy:
        return jnp.argmax(logits, axis=-1)
    return sample(logits / how.temperature, how.top_k, key, how.top_p)


def sample(
    logits: Float[Array, "B vocab"],
    top_k: int | None,
    key: PRNGKeyArray,
    top_p: float | Array | None = None,
) -> Int[Array, " B"]:
    """A token per row, drawn from softmax(logits) or from its `top_k` largest entries.

    Of these, `top_p` keeps the fewest that have so much of the probability together.
    """
    if top_k is None and top_p is None:
        return jax.random.categorical(key, logits)
    values, tokens = lax.top_k(logits, top_k or logits.shape[-1])
    if top_p is not None:
        probability = jax.nn.softmax(values, axis=-1)
        of_larger = jnp.cumsum(probability, axis=-1) - probability
        # Of the largest this is 0, so one is always kept.
        values = jnp.where(of_larger < top_p, values, -jnp.inf)
    choice = jax.random.categorical(key, values)
    return jnp.take_along_axis(tokens, choice[:, None], axis=1)[:, 0]
