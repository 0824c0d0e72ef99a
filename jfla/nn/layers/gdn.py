"""Gated DeltaNet as a Flax NNX layer."""

from typing import Unpack

import jax
import jax.numpy as jnp
from flax import nnx

from jfla import api
from jfla.gates import SoftplusGate, inverse_softplus_step, log_uniform_rate
from jfla.nn.layers.delta_mixer import DeltaMixer, MixerOptions, documented
from jfla.nn.layers.projections import Projection
from jfla.nn.sharding import EMBED, HEADS, partitioned


@documented
class GatedDeltaNet(DeltaMixer):
    """Gated DeltaNet: the delta rule with a decay per head.

        q, k = l2norm(silu(conv(x W_q))), l2norm(silu(conv(x W_k)));   v = silu(conv(x W_v))
        g    = -exp(a_log) softplus(x W_a + dt_bias)                    beta = sigmoid(x W_b)
        y    = (RMSNorm(gdn(q, k, v, g, beta)) * silu(x W_g)) W_o

    a_log starts as log U(1, 16), dt_bias as the inverse softplus of a step drawn log-uniformly from
    [1e-3, 0.1].
    {options}
    Reference: Yang, Kautz, Hatamizadeh, Gated Delta Networks: Improving Mamba2 with Delta Rule
    (arXiv:2412.06464).

    >>> import jax, jfla.nn
    >>> from flax import nnx
    >>> rngs = nnx.Rngs(0)
    >>> layer = jfla.nn.GatedDeltaNet(32, 2, head_dim=16, value_head_dim=32, rngs=rngs)
    >>> x = jax.random.normal(jax.random.key(0), (1, 20, 32))
    >>> print(layer(x).shape)
    (1, 20, 32)
    """

    _activation = staticmethod(jax.nn.silu)

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
        dtypes = self.dtypes
        hidden = (hidden_size,)
        heads = (self.num_value_heads,)
        value = (self.num_value_heads, self.value_head_dim)
        step = inverse_softplus_step
        self.a_proj = Projection(hidden, heads, (EMBED, HEADS), rngs=rngs, **dtypes)
        self.g_proj = Projection(
            hidden, value, (EMBED, HEADS, None), rngs=rngs, **dtypes
        )
        self.a_log = partitioned(log_uniform_rate, (HEADS,), rngs, heads, jnp.float32)
        self.dt_bias = partitioned(step, (HEADS,), rngs, heads, jnp.float32)

    def _op(self, recurrent):
        return api.recurrent_gdn if recurrent else api.chunk_gdn

    def _decay_input(self, x):
        return self.a_proj(x)

    def _output_gate(self, x):
        return self.g_proj(x)

    def _gate(self):
        return SoftplusGate(self.a_log[...], self.dt_bias[...])
