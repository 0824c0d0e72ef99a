"""The small layers that every block shares: projections with named axes, gated RMSNorm, SwiGLU."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from jfla.gates import wide
from jfla.nn._sharding import EMBED, MLP, Axes, annotated, partitioned


class Projection(nnx.Module):
    """y = x W (+ b): contracts the last axes of x with a kernel that keeps every axis, [*inputs, *outputs]."""

    def __init__(
        self,
        inputs: tuple[int, ...],
        outputs: tuple[int, ...],
        axes: Axes,
        *,
        use_bias: bool = False,
        dtype: Any = jnp.float32,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        shape, rank = (*inputs, *outputs), len(inputs)
        initializer = nnx.initializers.lecun_normal(tuple(range(rank)), tuple(range(rank, len(shape))))
        self.kernel = partitioned(initializer, axes, rngs, shape, param_dtype)
        self.bias = nnx.data(None)
        if use_bias:
            self.bias = partitioned(nnx.initializers.zeros, axes[len(inputs) :], rngs, outputs, param_dtype)
        self.inputs, self.outputs, self.dtype = len(inputs), len(outputs), dtype

    def __call__(self, x: Float[Array, "B T *inputs"], result: Any = None) -> Float[Array, "B T *outputs"]:
        """`result` is the dtype of the accumulated result, the layer's own by default."""
        contracted = tuple(range(x.ndim - self.inputs, x.ndim)), tuple(range(self.inputs))
        x, kernel = x.astype(self.dtype), self.kernel[...].astype(self.dtype)
        y = lax.dot_general(x, kernel, (contracted, ((), ())), preferred_element_type=result or self.dtype)
        return y if self.bias is None else y + self.bias[...].astype(y.dtype)


class GatedRMSNorm(nnx.Module):
    """y = scale * x * rsqrt(mean(x^2) + eps) * activation(gate) over the last axis, in float32 or wider.

    **Arguments:** `features`, the length of the last axis; `activation`, `jax.nn.sigmoid` (KDA) or `jax.nn.silu` (GDN).

    >>> import jax.numpy as jnp
    >>> norm = GatedRMSNorm(4, jax.nn.sigmoid, rngs=nnx.Rngs(0))
    >>> print(norm(jnp.ones(4), jnp.zeros(4)).round(3))
    [0.5 0.5 0.5 0.5]
    """

    def __init__(
        self,
        features: int,
        activation: Callable[[Array], Array],
        *,
        epsilon: float = 1e-5,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        self.scale = partitioned(nnx.initializers.ones, (None,), rngs, (features,), param_dtype)
        self.activation, self.epsilon = activation, epsilon

    def __call__(self, x: Float[Array, "*batch V"], gate: Float[Array, "*batch V"]) -> Float[Array, "*batch V"]:
        return _gated_rms_norm(x, gate, self.scale[...], self.activation, self.epsilon)


@functools.partial(jax.checkpoint, static_argnums=(3, 4))  # keeps x and the gate in their own dtype for the backward
def _gated_rms_norm(x: Array, gate: Array, scale: Array, activation: Callable, epsilon: float) -> Array:
    y = wide(x)
    y = y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + epsilon)
    return (y * wide(scale) * activation(wide(gate))).astype(x.dtype)


class SwiGLU(nnx.Module):
    """y = W_down (silu(W_gate x) * W_up x).

    Reference: Shazeer, GLU Variants Improve Transformer (arXiv:2002.05202).
    """

    def __init__(self, hidden_size: int, intermediate_size: int, *, rngs: nnx.Rngs, **dtypes: Any):
        outward = (hidden_size,), (intermediate_size,), (EMBED, MLP)
        self.gate_proj = Projection(*outward, rngs=rngs, **dtypes)
        self.up_proj = Projection(*outward, rngs=rngs, **dtypes)
        self.down_proj = Projection((intermediate_size,), (hidden_size,), (MLP, EMBED), rngs=rngs, **dtypes)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


def rms_norm(features: int, epsilon: float, *, rngs: nnx.Rngs, **dtypes: Any) -> nnx.RMSNorm:
    """Flax's RMSNorm with its scale annotated (replicated)."""
    scale = annotated(nnx.initializers.ones, (None,))
    return nnx.RMSNorm(features, epsilon=epsilon, scale_init=scale, rngs=rngs, **dtypes)
