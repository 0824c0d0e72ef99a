"""Kimi Delta Attention and Gated DeltaNet as Flax NNX layers: one base, two gates."""

import dataclasses
import inspect
import math
from typing import Any, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jfla import api
from jfla._types import DeltaRuleOutput, Implementation, SegmentIds
from jfla.gates import Gate, SigmoidGate, SoftplusGate, log_decay, write_strength
from jfla.nn._sharding import EMBED, HEADS, delta_rule, partitioned, refuse_explicit
from jfla.nn.convolution import ShortConvolution, Tail
from jfla.nn.layers import GatedRMSNorm, Projection
from jfla.packing import starts

# Up to this many tokens with a cache go through the recurrence one by one; longer calls fill a chunk.
_FEW_TOKENS = 8
# exp(-1000) is exactly 0 in float32 and float64: a decay that empties the state, within the gates that every
# implementation promises to take.
_RESET = -1000.0

Hidden = Float[Array, "B T D"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DeltaCache:
    """Everything that a delta-rule layer remembers of the tokens behind it; its size does not depend on their number.

    **Fields:** `state` `[B, HV, K, V]` float32; `tails`, the last W - 1 inputs of the q, k and v convolutions,
    `[B, W - 1, H, K]` twice and `[B, W - 1, HV, V]`.

    >>> import jax, jfla.nn
    >>> from flax import nnx
    >>> layer = jfla.nn.GatedDeltaNet(32, num_heads=2, head_dim=16, rngs=nnx.Rngs(0))
    >>> y, cache = layer(jax.numpy.ones((1, 5, 32)), cache=layer.init_cache(1))
    >>> print(cache.state.shape, [tail.shape for tail in cache.tails])
    (1, 2, 16, 16) [(1, 3, 2, 16), (1, 3, 2, 16), (1, 3, 2, 16)]
    """

    state: Float[Array, "B HV K V"]
    tails: tuple[Tail, ...]


class MixerOptions(TypedDict, total=False):
    """What both layers take besides their sizes."""

    num_value_heads: int | None
    value_head_dim: int | None
    conv_size: int
    norm_eps: float
    allow_neg_eigval: bool
    dtype: Any
    param_dtype: Any
    implementation: Implementation | None


_OPTIONS = """
    **Arguments:**

    - `hidden_size`: D, the last axis of input and output.
    - `num_heads`, `head_dim`: H and K, query and key heads and their length.
    - `num_value_heads`: HV, a multiple of H; H by default. `value_head_dim`: V; K by default.
    - `conv_size`: W, the kernel length of the three causal depthwise convolutions (4).
    - `norm_eps`: epsilon of the gated RMSNorm on the output.
    - `allow_neg_eigval`: writes with 2 sigmoid instead of sigmoid, so that a transition can have negative eigenvalues.
    - `dtype`: of the computation; `param_dtype`: of the parameters. `a_log` and `dt_bias` stay float32, as does the
      state.
    - `implementation`: None, "pallas" or "xla", handed to the op.

    **Call:** `layer(x, segment_ids=None, cache=None)` with x `[B, T, D]` gives y `[B, T, D]`; with a cache from
    `init_cache` (or from the call before) it gives `(y, cache)`.

    - `segment_ids` `[B, T]`: packed sequences, numbered from 1 and not decreasing along T, 0 on padding at the end.
      Convolutions and state start anew where the id changes; the output on padding is 0.
    - With a cache, a row's first token continues the sequence that the cache holds, whatever its id; where the id
      changes inside the row a new sequence begins, and the cache that comes back holds the row's last sequence, after
      its last real token. So prompts of different lengths are padded at the end with id 0, and the step after goes on
      from each row's own last token. A call leaves the cache that it is given as it was: to drop drafted tokens, call
      again with that cache and id 0 behind the accepted ones.

    **Raises:** `ValueError` for sizes that do not fit.

    Every parameter carries logical axis names ("embed", "heads"); see `flax.nnx.logical_axis_rules`. Under a mesh whose
    rules name "batch" and "heads", each device runs the op on its own rows and heads. Both H and HV must then be
    multiples of that mesh axis.
"""


class _DeltaMixer(nnx.Module):
    """Everything but the gates: projections, convolutions, the op, the gated norm, packing and decoding."""

    op: str

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        *,
        num_value_heads: int | None = None,
        value_head_dim: int | None = None,
        conv_size: int = 4,
        norm_eps: float = 1e-5,
        allow_neg_eigval: bool = False,
        dtype: Any = jnp.float32,
        param_dtype: Any = jnp.float32,
        implementation: Implementation | None = None,
        rngs: nnx.Rngs,
    ):
        value_heads = num_heads if num_value_heads is None else num_value_heads
        value_dim = head_dim if value_head_dim is None else value_head_dim
        sizes = {
            "hidden_size": hidden_size, "num_heads": num_heads, "head_dim": head_dim, "num_value_heads": value_heads,
            "value_head_dim": value_dim, "conv_size": conv_size,
        }  # fmt: skip
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name} must be at least 1, got {size}")
        if value_heads % num_heads:
            raise ValueError(f"num_value_heads={value_heads} must be a multiple of {num_heads=}")
        self.num_heads, self.head_dim, self.num_value_heads, self.value_head_dim = (
            num_heads, head_dim, value_heads, value_dim
        )  # fmt: skip
        self.beta_max = 2.0 if allow_neg_eigval else 1.0
        self.implementation: Implementation | None = implementation
        self.dtype, self.param_dtype, self.hidden_size = dtype, param_dtype, hidden_size

        dtypes = {"dtype": dtype, "param_dtype": param_dtype}
        key, value, per_head = (num_heads, head_dim), (value_heads, value_dim), (EMBED, HEADS, None)
        self.q_proj = Projection((hidden_size,), key, per_head, rngs=rngs, **dtypes)
        self.k_proj = Projection((hidden_size,), key, per_head, rngs=rngs, **dtypes)
        self.v_proj = Projection((hidden_size,), value, per_head, rngs=rngs, **dtypes)
        self.q_conv = ShortConvolution(conv_size, *key, rngs=rngs, **dtypes)
        self.k_conv = ShortConvolution(conv_size, *key, rngs=rngs, **dtypes)
        self.v_conv = ShortConvolution(conv_size, *value, rngs=rngs, **dtypes)
        self.b_proj = Projection((hidden_size,), (value_heads,), (EMBED, HEADS), rngs=rngs, **dtypes)
        activation = jax.nn.sigmoid if self.op == "kda" else jax.nn.silu
        self.o_norm = GatedRMSNorm(value_dim, activation, epsilon=norm_eps, param_dtype=param_dtype, rngs=rngs)
        self.o_proj = Projection(value, (hidden_size,), (HEADS, None, EMBED), rngs=rngs, **dtypes)

    def _decay_input(self, x: Hidden) -> Float[Array, "B T HV *K"]:
        """What goes into the gate."""
        raise NotImplementedError

    def _output_gate(self, x: Hidden) -> Float[Array, "B T HV V"]:
        raise NotImplementedError

    def _gate(self) -> Gate:
        raise NotImplementedError

    def init_cache(self, batch: int) -> DeltaCache:
        """The cache before the first token of `batch` sequences."""
        state = jnp.zeros((batch, self.num_value_heads, self.head_dim, self.value_head_dim), jnp.float32)
        tails = (conv.init_tail(batch) for conv in (self.q_conv, self.k_conv, self.v_conv))
        return DeltaCache(state, tuple(tails))

    @overload
    def __call__(self, x: Hidden, segment_ids: SegmentIds | None = None, cache: None = None) -> Hidden: ...
    @overload
    def __call__(
        self, x: Hidden, segment_ids: SegmentIds | None = None, *, cache: DeltaCache
    ) -> tuple[Hidden, DeltaCache]: ...
    def __call__(self, x, segment_ids=None, cache=None):
        y, new_cache = self.mix(x, segment_ids, cache)
        return y if cache is None else (y, new_cache)

    def mix(
        self, x: Hidden, segment_ids: SegmentIds | None, cache: DeltaCache | None
    ) -> tuple[Hidden, DeltaCache | None]:
        """The layer, always as (output, cache or None)."""
        refuse_explicit("x", x)
        projections = (self.q_proj, self.q_conv), (self.k_proj, self.k_conv), (self.v_proj, self.v_conv)
        tails = (None, None, None) if cache is None else cache.tails
        convolved = [conv(proj(x), segment_ids, tail) for (proj, conv), tail in zip(projections, tails)]
        (q, k, v), tails = zip(*convolved)
        arrays = q, k, v, self._decay_input(x), self.b_proj(x)
        o, state = self._delta_rule(arrays, segment_ids, None if cache is None else cache.state)
        y = self.o_proj(self.o_norm(o, self._output_gate(x)))
        return y, None if state is None else DeltaCache(state, tails)

    def _delta_rule(
        self, arrays: tuple[Array, ...], segment_ids: SegmentIds | None, state: Float[Array, "B HV K V"] | None
    ) -> DeltaRuleOutput:
        few = state is not None and arrays[0].shape[1] <= _FEW_TOKENS
        op = getattr(api, f"{'recurrent' if few else 'chunk'}_{self.op}")
        gate, beta_max, real = self._gate(), self.beta_max, None
        if state is not None and segment_ids is not None:
            # The op keeps a state per segment; here one goes in at the front and one comes out at the back, so the
            # segments' borders become decays that empty the state.
            *qkv, g, beta = arrays
            real = segment_ids > 0
            decay = log_decay(g.reshape(*beta.shape, -1), gate).reshape(g.shape)
            g, beta = _with_borders(decay, write_strength(beta, beta_max), segment_ids)
            arrays, gate, beta_max, segment_ids = (*qkv, g, beta), None, None, None
        out = delta_rule(
            op, arrays, gate, state, segment_ids, beta_max=beta_max, qk_norm=True,
            return_final_state=state is not None, implementation=self.implementation,
        )  # fmt: skip
        return out if real is None else out._replace(output=jnp.where(real[:, :, None, None], out.output, 0))


