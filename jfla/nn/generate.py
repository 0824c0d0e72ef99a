"""Sampling: the prompt in one pass, then one token at a time in a compiled loop that carries the cache."""

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int, PRNGKeyArray

from jfla._types import SegmentIds

if TYPE_CHECKING:
    from jfla.nn.model import DeltaLM

Tokens = Int[Array, "B T"]


def generate(
    model: "DeltaLM",
    prompt: Tokens,
    length: int,
    key: PRNGKeyArray,
    temperature: float,
    top_k: int | None,
    segment_ids: SegmentIds | None,
) -> Int[Array, "B length"]:
    """See `DeltaLM.generate`."""
    prompt, vocab = jnp.asarray(prompt), model.config.vocab_size
    if prompt.ndim != 2 or prompt.shape[1] == 0:
        raise ValueError(f"prompt must be [B, T] with at least one token, got {list(prompt.shape)}")
    if length < 1:
        raise ValueError(f"length must be at least 1, got {length}")
    if temperature < 0:
        raise ValueError(f"temperature must be at least 0, got {temperature}")
    if top_k is not None and not 1 <= top_k <= vocab:
        raise ValueError(f"top_k must be None or in 1 .. {vocab}, got {top_k}")
    graph, state = nnx.split(model)
    return _run(graph, state, prompt, segment_ids, key, temperature, length, top_k, temperature == 0)


@functools.partial(jax.jit, static_argnums=(0, 6, 7, 8))
def _run(
    graph: Any,
    state: Any,
    prompt: Tokens,
    segment_ids: SegmentIds | None,
    key: PRNGKeyArray,
    temperature: float,
    length: int,
    top_k: int | None,
    greedy: bool,
) -> Int[Array, "B length"]:
    model: DeltaLM = nnx.merge(graph, state)
    batch, time = prompt.shape

    def choose(x: Float[Array, "B 1 D"], key: PRNGKeyArray) -> Int[Array, " B"]:
        logits = model.logits(x)[:, 0]
        return jnp.argmax(logits, axis=-1) if greedy else sample(logits / temperature, top_k, key)

    def step(carry, key):
        token, cache = carry
        x, cache = model.hidden(token[:, None], None, cache)
        token = choose(x, key)
        return (token, cache), token

    x, cache = model.hidden(prompt, segment_ids, model.init_cache(batch, time + length))
    last = jnp.full(batch, time) if segment_ids is None else jnp.sum(segment_ids > 0, axis=1)
    x = jnp.take_along_axis(x, jnp.maximum(last - 1, 0)[:, None, None], axis=1)
    first_key, *_ = keys = jax.random.split(key, length)
    first = choose(x, first_key)
    _, rest = lax.scan(step, (first, cache), keys[1:])
    return jnp.concatenate([first[:, None], rest.T], axis=1)


def sample(logits: Float[Array, "B vocab"], top_k: int | None, key: PRNGKeyArray) -> Int[Array, " B"]:
    """A token per row, drawn from softmax(logits) or from its `top_k` largest entries."""
    if top_k is None:
        return jax.random.categorical(key, logits)
    values, tokens = lax.top_k(logits, top_k)
    choice = jax.random.categorical(key, values)
    return jnp.take_along_axis(tokens, choice[:, None], axis=1)[:, 0]
