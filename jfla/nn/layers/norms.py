"""RMSNorm, and RMSNorm with an output gate."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jfla.gates import at_least_f32
from jfla.nn.sharding import Axes, partitioned

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
    y = _normalized(x, (-1,), epsilon)
    scale = jnp.expand_dims(at_least_f32(scale), tuple(range(x.ndim - 1)))
    return (y * scale * activation(at_least_f32(gate))).astype(x.dtype)


class RMSNorm(nnx.Module):
    """y = scale * x * rsqrt(mean(x^2) + eps), in float32 or wider; the result in `dtype`.

    **Arguments:** `features`, the last axis (or axes), over which the mean goes; `zero_centered`:
    `scale` is stored as its distance from 1 and multiplies as 1 + scale; `axes`, the logical axes
    of `scale`, replicated by default.

    Reference: Zhang, Sennrich, Root Mean Square Layer Normalization (arXiv:1910.07467).

    >>> import jax.numpy as jnp
    >>> norm = RMSNorm((4,), zero_centered=True, rngs=nnx.Rngs(0))
    >>> print(norm(jnp.array([2.0, -2.0, 2.0, -2.0])).round(3))
    [ 1. -1.  1. -1.]
    """

    def __init__(
        self,
        features: tuple[int, ...],
        epsilon: float = 1e-5,
        *,
        zero_centered: bool = False,
        axes: Axes | None = None,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        start = nnx.initializers.zeros if zero_centered else nnx.initializers.ones
        names = axes or (None,) * len(features)
        self.scale = partitioned(start, names, rngs, features, param_dtype)
        self.epsilon = epsilon
        self.zero_centered = zero_centered
        self.dtype = dtype

    def __call__(
        self, x: Float[Array, "*batch_and_features"]
    ) -> Float[Array, "*batch_features"]:
        scale = at_least_f32(self.scale[...])
        if self.zero_centered:
            scale = 1 + scale
        over = tuple(range(-scale.ndim, 0))
        scale = jnp.expand_dims(scale, tuple(range(x.ndim - scale.ndim)))
        return (_normalized(x, over, self.epsilon) * scale).astype(self.dtype)


def _normalized(
    x: Float[Array, "*shape"], over: tuple[int, ...], epsilon: float
) -> Float[Array, "*shape"]:
    """x over its root mean square, in float32 or wider."""
    x = at_least_f32(x)
    return x * lax.rsqrt(jnp.mean(x * x, axis=over, keepdims=True) + epsilon)
