"""Packed sequences: segment ids, the fixed chunk grid with resets, and the aligned grid for states per segment."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Int, Integer, Shaped

from jfla.types import CHUNK


def segment_ids_from_cu_seqlens(
    cu_seqlens: Integer[Array, " S_plus_1"],
    total: int,
) -> Int[Array, "1 total"]:
    """Segment ids of sequences packed one behind the other, from FlashAttention's cumulative lengths.

    **Arguments:**

    - `cu_seqlens`: `[S+1]`, starting at 0, not decreasing. A length of 0 is an empty sequence.
    - `total`: the packed length T (static); tokens from `cu_seqlens[-1]` on are padding.

    **Returns:** `[1, total]` int32: 1 .. S, and 0 on padding.

    **Raises:** `ValueError` when `cu_seqlens` is not one-dimensional and integer, does not start at 0, decreases or
    passes `total` (its values are looked at outside of transformations only), or `total` is not an int >= 0.

    >>> import jax.numpy as jnp
    >>> print(segment_ids_from_cu_seqlens(jnp.array([0, 2, 2, 3]), 5))
    [[1 1 3 0 0]]
    """
    cu_seqlens = jnp.asarray(cu_seqlens)
    if (
        cu_seqlens.ndim != 1
        or cu_seqlens.size == 0
        or not jnp.issubdtype(cu_seqlens.dtype, jnp.integer)
    ):
        raise ValueError(
            f"cu_seqlens must be integers [S+1], got {cu_seqlens.dtype}{list(cu_seqlens.shape)}"
        )
    if not isinstance(total, (int, np.integer)) or isinstance(total, bool) or total < 0:
        raise ValueError(f"total must be a static int >= 0, got {total!r}")
    if not isinstance(cu_seqlens, Tracer) and cu_seqlens.is_fully_addressable:
        _check_cu_seqlens(np.asarray(cu_seqlens), total)
    position = jnp.arange(total)
    ids = jnp.searchsorted(cu_seqlens, position, side="right").astype(jnp.int32)
    return jnp.where(position < cu_seqlens[-1], ids, 0)[None]


def _check_cu_seqlens(cu_seqlens: np.ndarray, total: int) -> None:
    if cu_seqlens[0] != 0:
        raise ValueError(f"cu_seqlens must start at 0, got {cu_seqlens[0]}")
    if (cu_seqlens[1:] < cu_seqlens[:-1]).any():
        at = int(np.argmax(cu_seqlens[1:] < cu_seqlens[:-1]))
        raise ValueError(
            f"cu_seqlens must not decrease, got {cu_seqlens[at]} before {cu_seqlens[at + 1]}"
        )
    if cu_seqlens[-1] > total:
        raise ValueError(
            f"cu_seqlens must end at {total=} at most, got {cu_seqlens[-1]}"
        )


def starts(segment_ids: Int[Array, "B T"]) -> Bool[Array, "B T"]:
    """True on the first token of every segment but the one that opens the row; padding starts nothing."""
    changed = (segment_ids[:, 1:] != segment_ids[:, :-1]) & (segment_ids[:, 1:] != 0)
    return jnp.pad(changed, ((0, 0), (1, 0)))


class Aligned(NamedTuple):
    """A grid in which every segment starts on a chunk boundary: the place of each token, the segment of each chunk."""

    # packed position that an aligned row reads; T (out of range) where it is padding
    source: Int[Array, "B T_aligned"]
    # aligned row of each packed token; T_aligned (out of range) where it is padding
    target: Int[Array, "B T"]
    # 0-based segment of each chunk; unused chunks point at the last segment
    segment: Int[Array, "B N"]


def num_aligned_chunks(time: int, num_segments: int, chunk: int = CHUNK) -> int:
    """Chunks that suffice for segments of T tokens in all, however long each of them is."""
    return -(-time // chunk) + num_segments


def segment_bounds(
    segment_ids: Int[Array, "B T"], num_segments: int
) -> Int[Array, "B S_plus_1"]:
    """Tokens of the segments 1 .. s, for s = 0 .. S: where each segment begins and ends."""
    segments = jnp.arange(num_segments + 1)[None, None]
    ids = segment_ids[:, :, None]
    return jnp.sum((ids > 0) & (ids <= segments), axis=1)


def align(
    segment_ids: Int[Array, "B T"], num_segments: int, chunk: int = CHUNK
) -> Aligned:
    """Lays packed segments on chunk boundaries, in a grid of `num_aligned_chunks` chunks."""
    time = segment_ids.shape[1]
    n_chunks = num_aligned_chunks(time, num_segments, chunk)
    bounds = segment_bounds(segment_ids, num_segments)
    first_token = bounds[:, :-1]
    end_token = bounds[:, 1:]
    length = -((first_token - end_token) // chunk)
    last_chunk = jnp.cumsum(length, axis=1)
    # Aligned row minus packed position, per segment.
    shift = (last_chunk - length) * chunk - first_token
    own_shift = jnp.take_along_axis(shift, jnp.maximum(segment_ids - 1, 0), axis=1)
    valid = (segment_ids > 0) & (segment_ids <= num_segments)
    target = jnp.where(valid, jnp.arange(time)[None] + own_shift, n_chunks * chunk)

    segment = jnp.sum(
        jnp.arange(n_chunks)[None, :, None] >= last_chunk[:, None], axis=-1
    )
    segment = jnp.minimum(segment, num_segments - 1)
    row_segment = jnp.repeat(segment, chunk, axis=1)
    source = jnp.arange(n_chunks * chunk)[None] - jnp.take_along_axis(
        shift, row_segment, axis=1
    )
    end = jnp.take_along_axis(end_token, row_segment, axis=1)
    return Aligned(jnp.where(source < end, source, time), target, segment)


def take_rows(
    x: Shaped[Array, "B T *rest"],
    index: Int[Array, "B T_new"],
) -> Shaped[Array, "B T_new *rest"]:
    """x[b, index[b, t]], and 0 where the index is out of range."""
    return jnp.take_along_axis(
        x,
        index.reshape(index.shape + (1,) * (x.ndim - 2)),
        axis=1,
        mode="fill",
        fill_value=0,
    )


# A row of the batch reads and writes its own states. `states[rows, slot]` would say that a row may read any other one,
# and a batch that lies on several devices would be gathered for it. The states of a short row are all passed over, and
# a single row is indexed without `vmap`, because `jax.experimental.checkify` ends in an IndexError at a scatter with a
# batch axis.

# More states than this are indexed: selecting one of 16 takes twice as long.
FEW_SLOTS = 8


def read_slot(
    states: Shaped[Array, "B S *state"],
    slot: Int[Array, " B"],
) -> Shaped[Array, "B *state"]:
    """states[b, slot[b]]."""
    if states.shape[1] <= FEW_SLOTS:
        return jnp.sum(jnp.where(_is_slot(states, slot), states, 0), axis=1)
    if states.shape[0] == 1:
        return states[:, slot[0]]
    return jax.vmap(lambda states, slot: states[slot])(states, slot)


def write_slot(
    states: Shaped[Array, "B S *state"],
    slot: Int[Array, " B"],
    state: Shaped[Array, "B *state"],
) -> Shaped[Array, "B S *state"]:
    """states with states[b, slot[b]] = state[b]."""
    if states.shape[1] <= FEW_SLOTS:
        return jnp.where(_is_slot(states, slot), state[:, None], states)
    if states.shape[0] == 1:
        return states.at[:, slot[0]].set(state)
    return jax.vmap(lambda states, slot, state: states.at[slot].set(state))(
        states, slot, state
    )


def _is_slot(
    states: Shaped[Array, "B S *state"],
    slot: Int[Array, " B"],
) -> Bool[Array, "B S *ones"]:
    here = jnp.arange(states.shape[1])[None] == slot[:, None]
    return here.reshape(here.shape + (1,) * (states.ndim - 2))
