"""Causal softmax attention with rotary positions and a key-value cache, for hybrid models."""

import dataclasses
from typing import overload

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.core import Tracer
from jax.typing import DTypeLike
from jaxtyping import Bool, Float, Int

from jfla.nn.layers.projections import DTypes, Projection
from jfla.nn.sharding import EMBED, HEADS, refuse_explicit
from jfla.types import SegmentIds

Hidden = Float[Array, "B T D"]
Heads = Float[Array, "B T N D"]
Positions = Int[Array, "B T"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AttentionCache:
    """Keys and values of the tokens so far, rotated, in a buffer of fixed length L.

    **Fields:** `key`, `value` `[B, L, N, D]`; `sequence` `[B, L]`, which of the row's sequences a
    token belongs to, counted from 1, and 0 where there is none; `length` `[B]`, the tokens in each
    row.

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
    """softmax(q k^T / sqrt(D)) v over the earlier tokens of the same sequence and the token itself.

    **Arguments:** `hidden_size`; `num_heads`, which divides it into heads of even length D;
    `num_kv_heads`, a divisor of `num_heads`, equal to it by default; `rope_theta`, the base of the
    rotary angles, which turn the two halves of a head against each other; `dtype` of the
    computation and the cache, `param_dtype` of the parameters.

    **Call:** as the delta-rule layers: `layer(x, segment_ids=None, cache=None)` with x `[B, T, D]`
    gives y `[B, T, D]`, and `(y, cache)` with a cache. Memory grows with T^2, and the cache of
    `init_cache(batch, max_len)` holds at most `max_len` tokens per row.

    **Raises:** `ValueError` for sizes that do not fit, and when a call overruns the cache. Under
    `jit` the length of the cache is unknown: tokens that find no room are then not kept.

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
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if hidden_size % (2 * num_heads):
            raise ValueError(f"{hidden_size=} must be {num_heads=} heads of even length")
        if num_heads % kv_heads:
            raise ValueError(f"{num_heads=} must be a multiple of num_kv_heads={kv_heads}")
        head_dim = hidden_size // num_heads
        hidden = (hidden_size,)
        query = (num_heads, head_dim)
        key = (kv_heads, head_dim)
        inward = (EMBED, HEADS, None)
        outward = (HEADS, None, EMBED)
        dtypes: DTypes = {"dtype": dtype, "param_dtype": param_dtype}
        self.q_proj = Projection(hidden, query, inward, rngs=rngs, **dtypes)
        self.k_proj = Projection(hidden, key, inward, rngs=rngs, **dtypes)
        self.v_proj = Projection(hidden, key, inward, rngs=rngs, **dtypes)
        self.o_proj = Projection(query, hidden, outward, rngs=rngs, **dtypes)
        self.kv_shape = key
        self.rope_theta = rope_theta
        self.dtype = dtype

    def init_cache(self, batch: int, max_len: int) -> AttentionCache:
        """Room for `max_len` tokens in each of `batch` rows."""
        key = jnp.zeros((batch, max_len, *self.kv_shape), self.dtype)
        sequence = jnp.zeros((batch, max_len), jnp.int32)
        return AttentionCache(key, key, sequence, jnp.zeros(batch, jnp.int32))

    @overload
    def __call__(
        self, x: Hidden, segment_ids: SegmentIds | None = None, cache: None = None
    ) -> Hidden: ...
    @overload
    def __call__(
        self, x: Hidden, segment_ids: SegmentIds | None = None, *, cache: AttentionCache
    ) -> tuple[Hidden, AttentionCache]: ...
    def __call__(self, x, segment_ids=None, cache=None):
        y, new_cache = self.mix(x, segment_ids, cache)
        return y if cache is None else (y, new_cache)

    def mix(
        self, x: Hidden, segment_ids: SegmentIds | None, cache: AttentionCache | None
    ) -> tuple[Hidden, AttentionCache | None]:
        """The layer, always as (output, cache or None)."""
        refuse_explicit("x", x)
        batch, time = x.shape[:2]
        first = jnp.zeros(batch, jnp.int32) if cache is None else cache.length
        position = first[:, None] + jnp.arange(time)[None]
        q = _rotate(self.q_proj(x), position, self.rope_theta)
        k = _rotate(self.k_proj(x), position, self.rope_theta)
        v = self.v_proj(x)
        if cache is not None:
            sequence = _sequence_numbers(cache, segment_ids, batch, time)
            cache = _extend(cache, k, v, position, sequence)
            k = cache.key.astype(q.dtype)
            v = cache.value.astype(q.dtype)
            mask = _mask(sequence, cache.sequence, position)
            o = jax.nn.dot_product_attention(q, k, v, mask=mask)
        elif segment_ids is not None:
            mask = _mask(segment_ids, segment_ids, position)
            o = jax.nn.dot_product_attention(q, k, v, mask=mask)
        else:
            o = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(o), cache


def _mask(
    own: Int[Array, "B T"], others: Int[Array, "B S"], position: Positions
) -> Bool[Array, "B 1 T S"]:
    """True where a query sees a key: the same sequence, not later. Padding (0) sees everything."""
    not_later = jnp.arange(others.shape[1])[None, None] <= position[:, :, None]
    same_sequence = own[:, :, None] == others[:, None]
    # A softmax over nothing is not a number.
    padding = (own == 0)[:, :, None]
    return ((same_sequence & not_later) | padding)[:, None]


def _rotate(x: Heads, position: Positions, theta: float) -> Heads:
    """Turns channel pairs (i, i + D / 2) by position * theta^(-2 i / D), in float32."""
    half = x.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half) / half)
    angle = position[..., None, None] * frequency[None, None, None]
    cos = jnp.cos(angle)
    sin = jnp.sin(angle)
    first = x[..., :half]
    second = x[..., half:]
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def _sequence_numbers(
    cache: AttentionCache, segment_ids: SegmentIds | None, batch: int, time: int
) -> Int[Array, "B T"]:
    """The sequence number of each of the call's tokens, counted on from the cache; 0 on padding."""
    if segment_ids is None:
        segment_ids = jnp.ones((batch, time), jnp.int32)
    changed = jnp.diff(segment_ids, axis=1, prepend=segment_ids[:, :1]) != 0
    last_token = jnp.maximum(cache.length - 1, 0)[:, None]
    latest = jnp.take_along_axis(cache.sequence, last_token, axis=1)
    number = jnp.maximum(latest, 1) + jnp.cumsum(changed, axis=1)
    return jnp.where(segment_ids > 0, number, 0)


def _extend(
    cache: AttentionCache, k: Heads, v: Heads, position: Positions, sequence: Int[Array, "B T"]
) -> AttentionCache:
    """The cache with the call's tokens behind its own."""
    capacity = cache.key.shape[1]
    length = cache.length + jnp.sum(sequence > 0, axis=1)
    longest = 0 if isinstance(length, Tracer) else int(length.max())
    if longest > capacity:
        raise ValueError(
            f"the cache must have room for {longest} tokens, its max_len is {capacity}"
        )
    rows = jnp.arange(position.shape[0])[:, None]
    # An index out of range: padding is dropped.
    target = jnp.where(sequence > 0, position, capacity)

    def stored(buffer: Array, new: Array) -> Array:
        return buffer.at[rows, target].set(new.astype(buffer.dtype), mode="drop")

    return AttentionCache(
        key=stored(cache.key, k),
        value=stored(cache.value, v),
        sequence=stored(cache.sequence, sequence),
        length=length,
    )
