"""A delta-rule layer on slots of a pool: hidden states and a `DeltaCache` with slots -> output and the cache, in place.

Two shapes of calls: rows that go on from their slots, a few tokens each, and one packed row of prompts that begin anew.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jfla.nn.layers.convolution import ShortConvolution, Tail
from jfla.nn.layers.mixer import Hidden
from jfla.pool import named_slots, read_slots, write_slots
from jfla.types import SegmentIds


def mix_pooled(
    mixer: Any,
    x: Hidden,
    segment_ids: SegmentIds | None,
    cache: Any,
) -> tuple[Hidden, Any]:
    """The output, and the cache with the named slots written.

    With slots `[B]` row b goes on from its slot. With slots `[1, S]` segment s of the one row is a prompt, whatever the
    slot held before.
    """
    packed = cache.slots.ndim == 2
    slots = cache.slots[0] if packed else cache.slots
    slots = named_slots(slots, cache.state.shape[0])
    projected = (mixer.q_proj(x), mixer.k_proj(x), mixer.v_proj(x))
    convolutions = (mixer.q_conv, mixer.k_conv, mixer.v_conv)
    activated = []
    tails = []
    for convolution, inputs, pool in zip(
        convolutions, projected, cache.tails, strict=True
    ):
        if packed:
            assert segment_ids is not None  # they say whose a token is
            y, _ = convolution(inputs, segment_ids)
            tail = segment_tails(convolution, inputs, segment_ids, slots.shape[0])
        else:
            y, tail = convolution(inputs, segment_ids, read_slots(pool, slots))
        activated.append(y)
        tails.append(write_slots(pool, slots, tail))
    options = {
        "gate": mixer._gate(),
        "beta_max": mixer.beta_max,
        "qk_norm": True,
        "segment_ids": segment_ids,
        "return_final_state": True,
        "implementation": mixer.implementation,
    }
    if packed:
        options |= {"num_segments": slots.shape[0], "state_dtype": cache.state.dtype}
    else:
        options |= {"initial_state": cache.state, "state_slots": slots}
    op = mixer._op(not packed)
    o, state = op(*activated, mixer._decay_input(x), mixer.b_proj(x), **options)
    if packed:
        state = write_slots(cache.state, slots, state[0])
    y = mixer.o_proj(mixer.o_norm(o, mixer._output_gate(x)))
    return y, dataclasses.replace(cache, state=state, tails=tuple(tails))


def segment_tails(
    convolution: ShortConvolution,
    x: Float[Array, "1 T H K"],
    segment_ids: Int[Array, "1 T"],
    num_segments: int,
) -> Tail:
    """The last W - 1 inputs of every segment of a packed row, zeros before its first: [S, W - 1, H, K]."""
    past = convolution.kernel.shape[0] - 1
    numbers = jnp.arange(1, num_segments + 1)
    lengths = jnp.sum(segment_ids[0][None] == numbers[:, None], axis=1)
    ends = jnp.cumsum(lengths)
    back = jnp.arange(past) - past
    rows = jnp.maximum(ends[:, None] + back[None], 0)
    inside = back[None] >= -lengths[:, None]
    return jnp.where(inside[:, :, None, None], x[0][rows], 0)
