"""Next-token cross entropy for packed sequences."""

import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int

from jfla.types import SegmentIds


def next_token_loss(
    logits: Float[Array, "B T vocab"],
    tokens: Int[Array, "B T"],
    segment_ids: SegmentIds | None = None,
    mask: Bool[Array, "B T"] | None = None,
) -> Float[Array, ""]:
    """Mean cross entropy, in nats, of predicting token t + 1 from position t.

        loss = mean of -log softmax(logits_t)[tokens_(t+1)]
               over t with a next token in the same sequence

    **Arguments:** `logits` `[B, T, vocab]` and `tokens` `[B, T]` at the same positions;
    `segment_ids` `[B, T]`: no prediction crosses a border, none concerns padding (0); `mask`
    `[B, T]`, False on tokens that are not to be predicted.

    **Returns:** a scalar; 0 when nothing is to be predicted.

    >>> import jax.numpy as jnp
    >>> print(next_token_loss(jnp.zeros((1, 3, 8)), jnp.array([[1, 2, 3]])).round(4))  # log 8
    2.0794
    """
    # The logits stay whole: they may be split over devices by time, where a slice would move them.
    next_token = lambda x: jnp.roll(x, -1, axis=1)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, next_token(tokens))
    keep = jnp.arange(tokens.shape[1])[None] < tokens.shape[1] - 1
    if mask is not None:
        keep = keep & next_token(mask)
    if segment_ids is not None:
        target = next_token(segment_ids)
        keep = keep & (target == segment_ids) & (target != 0)
    keep = jnp.broadcast_to(keep, losses.shape)
    total = jnp.sum(jnp.where(keep, losses, 0))
    return total / jnp.maximum(jnp.sum(keep), 1)
