"""Causal softmax attention with rotary positions, for the full-attention layers of a hybrid model, and its KV cache."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.core import Tracer
from jaxtyping import Float, Int

from jfla._types import SegmentIds
from jfla.nn._sharding import EMBED, HEADS, refuse_explicit
from jfla.nn.layers import Projection

Heads = Float[Array, "B T N D"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AttentionCache:
    """Keys and values of the tokens so far, rotated, in a buffer of fixed length L.

    **Fields:** `key`, `value` `[B, L, N, D]`; `sequence` `[B, L]`, which of the row's sequences a token belongs to,
    counted from 1, and 0 where there is none; `length` `[B]`, the tokens in each row.

    >>> import jax, jfla.nn
    >>> from flax import nnx
    >>> layer = jfla.nn.CausalAttention(32, num_heads=2, rngs=nnx.Rngs(0))
    >>> y, cache = layer(jax.numpy.ones((1, 5, 32)), cache=layer.init_cache(1, max_len=8))
    >>> print(cache.key.shape, cache.length)
    (1, 8, 2, 16) [5]
    """

    key: Float[Array, "B L N D"]
    value: Float[Array, "B L N D"]
    sequence: Int[Array, "B L"]
    length: Int[Array, " B"]


class CausalAttention(nnx.Module):
    """softmax(q k^T / sqrt(D)) v over the tokens of the own sequence up to the own one, with rotary positions.

    **Arguments:** `hidden_size`; `num_heads`, which divides it into heads of even length D; `num_kv_heads`, a divisor
    of `num_heads`, equal to it by default; `rope_theta`, the base of the rotary angles, which turn the two halves of a
    head against each other.

    **Call:** as the delta-rule layers: `layer(x, segment_ids=None, cache=None)`. Memory grows with T^2, and the cache
    of `init_cache(batch, max_len)` holds at most `max_len` tokens per row.

    **Raises:** `ValueError` for sizes that do not fit, and when a call overruns the cache. Under `jit` nobody knows how
    full it is: tokens that find no room are then not kept.

    Reference: Vaswani et al. (arXiv:1706.03762); Su et al., RoFormer (arXiv:2104.09864).

    >>> import jax, jfla.nn
    >>> from flax import nnx
    >>> layer = jfla.nn.CausalAttention(32, num_heads=2, rngs=nnx.Rngs(0))
    >>> print(layer(jax.random.normal(jax.random.key(0), (1, 20, 32))).shape)
    (1, 20, 32)
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        rope_theta: float = 10000.0,
        dtype: Any = jnp.float32,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if hidden_size % (2 * num_heads):
            raise ValueError(f"{hidden_size=} must be {num_heads=} heads of even length")
        if num_heads % kv_heads:
            raise ValueError(f"{num_heads=} must be a multiple of num_kv_heads={kv_heads}")
        head_dim = hidden_size // num_heads
        axes, dtypes = (EMBED, HEADS, None), {"dtype": dtype, "param_dtype": param_dtype}
        self.q_proj = Projection((hidden_size,), (num_heads, head_dim), axes, rngs=rngs, **dtypes)
        self.k_proj = Projection((hidden_size,), (kv_heads, head_dim), axes, rngs=rngs, **dtypes)
        self.v_proj = Projection((hidden_size,), (kv_heads, head_dim), axes, rngs=rngs, **dtypes)
        self.o_proj = Projection((num_heads, head_dim), (hidden_size,), (HEADS, None, EMBED), rngs=rngs, **dtypes)
        self.kv_shape, self.rope_theta, self.dtype = (kv_heads, head_dim), rope_theta, dtype

    def init_cache(self, batch: int, max_len: int) -> AttentionCache:
        """Room for `max_len` tokens in each of `batch` rows."""
        key = jnp.zeros((batch, max_len, *self.kv_shape), self.dtype)
        return AttentionCache(key, key, jnp.zeros((batch, max_len), jnp.int32), jnp.zeros(batch, jnp.int32))

    def __call__(self, x: Float[Array, "B T D"], segment_ids: SegmentIds | None = None, cache: Any = None) -> Any:
        y, new_cache = self.mix(x, segment_ids, cache)
        return y if cache is None else (y, new_cache)

    def mix(
        self, x: Float[Array, "B T D"], segment_ids: SegmentIds | None, cache: AttentionCache | None
    ) -> tuple[Float[Array, "B T D"], AttentionCache | None]:
        """The layer, always as (output, cache or None)."""
        refuse_explicit("x", x)
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        batch, time = x.shape[:2]
        first = jnp.zeros(batch, jnp.int32) if cache is None else cache.length
        position = first[:, None] + jnp.arange(time)
        q, k = (_rotate(a, position, self.rope_theta) for a in (q, k))
        if cache is not None:
            cache, own = _extend(cache, k, v, position, segment_ids)
            k, v, sequence = cache.key.astype(q.dtype), cache.value.astype(q.dtype), cache.sequence
        elif segment_ids is not None:
            own = sequence = segment_ids
        else:
            return self.o_proj(jax.nn.dot_product_attention(q, k, v, is_causal=True)), None
        earlier = jnp.arange(k.shape[1]) <= position[:, :, None]
        mask = (own[:, :, None] == sequence[:, None]) & earlier
        # A row of padding sees nothing; a softmax over nothing is not a number.
        mask = (mask | (own == 0)[:, :, None])[:, None]
        o = jax.nn.dot_product_attention(q, k, v, mask=mask)
        return self.o_proj(o), cache


def _rotate(x: Heads, position: Int[Array, "B T"], theta: float) -> Heads:
    """Turns channel pairs (i, i + D / 2) by position * theta^(-2 i / D), in float32."""
    half = x.shape[-1] // 2
    angle = position[..., None, None] * theta ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def _extend(
    cache: AttentionCache, k: Heads, v: Heads, position: Int[Array, "B T"], segment_ids: SegmentIds | None
) -> tuple[AttentionCache, Int[Array, "B T"]]:
    """The cache with this call's tokens behind its own, and the sequence number of each of them."""
    batch, time = position.shape
    room = cache.key.shape[1]
    if segment_ids is None:
        segment_ids = jnp.ones((batch, time), jnp.int32)
    length = cache.length + jnp.sum(segment_ids > 0, axis=1)
    longest = 0 if isinstance(length, Tracer) else int(length.max())
    if longest > room:
        raise ValueError(f"the cache must have room for {longest} tokens, its max_len is {room}")
    rows = jnp.arange(batch)[:, None]
    new = jnp.cumsum(jnp.diff(segment_ids, axis=1, prepend=segment_ids[:, :1]) != 0, axis=1)
    latest = jnp.take_along_axis(cache.sequence, jnp.maximum(cache.length - 1, 0)[:, None], axis=1)
    own = jnp.where(segment_ids > 0, jnp.maximum(latest, 1) + new, 0)
    # Padding goes nowhere: its target is out of range.
    target = jnp.where(segment_ids > 0, position, room)
    cache = AttentionCache(
        key=cache.key.at[rows, target].set(k.astype(cache.key.dtype), mode="drop"),
        value=cache.value.at[rows, target].set(v.astype(cache.value.dtype), mode="drop"),
        sequence=cache.sequence.at[rows, target].set(own, mode="drop"),
        length=length,
    )
    return cache, own
