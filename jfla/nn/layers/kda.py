"""Kimi Delta Attention as a Flax NNX layer."""

from typing import Unpack

import jax
import jax.numpy as jnp
from flax import nnx

from jfla import api
from jfla.gates import (
    SigmoidGate,
    SoftplusGate,
    inverse_softplus_step,
    log_uniform_rate,
)
from jfla.nn.layers.delta_mixer import DeltaMixer, MixerOptions, documented
from jfla.nn.layers.projections import Projection
from jfla.nn.sharding import EMBED, HEADS, partitioned


@documented
class KimiDeltaAttention(DeltaMixer):
    """Kimi Delta Attention: the delta rule with a decay per key channel.

        q, k = l2norm(silu(conv(x W_q))), l2norm(silu(conv(x W_k)));   v = silu(conv(x W_v))
        g    = -exp(a_log) softplus(x W_fa W_fb + dt_bias)              beta = sigmoid(x W_b)
        y    = (RMSNorm(kda(q, k, v, g, beta)) * sigmoid(x W_ga W_gb)) W_o

    With `lower_bound` the gate is `lower_bound * sigmoid(exp(a_log) * (x W_fa W_fb + dt_bias))`.
    Both low-rank pairs pass through V channels. a_log starts as log U(1, 16) (0 with
    `lower_bound`), dt_bias as the inverse softplus of a step drawn log-uniformly from [1e-3, 0.1].
    {options}
    Of its own: `lower_bound`, a number below 0 or None; `output_gate_bias`, whether W_gb has a bias
    (it does in Flash Linear Attention, it does not in Kimi-Linear).

    Reference: Kimi Linear: An Expressive, Efficient Attention Architecture (arXiv:2510.26692).

    >>> import jax, jfla.nn
    >>> from flax import nnx
    >>> rngs = nnx.Rngs(0)
    >>> layer = jfla.nn.KimiDeltaAttention(32, 2, head_dim=16, num_value_heads=4, rngs=rngs)
    >>> x = jax.random.normal(jax.random.key(0), (1, 20, 32))
    >>> y, cache = layer(x, cache=layer.init_cache(1))
    >>> print(y.shape, cache.state.shape)
    (1, 20, 32) (1, 4, 16, 16)
    """

    _activation = staticmethod(jax.nn.sigmoid)

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
            raise ValueError(
                f"lower_bound must be None or a number below 0, got {lower_bound}"
            )
        self.lower_bound = lower_bound
        dtypes = self.dtypes
        heads = self.num_value_heads
        hidden = (hidden_size,)
        low_rank = (self.value_head_dim,)
        key = (heads, head_dim)
        value = (heads, self.value_head_dim)
        down = (EMBED, None)
        up = (None, HEADS, None)
        self.f_a_proj = Projection(hidden, low_rank, down, rngs=rngs, **dtypes)
        self.f_b_proj = Projection(low_rank, key, up, rngs=rngs, **dtypes)
        self.g_a_proj = Projection(hidden, low_rank, down, rngs=rngs, **dtypes)
        self.g_b_proj = Projection(
            low_rank, value, up, use_bias=output_gate_bias, rngs=rngs, **dtypes
        )
        rate = log_uniform_rate if lower_bound is None else nnx.initializers.zeros
        step = inverse_softplus_step
        self.a_log = partitioned(rate, (HEADS,), rngs, (heads,), jnp.float32)
        self.dt_bias = partitioned(step, (HEADS, None), rngs, key, jnp.float32)

    def _op(self, recurrent):
        return api.recurrent_kda if recurrent else api.chunk_kda

    def _decay_input(self, x):
        return self.f_b_proj(self.f_a_proj(x))

    def _output_gate(self, x):
        return self.g_b_proj(self.g_a_proj(x))

    def _gate(self):
        a_log = self.a_log[...]
        dt_bias = self.dt_bias[...]
        if self.lower_bound is None:
            return SoftplusGate(a_log, dt_bias)
        return SigmoidGate(a_log, dt_bias, self.lower_bound)
