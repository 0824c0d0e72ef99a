"""Short causal depthwise convolution that starts anew at every packed segment and can go on where it stopped."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jfla.gates import wide
from jfla.nn._sharding import HEADS, partitioned

Tail = Float[Array, "B W_minus_1 H K"]


class ShortConvolution(nnx.Module):
    """y_t = silu(sum_i kernel[W - 1 - i] * x_(t - i)), i < W, per channel; tokens of other segments count as 0.

    `kernel` is `[W, H, K]`, its last row meets the current token.
    """

    def __init__(self, size: int, heads: int, dim: int, *, dtype: Any = jnp.float32, param_dtype: Any, rngs: nnx.Rngs):
        initializer = nnx.initializers.lecun_normal(in_axis=0, out_axis=(1, 2))
        self.kernel = partitioned(initializer, (None, HEADS, None), rngs, (size, heads, dim), param_dtype)
        self.dtype = dtype

    def init_tail(self, batch: int) -> Tail:
        """What comes before the first token: zeros."""
        size, heads, dim = self.kernel.shape
        return jnp.zeros((batch, size - 1, heads, dim), self.dtype)

    def __call__(
        self, x: Float[Array, "B T H K"], segment_ids: Int[Array, "B T"] | None = None, tail: Tail | None = None
    ) -> tuple[Float[Array, "B T H K"], Tail]:
        """The activated convolution, and the last W - 1 inputs of the sequence that is open after the last token."""
        before = self.init_tail(x.shape[0]) if tail is None else tail
        x = jnp.concatenate([before.astype(x.dtype), x], axis=1)
        past = before.shape[1]
        ids = None if segment_ids is None else jnp.pad(segment_ids, ((0, 0), (past, 0)), mode="edge")

        return _convolve(x, self.kernel[...], ids), _new_tail(x, ids, past)


@jax.checkpoint  # the sums are float32 and cheap: the backward computes them again from x
def _convolve(
    x: Float[Array, "B T_past H K"], kernel: Float[Array, "W H K"], ids: Int[Array, "B T_past"] | None
) -> Float[Array, "B T H K"]:
    past = kernel.shape[0] - 1
    time, y = x.shape[1] - past, 0
    for tap in range(past + 1):
        shifted = x[:, tap : tap + time]
        if ids is not None:
            shifted = _only(ids[:, tap : tap + time] == ids[:, past:], shifted)
        y = y + wide(kernel[tap]) * wide(shifted)
    return jax.nn.silu(y).astype(x.dtype)


def _only(keep: Array, x: Array) -> Array:
    return jnp.where(keep[:, :, None, None], x, 0)


def _new_tail(x: Float[Array, "B T_past H K"], ids: Int[Array, "B T_past"] | None, past: int) -> Tail:
    if ids is None:
        return x[:, x.shape[1] - past :]
    # Padding stands at the end, so a row's real tokens are a prefix; the earlier rows belong to what was before.
    real = jnp.sum(ids[:, past:] != 0, axis=1)
    rows = real[:, None] + jnp.arange(past)
    last = jnp.take_along_axis(ids, real[:, None] + past - 1, axis=1)
    tail = jnp.take_along_axis(x, rows[:, :, None, None], axis=1)
    return _only(jnp.take_along_axis(ids, rows, axis=1) == last, tail)
