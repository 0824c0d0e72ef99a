"""Linear maps with a logical axis name per axis, and the SwiGLU made of them."""

from typing import TypedDict, Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jfla.nn.sharding import EMBED, MLP, Axes, partitioned


class DTypes(TypedDict, total=False):
    """The dtype of the computation and that of the parameters, float32 by default."""

    dtype: DTypeLike
    param_dtype: DTypeLike


class Projection(nnx.Module):
    """y = x W (+ b), over the last axes of x; the kernel keeps every axis: [*inputs, *outputs]."""

    def __init__(
        self,
        inputs: tuple[int, ...],
        outputs: tuple[int, ...],
        axes: Axes,
        *,
        use_bias: bool = False,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        rank = len(inputs)
        shape = (*inputs, *outputs)
        in_axes = tuple(range(rank))
        out_axes = tuple(range(rank, len(shape)))
        initializer = nnx.initializers.lecun_normal(in_axes, out_axes)
        self.kernel = partitioned(initializer, axes, rngs, shape, param_dtype)
        self.bias = nnx.data(None)
        if use_bias:
            zeros = nnx.initializers.zeros
            self.bias = partitioned(zeros, axes[rank:], rngs, outputs, param_dtype)
        self.inputs = rank
        self.outputs = len(outputs)
        self.dtype = dtype

    def __call__(
        self, x: Float[Array, "*batch_and_inputs"], result: DTypeLike | None = None
    ) -> Float[Array, "*batch_and_outputs"]:
        """`result` is the dtype of the accumulated result, the layer's own by default."""
        contracted = (
            tuple(range(x.ndim - self.inputs, x.ndim)),
            tuple(range(self.inputs)),
        )
        y = lax.dot_general(
            x.astype(self.dtype),
            self.kernel[...].astype(self.dtype),
            (contracted, ((), ())),
            preferred_element_type=result or self.dtype,
        )
        if self.bias is None:
            return y
        bias = self.bias[...].astype(y.dtype)
        return y + jnp.expand_dims(bias, tuple(range(y.ndim - bias.ndim)))


class SwiGLU(nnx.Module):
    """y = W_down (silu(W_gate x) * W_up x).

    Reference: Shazeer, GLU Variants Improve Transformer (arXiv:2002.05202).
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        rngs: nnx.Rngs,
        **dtypes: Unpack[DTypes],
    ):
        hidden = (hidden_size,)
        inner = (intermediate_size,)
        self.gate_proj = Projection(hidden, inner, (EMBED, MLP), rngs=rngs, **dtypes)
        self.up_proj = Projection(hidden, inner, (EMBED, MLP), rngs=rngs, **dtypes)
        self.down_proj = Projection(inner, hidden, (MLP, EMBED), rngs=rngs, **dtypes)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        gate = checkpoint_name(self.gate_proj(x), "jfla_mlp")
        up = checkpoint_name(self.up_proj(x), "jfla_mlp")
        return self.down_proj(jax.nn.silu(gate) * up)
