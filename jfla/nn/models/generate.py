"""Sampling: one pass over the prompt, then tokens one by one, in a compiled loop or as a stream."""

import dataclasses
import functools
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from jfla.nn.layers.mixer import Hidden
from jfla.types import SegmentIds

Tokens = Int[Array, "B T"]
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
    prompt = _checked(prompt, length)
    graph, state = nnx.split(model)
    return _run(graph, state, prompt, segment_ids, key, how, length)


def stream(
    model: LanguageModel,
    prompt: Tokens,
    length: int,
    key: PRNGKeyArray,
    how: Sampling,
    segment_ids: SegmentIds | None,
) -> Iterator[Int[Array, " B"]]:
    """The tokens of `generate` one by one; the arguments are those of `DeltaLM.stream`."""
    return _stream(model, _checked(prompt, length), length, key, how, segment_ids)


def _checked(prompt: Tokens, length: int) -> Tokens:
    prompt = jnp.asarray(prompt)
    if prompt.ndim != 2 or prompt.shape[1] == 0:
        shape = list(prompt.shape)
        raise ValueError(f"prompt must be [B, T] with at least one token, got {shape}")
    if length < 1:
        raise ValueError(f"length must be at least 1, got {length}")
    return prompt


class _Last(NamedTuple):
    """Each row's last token, whether it has stopped there, and the cache of what comes before."""

    token: Int[Array, " B"]
    done: Bool[Array, " B"]
    cache: Cache


class _Carry(NamedTuple):
    """Of the loop: how many tokens there are, all of them, and the last."""

    count: Int[Array, ""]
    tokens: Int[Array, "B length"]
    last: _Last


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
    keys = jax.random.split(key, length)

    def unfinished(carry: _Carry) -> Bool[Array, ""]:
        return (carry.count < length) & ~jnp.all(carry.last.done)

    def step(carry: _Carry) -> _Carry:
        last = _behind(model, carry.last, keys[carry.count], how)
        tokens = carry.tokens.at[:, carry.count].set(last.token)
        return _Carry(carry.count + 1, tokens, last)

    first = _behind_prompt(model, prompt, segment_ids, keys[0], how, length)
    tokens = jnp.broadcast_to(first.token[:, None], (prompt.shape[0], length))
    end = lax.while_loop(unfinished, step, _Carry(jnp.int32(1), tokens, first))
    # The loop ends before the last token where all rows have stopped.
    reached = jnp.arange(length)[None] < end.count
    return jnp.where(reached, end.tokens, end.last.token[:, None])


def _stream(
    model: LanguageModel,
    prompt: Tokens,
    length: int,
    key: PRNGKeyArray,
    how: Sampling,
    segment_ids: SegmentIds | None,
) -> Iterator[Int[Array, " B"]]:
    graph, state = nnx.split(model)
    keys = jax.random.split(key, length)
    last = _prefill(graph, state, prompt, segment_ids, keys[0], how, length)
    for count in range(1, length):
        token = last.token
        done = last.done
        # Begun before anybody waits for the token: the device works while the caller reads it.
        last = _decode(graph, state, token, done, last.cache, keys[count], how)
        yield token
        if bool(jnp.all(done)):
            return
    yield last.token


@functools.partial(jax.jit, static_argnames=("graph", "length"))
def _prefill(
    graph: nnx.GraphDef[LanguageModel],
    state: nnx.GraphState,
    prompt: Tokens,
    segment_ids: SegmentIds | None,
    key: PRNGKeyArray,
    how: Sampling,
    length: int,
) -> _Last:
    return _behind_prompt(
        nnx.merge(graph, state), prompt, segment_ids, key, how, length
    )


@functools.partial(jax.jit, static_argnames="graph", donate_argnames="cache")
def _decode(
    graph: nnx.GraphDef[LanguageModel],
    state: nnx.GraphState,
    token: Int[Array, " B"],
    done: Bool[Array, " B"],
    cache: Cache,
    key: PRNGKeyArray,
    how: Sampling,
) -> _Last:
    return _behind(nnx.merge(graph, state), _Last(token, done, cache), key, how)


def _behind_prompt(
    model: LanguageModel,
    prompt: Tokens,
    segment_ids: SegmentIds | None,
    key: PRNGKeyArray,
    how: Sampling,
    length: int,
) -> _Last:
    """The first token, with room for `length` in the cache."""
    batch, time = prompt.shape
    cache = model.init_cache(batch, time + length)
    x, cache = model.hidden(prompt, segment_ids, cache)
    num_tokens = jnp.full(batch, time)
    if segment_ids is not None:
        num_tokens = jnp.sum(segment_ids > 0, axis=1)
    position = jnp.maximum(num_tokens - 1, 0)
    x = jnp.take_along_axis(x, position[:, None, None], axis=1)
    token = _choose(model.logits(x)[:, 0], how, key)
    return _Last(token, _stops(token, how.stop_tokens), cache)


def _behind(
    model: LanguageModel, last: _Last, key: PRNGKeyArray, how: Sampling
) -> _Last:
    """The next token; a row that has stopped repeats its stop token."""
    x, cache = model.hidden(last.token[:, None], None, last.cache)
    token = _choose(model.logits(x)[:, 0], how, key)
    token = jnp.where(last.done, last.token, token)
    return _Last(token, _stops(token, how.stop_tokens), cache)


def _stops(
    token: Int[Array, " B"], stop_tokens: Int[Array, " n"] | None
) -> Bool[Array, " B"]:
    if stop_tokens is None:
        return jnp.zeros(token.shape, bool)
    return jnp.any(token[:, None] == stop_tokens[None], axis=1)


def _choose(
    logits: Float[Array, "B vocab"], how: Sampling, key: PRNGKeyArray
) -> Int[Array, " B"]:
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
