"""Short causal depthwise convolution for packed sequences, with a tail to continue from."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from jfla.gates import at_least_f32
from jfla.nn.sharding import HEADS, partitioned, with_tokens_before
from jfla.types import SegmentIds

Tail = Float[Array, "B W_minus_1 H K"]


class ShortConvolution(nnx.Module):
    """y_t = silu(sum_i kernel[W - 1 - i] * x_(t - i)), i < W, per channel.

    Tokens of other segments count as 0. `kernel` is `[W, H, K]`; its last row is the weight of the
    current token.
    """

    def __init__(
        self,
        size: int,
        heads: int,
        dim: int,
        *,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        initializer = nnx.initializers.lecun_normal(in_axis=0, out_axis=(1, 2))
        axes = (None, HEADS, None)
        self.kernel = partitioned(
            initializer, axes, rngs, (size, heads, dim), param_dtype
        )
        self.dtype = dtype

    def init_tail(self, batch: int) -> Tail:
        """What comes before the first token: zeros."""
        size, heads, dim = self.kernel.shape
        return jnp.zeros((batch, size - 1, heads, dim), self.dtype)

    def __call__(
        self,
        x: Float[Array, "B T H K"],
        segment_ids: SegmentIds | None = None,
        tail: Tail | None = None,
    ) -> tuple[Float[Array, "B T H K"], Tail]:
        """The activated convolution, and the last W - 1 inputs of each row's last sequence."""
        before = self.init_tail(x.shape[0]) if tail is None else tail
        y = with_tokens_before(_convolve, x, self.kernel[...], segment_ids, before)
        return y, _new_tail(x, segment_ids, before)


@jax.checkpoint  # the sums are float32 and cheap: the backward computes them again from x
def _convolve(
    x: Float[Array, "B T_past H K"],
    kernel: Float[Array, "W H K"],
    ids: Int[Array, "B T_past"] | None,
) -> Float[Array, "B T H K"]:
    past = kernel.shape[0] - 1
    time = x.shape[1] - past
    y = 0
    for tap in range(past + 1):
        shifted = x[:, tap : tap + time]
        if ids is not None:
            same_segment = ids[:, tap : tap + time] == ids[:, past:]
            shifted = _zero_unless(same_segment, shifted)
        weight = kernel[tap][None, None]
        y = y + at_least_f32(weight) * at_least_f32(shifted)
    return jax.nn.silu(y).astype(x.dtype)


def _zero_unless(
    keep: Bool[Array, "B T"], x: Float[Array, "B T H K"]
) -> Float[Array, "B T H K"]:
    return jnp.where(keep[:, :, None, None], x, 0)


def _new_tail(x: Float[Array, "B T H K"], ids: SegmentIds | None, before: Tail) -> Tail:
    past = before.shape[1]
    x = jnp.concatenate([before.astype(x.dtype), x], axis=1)
    if ids is None:
        return x[:, x.shape[1] - past :]
    ids = jnp.pad(ids, ((0, 0), (past, 0)), mode="edge")
    # Padding stands at the end, so the tokens of a row are a prefix of it. The tail ends with the
    # last of them and begins among the inputs of earlier calls where there are too few.
    num_tokens = jnp.sum(ids[:, past:] != 0, axis=1)[:, None]
    rows = num_tokens + jnp.arange(past)[None]
    last_id = jnp.take_along_axis(ids, num_tokens + past - 1, axis=1)
    tail = jnp.take_along_axis(x, rows[:, :, None, None], axis=1)
    tail_ids = jnp.take_along_axis(ids, rows, axis=1)
    return _zero_unless(tail_ids == last_id, tail)