def _with_borders(
    g: Float[Array, "B T HV *K"], beta: Float[Array, "B T HV"], segment_ids: SegmentIds
) -> tuple[Float[Array, "B T HV *K"], Float[Array, "B T HV"]]:
    """Decays and write strengths under which every new segment meets an empty state and padding moves nothing."""

    def per_token(mask, x):
        return mask.reshape(mask.shape + (1,) * (x.ndim - 2))

    g = jnp.where(per_token(starts(segment_ids), g), _RESET, g)
    g, beta = (jnp.where(per_token(segment_ids > 0, x), x, 0) for x in (g, beta))
    return g, beta


class KimiDeltaAttention(_DeltaMixer):
    """Kimi Delta Attention: the delta rule with a decay per key channel.

        q, k = l2norm(silu(conv(x W_q))), l2norm(silu(conv(x W_k)));   v = silu(conv(x W_v))
        g    = -exp(a_log) softplus(x W_fa W_fb + dt_bias)              beta = sigmoid(x W_b)
        y    = (RMSNorm(kda(q, k, v, g, beta)) * sigmoid(x W_ga W_gb)) W_o

    With `lower_bound` the gate is `lower_bound * sigmoid(exp(a_log) * (x W_fa W_fb + dt_bias))`. Both low-rank pairs
    pass through V channels. a_log starts as log U(1, 16) (0 with `lower_bound`), dt_bias as the inverse softplus of a
    step drawn log-uniformly from [1e-3, 0.1].
    {options}
    Of its own: `lower_bound`, a number below 0 or None; `output_gate_bias`, whether W_gb has a bias (it does in Flash
    Linear Attention, it does not in Kimi-Linear).

    Reference: Kimi Linear: An Expressive, Efficient Attention Architecture (arXiv:2510.26692).

    >>> import jax, jfla.nn
    >>> from flax import nnx
    >>> layer = jfla.nn.KimiDeltaAttention(32, num_heads=2, head_dim=16, num_value_heads=4, rngs=nnx.Rngs(0))
    >>> x = jax.random.normal(jax.random.key(0), (1, 20, 32))
    >>> y, cache = layer(x, cache=layer.init_cache(1))
    >>> print(y.shape, cache.state.shape)
    (1, 20, 32) (1, 4, 16, 16)
    """

    op = "kda"

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        *,
        lower_bound: float | None = None,
        output_gate_bias: bool = False,
        rngs: nnx.Rngs,
        **options: Unpack[MixerOptions],
    ):
        super().__init__(hidden_size, num_heads, head_dim, rngs=rngs, **options)
        if lower_bound is not None and not lower_bound < 0:
            raise ValueError(f"lower_bound must be None or a number below 0, got {lower_bound}")
        self.lower_bound = lower_bound
        heads, rank = self.num_value_heads, self.value_head_dim
        dtypes = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        down, up = ((hidden_size,), (rank,), (EMBED, None)), (None, HEADS, None)
        self.f_a_proj = Projection(*down, rngs=rngs, **dtypes)
        self.f_b_proj = Projection((rank,), (heads, head_dim), up, rngs=rngs, **dtypes)
        self.g_a_proj = Projection(*down, rngs=rngs, **dtypes)
        self.g_b_proj = Projection((rank,), (heads, rank), up, use_bias=output_gate_bias, rngs=rngs, **dtypes)
        rate = _log_uniform_rate if lower_bound is None else nnx.initializers.zeros
        self.a_log = partitioned(rate, (HEADS,), rngs, (heads,), jnp.float32)
        self.dt_bias = partitioned(_inverse_softplus_step, (HEADS, None), rngs, (heads, head_dim), jnp.float32)

    def _decay_input(self, x):
        return self.f_b_proj(self.f_a_proj(x))

    def _output_gate(self, x):
        return self.g_b_proj(self.g_a_proj(x))

    def _gate(self):
        parameters = self.a_log[...], self.dt_bias[...]
        return SoftplusGate(*parameters) if self.lower_bound is None else SigmoidGate(*parameters, self.lower_bound)


