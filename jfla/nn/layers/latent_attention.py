"""Multi-head latent attention without positions: keys and values out of one small latent."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Bool, Float, Int

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
from jfla.nn.sharding import EMBED, HEADS, refuse_explicit
from jfla.types import SegmentIds

Latent = Float[Array, "B L R_plus_P"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LatentCache:
    """The latents of the tokens so far, in a buffer of fixed length L, for all heads at once.

    **Fields:** `latent` `[B, L, R + P]`, the normalized latent and the part that all keys share;
    `sequence` `[B, L]` and `length` `[B]` as in `AttentionCache`.
    """

    latent: Latent
    sequence: Int[Array, "B L"]
    length: Int[Array, " B"]


class LatentAttention(Mixer[LatentCache]):
    """Softmax attention whose keys and values are linear in a latent c of R channels.

        c, s  = x W_a;   c <- RMSNorm(c)            R and P channels; s is shared by all heads
        k_h   = [c W_kh | s],   v_h = c W_vh,   q_h = x W_qh
        y     = concat_h(softmax(q_h k_h^T / sqrt(N + P)) v_h) W_o

    Nothing is rotated: order comes from the recurrent layers around it. With a cache the queries
    are put through W_kh instead, so that only c and s are kept.

    **Arguments:** `hidden_size`, `num_heads`; `latent_dim` R, `key_dim` N, `shared_dim` P,
    `value_dim` V; `norm_eps` of the norm; `dtype` of the computation and the cache, `param_dtype`
    of the parameters.

    **Call, raises:** as `CausalAttention`.

    Reference: DeepSeek-V2 (arXiv:2405.04434); without positions: Kimi Linear (arXiv:2510.26692).

    >>> import jax, jfla.nn
    >>> from flax import nnx
    >>> sizes = {"latent_dim": 16, "key_dim": 8, "shared_dim": 4, "value_dim": 8}
    >>> layer = jfla.nn.LatentAttention(32, num_heads=2, **sizes, rngs=nnx.Rngs(0))
    >>> y, cache = layer(jax.numpy.ones((1, 5, 32)), cache=layer.init_cache(1, max_len=8))
    >>> print(y.shape, cache.latent.shape)
    (1, 5, 32) (1, 8, 20)
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        latent_dim: int,
        key_dim: int,
        shared_dim: int,
        value_dim: int,
        norm_eps: float = 1e-6,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        hidden = (hidden_size,)
        latent = (latent_dim,)
        key = (num_heads, key_dim)
        value = (num_heads, value_dim)
        query = (num_heads, key_dim + shared_dim)
        by_head = (EMBED, HEADS, None)
        from_latent = (None, HEADS, None)
        dtypes: DTypes = {"dtype": dtype, "param_dtype": param_dtype}
        self.q_proj = Projection(hidden, query, by_head, rngs=rngs, **dtypes)
        self.c_proj = Projection(
            hidden, (latent_dim + shared_dim,), (EMBED, None), rngs=rngs, **dtypes
        )
        self.c_norm = RMSNorm(latent, norm_eps, rngs=rngs, **dtypes)
        self.k_proj = Projection(latent, key, from_latent, rngs=rngs, **dtypes)
        self.v_proj = Projection(latent, value, from_latent, rngs=rngs, **dtypes)
        self.o_proj = Projection(
            value, hidden, (HEADS, None, EMBED), rngs=rngs, **dtypes
        )
        self.latent_dim = latent_dim
        self.key_dim = key_dim
        self.shared_dim = shared_dim
        self.dtype = dtype

    def init_cache(self, batch: int, max_len: int) -> LatentCache:
        """Room for `max_len` tokens in each of `batch` rows."""
        latent = jnp.zeros(
            (batch, max_len, self.latent_dim + self.shared_dim), self.dtype
        )
        sequence = jnp.zeros((batch, max_len), jnp.int32)
        return LatentCache(latent, sequence, jnp.zeros(batch, jnp.int32))

    def mix(
        self, x: Hidden, segment_ids: SegmentIds | None, cache: LatentCache | None
    ) -> tuple[Hidden, LatentCache | None]:
        refuse_explicit("x", x)
        batch, time = x.shape[:2]
        q = self.q_proj(x)
        c, shared = jnp.split(self.c_proj(x), [self.latent_dim], axis=-1)
        latent = jnp.concatenate([self.c_norm(c), shared], axis=-1)
        position = positions(cache, batch, time)
        if cache is not None:
            sequence = sequence_numbers(cache, segment_ids, batch, time)
            cache = _extend(cache, latent, position, sequence)
            mask = visible(sequence, cache.sequence, position)
            return self.o_proj(
                self._over_latents(q, cache.latent.astype(q.dtype), mask)
            ), cache
        ids = jnp.ones((batch, time), jnp.int32) if segment_ids is None else segment_ids
        return self.o_proj(
            self._over_keys(q, latent, visible(ids, ids, position))
        ), None

    def _over_keys(
        self,
        q: Float[Array, "B T H N_plus_P"],
        latent: Latent,
        mask: Bool[Array, "B 1 T L"],
    ) -> Float[Array, "B T H V"]:
        """With every head's keys and values: the fewest operations where queries are many."""
        c, shared = jnp.split(latent, [self.latent_dim], axis=-1)
        k = self.k_proj(c)
        shared = jnp.broadcast_to(shared[:, :, None], (*k.shape[:3], self.shared_dim))
        k = jnp.concatenate([k, shared], axis=-1)
        v = self.v_proj(c)
        # The attention of JAX takes keys and values of one length.
        length = max(k.shape[-1], v.shape[-1])
        o = jax.nn.dot_product_attention(
            _padded(q, length),
            _padded(k, length),
            _padded(v, length),
            mask=mask,
            scale=self._scale,
        )
        return o[..., : v.shape[-1]]

    def _over_latents(
        self,
        q: Float[Array, "B T H N_plus_P"],
        latent: Latent,
        mask: Bool[Array, "B 1 T L"],
    ) -> Float[Array, "B T H V"]:
        """q_h . (c W_kh) = (q_h W_kh^T) . c: all heads read the latents themselves."""
        q, q_shared = jnp.split(q, [self.key_dim], axis=-1)
        up = self.k_proj.kernel[...].astype(q.dtype)
        q = jnp.einsum("bthn,rhn->bthr", q, up)
        q = jnp.concatenate([q, q_shared], axis=-1)
        latent = latent[:, :, None]
        o = jax.nn.dot_product_attention(
            q, latent, latent, mask=mask, scale=self._scale
        )
        value = self.v_proj.kernel[...].astype(q.dtype)
        return jnp.einsum("bthr,rhv->bthv", o[..., : self.latent_dim], value)

    @property
    def _scale(self) -> float:
        return (self.key_dim + self.shared_dim) ** -0.5


def _padded(x: Float[Array, "B T H X"], length: int) -> Float[Array, "B T H Y"]:
    return jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, length - x.shape[-1])))


def _extend(
    cache: LatentCache, latent: Latent, position: Positions, sequence: Sequence
) -> LatentCache:
    """The cache with the call's tokens behind its own."""
    return LatentCache(
        latent=stored(cache.latent, latent, position, sequence),
        sequence=stored(cache.sequence, sequence, position, sequence),
        length=lengthened(cache, sequence),
    )
