"""Whether the forward's intra-chunk kernel runs beside its scan, and how: from shapes and the device's numbers."""

from typing import NamedTuple

from jfla.pallas.dims import Dims
from jfla.pallas.kernel_times import (
    H200_BYTES_PER_US,
    INTRA_US,
    SEGMENT_SCAN_US,
    beside_us,
    one_by_one_us,
    segments_us,
)
from jfla.pallas.splits import (
    equal_group_sizes,
    intra_wgs,
    scan_v_block,
    time_splits,
    v_blocks,
)
from jfla.types import Op

# Chunks of all sequences in rings: 6 of each of 32 stall KDA's intra-chunk kernel, 12 exceed the second-level cache.
RING_TILES = 256


class Overlap(NamedTuple):
    """The intra-chunk kernel beside the output scan."""

    v_block: int  # of the scan
    num_ctas: int  # of the intra-chunk kernel; 0: it runs before the scan
    sequences_per_group: int = 0  # see `Schedule`
    segments_in_turn: bool = False  # see `Schedule`


def overlap_schedule(
    op: Op,
    dims: Dims,
    num_sms: int,
    bytes_per_us: float = H200_BYTES_PER_US,
    *,
    exclusive: bool = True,
) -> Overlap:
    """Whether the intra-chunk kernel runs beside the scan, and on how many multiprocessors.

    Overlap pays while the scan leaves many multiprocessors idle, or would be bound by bytes that a ring keeps in the
    second-level cache; not where time is split or all chunks fit in one wave. KDA with K = 256 makes its A matrices in
    two kernels, of which none can.
    """
    v_block = scan_v_block(dims, num_sms)
    in_one_wave = dims.num_chunks <= num_sms
    if num_sms == 1 or in_one_wave or time_splits(dims, num_sms) > 1:
        return Overlap(v_block, 0)
    if not op.scalar_gate and dims.key_dim > 128:
        return Overlap(v_block, 0)
    device = (num_sms, bytes_per_us)
    if dims.segments is None or _few_segments(dims, num_sms):
        return _overlap_of_chains(op, dims, *device, exclusive=exclusive)[1]
    side_by_side_us, side_by_side = _overlap_of_segments(op, dims, *device)
    # The decay that keeps segments apart takes digits from a scalar gate's sums: a segment would not have the bits of a
    # call on it alone.
    if op.scalar_gate or not exclusive or not dims.may_be_one_chain:
        return side_by_side
    one_chain = dims.as_one_chain()
    if not _few_segments(one_chain, num_sms):
        return side_by_side
    in_turn_us, in_turn = _overlap_of_chains(op, one_chain, *device)
    if in_turn_us < side_by_side_us and ring_chunks(one_chain, in_turn, num_sms):
        return in_turn._replace(segments_in_turn=True)
    return side_by_side


def _overlap_of_chains(
    op: Op,
    dims: Dims,
    num_sms: int,
    bytes_per_us: float,
    *,
    exclusive: bool = True,
) -> tuple[float, Overlap]:
    """The shortest form and its microseconds: one kernel after the other, or the two side by side."""
    v_block = scan_v_block(dims, num_sms)
    ring = exclusive and dims.are_chains
    wgs = intra_wgs(op, dims.key_dim)
    one_by_one = one_by_one_us(op, dims, v_block, wgs, num_sms, bytes_per_us)
    choices = [(one_by_one, Overlap(v_block, 0))]
    for columns in set(v_blocks(dims)):
        # The intra-chunk kernel ends at the last chunk that has tokens, which of groups is not the last in order.
        in_groups = ring and dims.segments is None
        sizes = equal_group_sizes(dims) if in_groups else [dims.sequences]
        for sequences in sizes:
            idle_sms = num_sms - sequences * (dims.value_dim // columns)
            if idle_sms <= 0:
                continue
            num_groups = dims.sequences // sequences
            us = beside_us(op, dims, columns, wgs, idle_sms, num_groups, ring=ring)
            per_group = 0 if num_groups == 1 else sequences
            found = Overlap(columns, idle_sms, per_group)
            if not per_group or ring_chunks(dims, found, num_sms):
                choices.append((us, found))
    return min(choices)


def _overlap_of_segments(
    op: Op, dims: Dims, num_sms: int, bytes_per_us: float
) -> tuple[float, Overlap]:
    """Multiprocessors in the ratio of the work, and microseconds: CTAs of the scan end, and others take their place.

    The intra-chunk kernel takes chunks in the order in which segments are scanned, so that a scan waits for little.
    """
    _, columns = v_blocks(dims)
    wgs = intra_wgs(op, dims.key_dim)
    scan_us = SEGMENT_SCAN_US[columns] * (dims.value_dim // columns)
    intra_us = INTRA_US[op.scalar_gate].beside_scan / wgs
    ctas = round(num_sms * intra_us / (intra_us + scan_us))
    ctas = min(max(ctas, 1), num_sms - 1)
    return segments_us(op, dims, wgs, ctas, bytes_per_us), Overlap(columns, ctas)


def ring_chunks(dims: Dims, overlap: Overlap, num_sms: int) -> int:
    """Chunks of a sequence that the intra-chunk kernel may be ahead of the scan beside it; 0: any number.

    The scan's CTAs for all sequences of a group have to be resident, or the intra-chunk kernel would wait for one that
    cannot begin; each goes on with a sequence of the next group, whose chunks follow in the same ring. Segments side by
    side have more CTAs than are resident, and so no ring. Padding behind a row's one segment has a CTA that takes the
    place of the segment's. Where rows differ in length, that of a short row would wait for the end of a long one, whose
    chunks wait for room in the short one's ring. A ring that is not twice as long as what is in work makes the
    intra-chunk kernel wait.
    """
    if not overlap.num_ctas or not dims.are_chains:
        return 0
    sequences = overlap.sequences_per_group or dims.sequences
    scan_ctas = sequences * -(-dims.value_dim // overlap.v_block)
    chunks_to_next = -(-overlap.num_ctas // sequences)
    ring = -(-RING_TILES // sequences)
    are_resident = overlap.num_ctas + scan_ctas <= num_sms
    is_long = ring >= 2 * chunks_to_next
    return ring if are_resident and is_long and ring < dims.n_chunks else 0


def _few_segments(dims: Dims, num_sms: int) -> bool:
    """Whether a scan has one segment of each row, which are of one length, and leaves multiprocessors idle."""
    _, columns = v_blocks(dims)
    return dims.segments == 1 and dims.sequences * dims.value_dim < num_sms * columns