class GatedDeltaNet(_DeltaMixer):
    """Gated DeltaNet: the delta rule with a decay per head.

        q, k = l2norm(silu(conv(x W_q))), l2norm(silu(conv(x W_k)));   v = silu(conv(x W_v))
        g    = -exp(a_log) softplus(x W_a + dt_bias)                    beta = sigmoid(x W_b)
        y    = (RMSNorm(gdn(q, k, v, g, beta)) * silu(x W_g)) W_o

    a_log starts as log U(1, 16), dt_bias as the inverse softplus of a step drawn log-uniformly from [1e-3, 0.1].
    {options}
    Reference: Yang, Kautz, Hatamizadeh, Gated Delta Networks: Improving Mamba2 with Delta Rule (arXiv:2412.06464).

    >>> import jax, jfla.nn
    >>> from flax import nnx
    >>> layer = jfla.nn.GatedDeltaNet(32, num_heads=2, head_dim=16, value_head_dim=32, rngs=nnx.Rngs(0))
    >>> x = jax.random.normal(jax.random.key(0), (1, 20, 32))
    >>> print(layer(x).shape)
    (1, 20, 32)
    """

    op = "gdn"

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        *,
        rngs: nnx.Rngs,
        **options: Unpack[MixerOptions],
    ):
        super().__init__(hidden_size, num_heads, head_dim, rngs=rngs, **options)
        heads, value = self.num_value_heads, (self.num_value_heads, self.value_head_dim)
        dtypes = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        self.a_proj = Projection((hidden_size,), (heads,), (EMBED, HEADS), rngs=rngs, **dtypes)
        self.g_proj = Projection((hidden_size,), value, (EMBED, HEADS, None), rngs=rngs, **dtypes)
        self.a_log = partitioned(_log_uniform_rate, (HEADS,), rngs, (heads,), jnp.float32)
        self.dt_bias = partitioned(_inverse_softplus_step, (HEADS,), rngs, (heads,), jnp.float32)

    def _decay_input(self, x):
        return self.a_proj(x)

    def _output_gate(self, x):
        return self.g_proj(x)

    def _gate(self):
        return SoftplusGate(self.a_log[...], self.dt_bias[...])


for _layer in (KimiDeltaAttention, GatedDeltaNet):
    _layer.__doc__ = inspect.cleandoc(_layer.__doc__ or "").replace("{options}", f"\n{inspect.cleandoc(_OPTIONS)}\n")


def _log_uniform_rate(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    return jnp.log(jax.random.uniform(key, shape, dtype, 1.0, 16.0))


def _inverse_softplus_step(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    step = jnp.exp(jax.random.uniform(key, shape, dtype, math.log(1e-3), math.log(0.1)))
    return step + jnp.log(-jnp.expm1(-step))
