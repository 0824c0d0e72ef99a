"""Causal softmax attention with rotary positions and a key-value cache, for hybrid models."""

import dataclasses
from typing import Literal, TypedDict, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from jfla.nn.layers.attention_cache import (
    Positions,
    Sequence,
    lengthened,
    positions,
    sequence_numbers,
    stored,
    visible,
)
from jfla.nn.layers.mixer import Hidden, Mixer
from jfla.nn.layers.norms import RMSNorm
from jfla.nn.layers.projections import DTypes, Projection
from jfla.nn.sharding import (
    BATCH,
    EMBED,
    HEADS,
    TIME,
    constrain,
    refuse_explicit,
    time_axis,
)
from jfla.types import SegmentIds

Heads = Float[Array, "B T N D"]
QKNorm = Literal["head", "projection"]


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


class AttentionOptions(TypedDict, total=False):
    """What `CausalAttention` takes besides its sizes."""

    num_kv_heads: int | None
    head_dim: int | None
    rope_theta: float | None
    rotary_dims: int | None
    qk_norm: QKNorm | None
    norm_eps: float
    zero_centered_norms: bool
    output_gate: bool
    dtype: DTypeLike
    param_dtype: DTypeLike


class CausalAttention(Mixer[AttentionCache]):
    """softmax(q k^T / sqrt(D)) v over the earlier tokens of the same sequence and the token itself.

    **Arguments:**

    - `hidden_size`; `num_heads` of length `head_dim`, by default what divides `hidden_size` into
      them; `num_kv_heads`, a divisor of `num_heads`, equal to it by default.
    - `rope_theta`: the base of the rotary angles, which turn the two halves of a head against each
      other; None for no positions at all. `rotary_dims`: how many of a head's first channels they
      turn, an even number; all by default.
    - `qk_norm`: an RMSNorm (`norm_eps`, `zero_centered_norms`) on queries and keys before they are
      turned, over each head ("head") or over all heads together ("projection").
    - `output_gate`: y is multiplied by sigmoid(x W_g), channel by channel, before W_o.
    - `dtype` of the computation and the cache, `param_dtype` of the parameters.

    **Call:** as the delta-rule layers: `layer(x, segment_ids=None, cache=None)` with x `[B, T, D]`
    gives y `[B, T, D]`, and `(y, cache)` with a cache. Memory grows with T^2, and the cache of
    `init_cache(batch, max_len)` holds at most `max_len` tokens per row. Under a mesh whose rules
    name "time", each device has the queries of its stretch, and the keys and values of all.

    **Raises:** `ValueError` for sizes that do not fit, and when a call overruns the cache. Under
    `jit` the length of the cache is unknown: tokens that find no room are then not kept.

    Reference: Vaswani et al. (arXiv:1706.03762); Su et al., RoFormer (arXiv:2104.09864); Qiu et
    al., Gated Attention for Large Language Models (arXiv:2505.06708).

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
        rngs: nnx.Rngs,
        **options: Unpack[AttentionOptions],
    ):
        dtypes: DTypes = {
            "dtype": options.get("dtype", jnp.float32),
            "param_dtype": options.get("param_dtype", jnp.float32),
        }
        kv_heads = options.get("num_kv_heads") or num_heads
        self.rope_theta = options.get("rope_theta", 10000.0)
        self.dtype = dtypes["dtype"]
        head_dim = options.get("head_dim") or _head_dim(hidden_size, num_heads)
        self.rotary_dims = options.get("rotary_dims") or head_dim
        self._check_sizes(num_heads, kv_heads, head_dim)

        hidden = (hidden_size,)
        query = (num_heads, head_dim)
        key = (kv_heads, head_dim)
        inward = (EMBED, HEADS, None)
        outward = (HEADS, None, EMBED)
        self.q_proj = Projection(hidden, query, inward, rngs=rngs, **dtypes)
        self.k_proj = Projection(hidden, key, inward, rngs=rngs, **dtypes)
        self.v_proj = Projection(hidden, key, inward, rngs=rngs, **dtypes)
        self.o_proj = Projection(query, hidden, outward, rngs=rngs, **dtypes)
        self.g_proj = nnx.data(None)
        if options.get("output_gate", False):
            self.g_proj = Projection(hidden, query, inward, rngs=rngs, **dtypes)
        self.q_norm = _qk_norm(query, options, dtypes, rngs)
        self.k_norm = _qk_norm(key, options, dtypes, rngs)
        self.kv_shape = key

    def _check_sizes(self, num_heads: int, kv_heads: int, head_dim: int) -> None:
        if num_heads % kv_heads:
            raise ValueError(
                f"{num_heads=} must be a multiple of num_kv_heads={kv_heads}"
            )
        if self.rope_theta is None:
            return
        if self.rotary_dims % 2 or not 0 < self.rotary_dims <= head_dim:
            raise ValueError(
                f"rotary_dims must be even and in 2 .. {head_dim}, got {self.rotary_dims}"
            )

    def init_cache(self, batch: int, max_len: int) -> AttentionCache:
        """Room for `max_len` tokens in each of `batch` rows."""
        key = jnp.zeros((batch, max_len, *self.kv_shape), self.dtype)
        sequence = jnp.zeros((batch, max_len), jnp.int32)
        return AttentionCache(key, key, sequence, jnp.zeros(batch, jnp.int32))

    def mix(
        self, x: Hidden, segment_ids: SegmentIds | None, cache: AttentionCache | None
    ) -> tuple[Hidden, AttentionCache | None]:
        refuse_explicit("x", x)
        batch, time = x.shape[:2]
        position = positions(cache, batch, time)
        q = self._placed(self.q_proj(x), self.q_norm, position)
        k = self._placed(self.k_proj(x), self.k_norm, position)
        v = self.v_proj(x)
        if time_axis(time) is not None:
            # First by time, or the compiler would gather what they are projected from.
            q, k, v = (constrain(x, (BATCH, TIME, HEADS, None)) for x in (q, k, v))
            k, v = (constrain(x, (BATCH, None, HEADS, None)) for x in (k, v))
        if cache is not None:
            sequence = sequence_numbers(cache, segment_ids, batch, time)
            cache = _extend(cache, k, v, position, sequence)
            k = cache.key.astype(q.dtype)
            v = cache.value.astype(q.dtype)
            mask = visible(sequence, cache.sequence, position)
            o = jax.nn.dot_product_attention(q, k, v, mask=mask)
        elif segment_ids is not None:
            mask = visible(segment_ids, segment_ids, position)
            o = jax.nn.dot_product_attention(q, k, v, mask=mask)
        else:
            o = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        if self.g_proj is not None:
            o = o * jax.nn.sigmoid(self.g_proj(x))
        return self.o_proj(o), cache

    def _placed(self, x: Heads, norm: RMSNorm | None, position: Positions) -> Heads:
        """Queries or keys, normalized and turned as the layer has it."""
        if norm is not None:
            x = norm(x)
        if self.rope_theta is None:
            return x
        return _rotate(x, position, self.rope_theta, self.rotary_dims)


def _head_dim(hidden_size: int, num_heads: int) -> int:
    if hidden_size % (2 * num_heads):
        raise ValueError(f"{hidden_size=} must be {num_heads=} heads of even length")
    return hidden_size // num_heads


def _qk_norm(
    heads: tuple[int, int], options: AttentionOptions, dtypes: DTypes, rngs: nnx.Rngs
) -> RMSNorm | None:
    kind = options.get("qk_norm")
    if kind not in (None, "head", "projection"):
        raise ValueError(f'qk_norm must be None, "head" or "projection", got {kind!r}')
    if kind is None:
        return nnx.data(None)
    return RMSNorm(
        heads if kind == "projection" else heads[1:],
        options.get("norm_eps", 1e-6),
        zero_centered=options.get("zero_centered_norms", False),
        axes=(HEADS, None) if kind == "projection" else (None,),
        rngs=rngs,
        **dtypes,
    )


def _rotate(x: Heads, position: Positions, theta: float, dims: int) -> Heads:
    """Turns channel pairs (i, i + n / 2) of the first n = dims by position * theta^(-2 i / n)."""
    half = dims // 2
    # In float64: a power rounded in float32 turns far tokens by a wrong angle.
    frequency = (float(theta) ** (-np.arange(half) / half)).astype(np.float32)
    angle = position[..., None, None] * frequency[None, None, None]
    cos = jnp.cos(angle)
    sin = jnp.sin(angle)
    first = x[..., :half]
    second = x[..., half:dims]
    turned = [first * cos - second * sin, second * cos + first * sin]
    rest = x[..., dims:]
    return jnp.concatenate([y.astype(x.dtype) for y in turned] + [rest], axis=-1)


def _extend(
    cache: AttentionCache, k: Heads, v: Heads, position: Positions, sequence: Sequence
) -> AttentionCache:
    """The cache with the call's tokens behind its own."""
    return AttentionCache(
        key=stored(cache.key, k, position, sequence),
        value=stored(cache.value, v, position, sequence),
        sequence=stored(cache.sequence, sequence, position, sequence),
        length=lengthened(cache, sequence),
    )
