"""RMSNorm, and RMSNorm with an output gate."""

import functools
from collections.abc import Callable
from typing import Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jfla.gates import at_least_f32
from jfla.nn.layers.projections import DTypes
from jfla.nn.sharding import annotated, partitioned

Activation = Callable[[Array], Array]


class GatedRMSNorm(nnx.Module):
    """y = scale * x * rsqrt(mean(x^2) + eps) * activation(gate), in float32 or wider.

    **Arguments:** `features`, the length of the last axis, over which the mean goes; `activation`,
    `jax.nn.sigmoid` (KDA) or `jax.nn.silu` (GDN).

    >>> import jax.numpy as jnp
    >>> norm = GatedRMSNorm(4, jax.nn.sigmoid, rngs=nnx.Rngs(0))
    >>> print(norm(jnp.ones(4), jnp.zeros(4)).round(3))
    [0.5 0.5 0.5 0.5]
    """

    def __init__(
        self,
        features: int,
        activation: Activation,
        *,
        epsilon: float = 1e-5,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        ones = nnx.initializers.ones
        self.scale = partitioned(ones, (None,), rngs, (features,), param_dtype)
        self.activation = activation
        self.epsilon = epsilon

    def __call__(
        self, x: Float[Array, "*batch V"], gate: Float[Array, "*batch V"]
    ) -> Float[Array, "*batch V"]:
        return _gated_rms_norm(x, gate, self.scale[...], self.activation, self.epsilon)


# Keeps x and the gate in their own dtype for the backward.
@functools.partial(jax.checkpoint, static_argnums=(3, 4))
def _gated_rms_norm(
    x: Float[Array, "*batch V"],
    gate: Float[Array, "*batch V"],
    scale: Float[Array, " V"],
    activation: Activation,
    epsilon: float,
) -> Float[Array, "*batch V"]:
    y = at_least_f32(x)
    y = y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + epsilon)
    scale = jnp.expand_dims(at_least_f32(scale), tuple(range(x.ndim - 1)))
    return (y * scale * activation(at_least_f32(gate))).astype(x.dtype)


def rms_norm(
    features: int, epsilon: float, *, rngs: nnx.Rngs, **dtypes: Unpack[DTypes]
) -> nnx.RMSNorm:
    """Flax's RMSNorm with its scale annotated (replicated)."""
    scale_init = annotated(nnx.initializers.ones, (None,))
    return nnx.RMSNorm(features, epsilon=epsilon, scale_init=scale_init, rngs=rngs, **dtypes)
