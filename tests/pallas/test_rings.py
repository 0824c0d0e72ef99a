"""Rings of results beside a scan: whether the two kernels of a launch can always go on, by a simulation of them."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jfla.pallas.common.chunk_index import ChunkGrid
from jfla.pallas.dims import Dims
from jfla.pallas.heuristics import Schedule, schedule
from jfla.pallas.kernel_times import H200_BYTES_PER_US
from jfla.pallas.segments import CTA_CHUNKS
from jfla.types import OPS


@given(
    op=st.sampled_from(sorted(OPS)),
    sequences=st.integers(1, 130) | st.sampled_from([192, 256, 512]),
    n_chunks=st.integers(1, 400),
    segments=st.none() | st.integers(1, 20),
    sizes=st.tuples(*[st.sampled_from([64, 128, 256])] * 2),
    num_sms=st.sampled_from([1, 78, 108, 114, 132]),
)
def test_nothing_waits_in_a_ring_for_what_may_never_run(
    op, sequences, n_chunks, segments, sizes, num_sms
):
    value_dim, key_dim = sizes
    dims = Dims(1, sequences, n_chunks, value_dim, key_dim, segments)
    found = schedule(OPS[op], dims, num_sms)
    group_size = found.sequences_per_group or sequences
    assert sequences % group_size == 0
    if not found.ring_chunks:
        return
    scan_ctas = group_size * -(-value_dim // found.overlap_v_block)
    assert segments in (None, 1) or found.segments_in_turn
    assert 0 < found.overlap_ctas <= num_sms - scan_ctas
    # A CTA's next chunk waits for one that is ready before the CTA's last one.
    assert found.ring_chunks > -(-found.overlap_ctas // group_size)
    assert found.ring_chunks < n_chunks


@settings(deadline=None)
@given(
    sequences=st.integers(1, 40),
    group=st.integers(1, 40),
    n_chunks=st.integers(1, 9),
)
def test_groups_take_turns_in_rings(sequences, group, n_chunks):
    """Tile by tile, the last group with fewer sequences: a ring's chunks follow each other, and each has a flag."""
    group = min(group, sequences)
    grid = ChunkGrid(1, sequences, n_chunks, group)
    index = grid(jnp.arange(40 * 9))  # of one shape, which is compiled once
    tiles = [
        (first + place, chunk, place, first // group * n_chunks + chunk)
        for first in range(0, sequences, group)
        for chunk in range(n_chunks)
        for place in range(min(group, sequences - first))
    ]
    found = np.stack([index.head, index.chunk, *index.flag[1:]], axis=-1)
    found = found[: grid.num_tiles]
    np.testing.assert_array_equal(found, tiles)
    assert (found[:, 2:] < grid.flags_shape[1:]).all()


MOST_TILES = 8 * 64 * 40


@settings(deadline=None)
@given(
    op=st.sampled_from(sorted(OPS)),
    batch=st.integers(1, 8),
    heads=st.sampled_from([16, 20, 32, 36, 64]),
    n_chunks=st.integers(9, 40),
    bytes_per_us=st.sampled_from([H200_BYTES_PER_US, 3.03e6, 1e6]),
)
def test_a_ring_always_gets_room(op, batch, heads, n_chunks, bytes_per_us):
    dims = Dims(batch, heads, n_chunks, 128, 128)
    found = schedule(OPS[op], dims, bytes_per_us=bytes_per_us)
    if found.ring_chunks:
        np.testing.assert_array_equal(chunks_read(dims, found), n_chunks)


@settings(deadline=None)
@given(
    op=st.sampled_from(sorted(OPS)),
    heads=st.sampled_from([8, 16, 20, 32, 36]),
    n_chunks=st.integers(9, 40),
    padding=st.integers(0, 40),
    segments=st.sampled_from([0, 1, 3]),
    bytes_per_us=st.sampled_from([H200_BYTES_PER_US, 1e6]),
)
def test_a_ring_of_a_segment_and_its_padding_always_gets_room(
    op, heads, n_chunks, padding, segments, bytes_per_us
):
    """Of rows that are one segment, with 0 two of whole chunks, or a row whose segments are scanned in turn."""
    whole_rows = segments == 0
    batch = 2 if whole_rows else 1
    sizes = (batch, heads, n_chunks, 128, 128, segments or 1)
    dims = Dims(*sizes, may_be_padded=not whole_rows)
    found = schedule(OPS[op], dims, bytes_per_us=bytes_per_us)
    assert not found.sequences_per_group
    if found.segments_in_turn:
        assert segments == 3
        dims = dims._replace(segments=1)
    if found.ring_chunks:
        length = n_chunks if whole_rows else max(n_chunks - padding, 0)
        got = chunks_read(dims, found, [length] * batch)
        np.testing.assert_array_equal(got, n_chunks)


def test_rows_of_other_lengths_would_wait_for_each_other():
    """Why they have no ring: the padding of the short row has no room, and keeps the long row from being made."""
    dims = Dims(2, 20, 40, 128, 128, 1)
    found = schedule(OPS["kda"], dims)
    assert found.ring_chunks == 7
    assert (chunks_read(dims, found, [30, 15]) < 40).any()
    padded = dims._replace(may_be_padded=True)
    assert schedule(OPS["kda"], padded).ring_chunks == 0


def chunks_read(
    dims: Dims, found: Schedule, lengths: list[int] | None = None
) -> np.ndarray:
    """Of every sequence, when neither kernel can go on.

    Where sequences go in groups, a CTA of the scan, and a ring, go on from one to the one at the same place of the next
    group. Where rows are segments of `lengths` chunks, padding behind them is scanned by the CTA that
    `SegmentTable.ctas` has for it.
    """
    group = found.sequences_per_group
    grid = ChunkGrid(dims.batch, dims.heads, dims.n_chunks, group)
    index = grid(jnp.arange(MOST_TILES))  # of one shape, which is compiled once
    assert grid.ring_shape(found.ring_chunks)[-1] == found.ring_chunks
    if group:
        of_chains = dims._replace(
            batch=1, heads=group, n_chunks=dims.num_chunks // group
        )
        ungrouped = dataclasses.replace(found, sequences_per_group=0)
        flags = np.stack(index.flag[1:])[:, : dims.num_chunks]
        chain = ChunkGrid(1, group, of_chains.n_chunks)(jnp.arange(MOST_TILES))
        np.testing.assert_array_equal(
            flags, np.stack([chain.head, chain.chunk])[:, : dims.num_chunks]
        )
        read = chunks_read(of_chains, ungrouped)
        before = dims.n_chunks * np.arange(dims.sequences // group)[:, None]
        return np.clip(read - before, 0, dims.n_chunks).reshape(-1)
    sequence = np.asarray(index.batch * dims.heads + index.head)
    chunk = np.asarray(index.chunk)
    is_ready = np.zeros((dims.sequences, dims.n_chunks), bool)
    read = np.zeros(dims.sequences, int)
    ctas = ctas_in_order(dims, lengths or [dims.n_chunks] * dims.batch)
    v_blocks = dims.value_dim // found.overlap_v_block
    num_resident = (found.num_sms - found.overlap_ctas) // v_blocks
    stride = found.overlap_ctas * found.intra_wgs
    tiles = np.arange(stride)
    while True:
        known = np.minimum(tiles, grid.num_tiles - 1)
        has_room = chunk[known] - found.ring_chunks < read[sequence[known]]
        goes_on = (tiles < grid.num_tiles) & has_room
        ready = tiles[goes_on]
        is_ready[sequence[ready], chunk[ready]] = True
        tiles[goes_on] += stride
        resident = ctas[read[ctas[:, 0]] < ctas[:, 1]][:num_resident]
        # Of the CTAs of a sequence, the first goes on.
        resident = np.unique(resident[:, 0])
        can_read = resident[is_ready[resident, read[resident]]]
        read[can_read] += 1
        if not can_read.size and not goes_on.any():
            return read


def ctas_in_order(dims: Dims, lengths: list[int]) -> np.ndarray:
    """The sequence of each CTA of a scan and the chunk behind its last, in the order in which CTAs begin."""
    ctas = []
    for sequence in range(dims.sequences):
        length = lengths[sequence // dims.heads]
        of_padding = (length + 1) // CTA_CHUNKS
        if of_padding:
            ctas.append((0, sequence, length))
        ctas.append((of_padding, sequence, dims.n_chunks))
    return np.array(sorted(ctas))[:, 1:]
