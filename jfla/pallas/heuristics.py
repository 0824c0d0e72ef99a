"""Tile sizes and the order of kernels, from the op, the shape of a call and the device; nothing is tuned at run time.

Everything here is arithmetic: no kernel is imported. A `Schedule` is static and hashable, so that a call that is
compiled with another one is another entry in jit's cache.
"""

import dataclasses
from typing import NamedTuple

from jfla.pallas.dims import Dims
from jfla.pallas.kernel_times import (
    INTRA_US,
    SEGMENT_SCAN_US,
    backward_scans_us,
    beside_us,
    one_by_one_us,
    segments_us,
)
from jfla.pallas.machine import Machine
from jfla.types import CHUNK, Op

SUPPORTED_DIMS = (64, 128, 256)
# Of K and of V of a chunked call
MAX_DIM: dict[Machine, int] = {"hopper": 256, "ampere": 128}
DECODE_TOKENS = 8  # of one call: a CTA keeps all of them in shared memory
HOPPER_SMS = 132  # of an H100 SXM or H200, where no device says
# By compute capability, of a CTA's shared memory what its tiles may take: all but 1 KiB; of 10.0 less than its 226,
# because the scans of mma.sync spill with another pipeline stage.
SMEM_BYTES = {
    "8.0": 162 * 1024,
    "8.6": 98 * 1024,
    "8.9": 98 * 1024,
    "9.0": 226 * 1024,
    "10.0": 162 * 1024,
}
HOPPER_SMEM_BYTES = SMEM_BYTES["9.0"]
# Bytes that a copy was measured to move in a microsecond, by device kind; other GPUs count as an H200.
H200_BYTES_PER_US = 4.29e6
BYTES_PER_US = {"NVIDIA H100 80GB HBM3": 3.03e6}

MIN_SPLIT_CHUNKS = 16
MAX_TIME_SPLITS = 16
# Finding where the splits begin takes a scan over each in two forms.
MIN_TIME_SPLITS = 3
LONG_SEGMENT_CHUNKS = 8  # chunks of the aligned grid for each segment

# Chunks of all sequences in rings: 6 of each of 32 stall KDA's intra-chunk kernel, 12 exceed the second-level cache.
RING_TILES = 256

CLEARLY_SHORTER = 0.97  # of two estimates, the shorter over the longer at most
# Of copies of rows: the tables and copies of packed segments take half as long.
MIN_COPY_US = 64

NUM_SPANS = 4
MIN_SPAN_CHUNKS = 32
MANY_STATES_BYTES = 256 * 2**20


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How a chunked call is spread over the device, and which instructions its kernels are made of."""

    machine: Machine
    num_sms: int
    smem_bytes: int
    bytes_per_us: float  # that a copy moves
    scan_v_block: int  # columns of V per CTA of a scan
    backward_v_block: int  # the same of the backward's two scans, which share a grid
    overlap_v_block: int  # the same where the intra-chunk kernel runs beside the scan
    # CTAs of the intra-chunk kernel beside the scan; 0: it runs before
    overlap_ctas: int
    # sequences that the two kernels have at a time, one group after the other; 0: all
    sequences_per_group: int
    # chunks of a sequence that it may be ahead of the scan; 0: any number
    ring_chunks: int
    time_splits: int  # spans of time that are scanned side by side
    stretch_splits: int  # the same, where time is split over devices as well
    # spans of time that the backward takes one after the other; 0: all at once
    num_spans: int
    intra_wgs: int  # warpgroups of a CTA of the intra-chunk kernel that take chunks of their own
    intra_ctas: int  # CTAs of the intra-chunk kernel, at most
    # every row is read in place as one packed segment, see `row_is_segment`
    row_is_segment: bool = False
    # the forward scans packed segments as one chain, whose state decays to 0 where each begins
    segments_in_turn: bool = False


def schedule(
    op: Op,
    dims: Dims,
    num_sms: int = HOPPER_SMS,
    smem_bytes: int = HOPPER_SMEM_BYTES,
    machine: Machine = "hopper",
    bytes_per_us: float = H200_BYTES_PER_US,
    *,
    exclusive: bool = True,
) -> Schedule:
    """The schedule of a chunked call, and of a launch that has `num_sms` multiprocessors to itself, if `exclusive`."""
    if machine != "hopper":
        return _schedule_of_single_warpgroups(
            dims, num_sms, smem_bytes, machine, bytes_per_us
        )
    if row_is_segment(op, dims, num_sms, bytes_per_us):
        device = (num_sms, smem_bytes, machine, bytes_per_us)
        of_segments = schedule(op, dims.as_segments(), *device, exclusive=exclusive)
        return dataclasses.replace(of_segments, row_is_segment=True)
    overlap = overlap_schedule(op, dims, num_sms, bytes_per_us, exclusive=exclusive)
    scanned = dims.as_one_chain() if overlap.segments_in_turn else dims
    return Schedule(
        machine=machine,
        num_sms=num_sms,
        smem_bytes=smem_bytes,
        bytes_per_us=bytes_per_us,
        scan_v_block=scan_v_block(dims, num_sms),
        backward_v_block=backward_v_block(op, dims, num_sms, bytes_per_us),
        overlap_v_block=overlap.v_block,
        overlap_ctas=overlap.num_ctas,
        sequences_per_group=overlap.sequences_per_group,
        ring_chunks=ring_chunks(scanned, overlap, num_sms) if exclusive else 0,
        time_splits=time_splits(dims, num_sms),
        stretch_splits=stretch_splits(dims, num_sms),
        num_spans=num_spans(op, dims, num_sms),
        intra_wgs=intra_wgs(op, dims.key_dim),
        intra_ctas=num_sms,
        segments_in_turn=overlap.segments_in_turn,
    )


def row_is_segment(op: Op, dims: Dims, num_sms: int, bytes_per_us: float) -> bool:
    """Whether rows that have chunks which are not whole are read in place, each as one packed segment.

    Else all chunks are copied, with zeros where there is no token: as much as a kernel takes where a call is large. In
    place there are tables to make. Time is not split then.
    """
    if not dims.has_partial_chunks or time_splits(dims, num_sms) > 1:
        return False
    # q, k, v; with a gate per channel g in float32
    token_bytes = 2 * (2 * dims.key_dim + dims.value_dim)
    if not op.scalar_gate:
        token_bytes += 4 * dims.key_dim
    copied_bytes = 2 * dims.num_chunks * CHUNK * token_bytes
    return copied_bytes > MIN_COPY_US * bytes_per_us


def _schedule_of_single_warpgroups(
    dims: Dims,
    num_sms: int,
    smem_bytes: int,
    machine: Machine,
    bytes_per_us: float,
) -> Schedule:
    """Of kernels whose CTAs are one warpgroup: a CTA for each chunk, and for each state and 64 columns of V."""
    return Schedule(
        machine=machine,
        num_sms=num_sms,
        smem_bytes=smem_bytes,
        bytes_per_us=bytes_per_us,
        scan_v_block=64,
        backward_v_block=64,
        overlap_v_block=64,
        overlap_ctas=0,
        sequences_per_group=0,
        ring_chunks=0,
        time_splits=time_splits(dims, num_sms),
        stretch_splits=stretch_splits(dims, num_sms),
        num_spans=0,
        intra_wgs=1,
        intra_ctas=dims.num_chunks,
    )


def schedule_of_part(op: Op, dims: Dims, whole: Schedule) -> Schedule:
    """The schedule of a device's part of a call that is split over devices. What the backward finds stays as it is.

    Not `exclusive`: collectives may hold multiprocessors until all devices are there.
    """
    device = (whole.num_sms, whole.smem_bytes, whole.machine, whole.bytes_per_us)
    # The partitioner has the residuals' shapes from the whole call, and a row that is a segment has one chunk more. A
    # part that chose otherwise could not be lowered.
    dims = dims.as_segments() if whole.row_is_segment else dims.as_copied()
    part = schedule(op, dims, *device, exclusive=False)
    part = dataclasses.replace(part, row_is_segment=whole.row_is_segment)
    if not whole.num_spans:
        return dataclasses.replace(part, num_spans=0)
    return dataclasses.replace(part, num_spans=whole.num_spans, time_splits=1)


def intra_wgs(op: Op, key_dim: int) -> int:
    """With a gate per channel all warpgroups of a CTA share a chunk; else each has its own, as shared memory allows."""
    if not op.scalar_gate:
        return 1
    return 4 if key_dim <= 128 else 2


def v_blocks(dims: Dims) -> tuple[int, int]:
    """The fewest and the most columns of V of a CTA: with K = 256, 64 fill its shared memory."""
    return 64, 64 if dims.key_dim > 128 else min(dims.value_dim, 128)


def scan_v_block(dims: Dims, num_sms: int) -> int:
    """V is split over CTAs while that gives idle multiprocessors something to do, or packed segments are long.

    Of segments nobody knows the longest, which ends last: half as many columns take it two thirds of the time. Short
    ones take as long to begin as to scan.
    """
    fewest, most = v_blocks(dims)
    if (
        dims.segments not in (None, 1)
        and dims.n_chunks > LONG_SEGMENT_CHUNKS * dims.segments
    ):
        return fewest
    return fewest if dims.sequences * (dims.value_dim // 64) <= num_sms else most


def backward_v_block(op: Op, dims: Dims, num_sms: int, bytes_per_us: float) -> int:
    """Columns of V whose waves are clearly shorter; else, and of time splits and packed rows, those of one scan."""
    of_one_scan = scan_v_block(dims, num_sms)
    if dims.segments is not None or time_splits(dims, num_sms) > 1:
        return of_one_scan
    us = {
        v_block: backward_scans_us(op, dims, v_block, num_sms, bytes_per_us)
        for v_block in v_blocks(dims)
    }
    best = min(us, key=lambda v_block: us[v_block])
    return best if us[best] < CLEARLY_SHORTER * us[of_one_scan] else of_one_scan


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
        for sequences in _group_sizes(dims, num_sms, in_groups):
            idle_sms = num_sms - sequences * (dims.value_dim // columns)
            if idle_sms <= 0:
                continue
            num_groups = dims.sequences // sequences
            us = beside_us(op, dims, columns, wgs, idle_sms, num_groups, ring=ring)
            per_group = 0 if num_groups == 1 else sequences
            choices.append((us, Overlap(columns, idle_sms, per_group)))
    return min(choices)


def _group_sizes(dims: Dims, num_sms: int, in_groups: bool) -> list[int]:
    """Numbers of sequences that a group may have: all, or any divisor that leaves multiprocessors idle."""
    if not in_groups:
        return [dims.sequences]
    most = min(dims.sequences, num_sms)
    return [n for n in range(1, most + 1) if dims.sequences % n == 0]


def ring_chunks(dims: Dims, overlap: Overlap, num_sms: int) -> int:
    """Chunks of a sequence that the intra-chunk kernel may be ahead of the scan beside it; 0: any number.

    The scan's CTAs for all sequences of a group have to be resident, or the intra-chunk kernel would wait for one that
    cannot begin. They begin in the order in which sequences are made, and those of a group take the places of the group
    before. Segments side by side have more CTAs than are resident, and so no ring. Padding behind a row's one segment
    has a CTA that takes the place of the segment's. Where rows differ in length, that of a short row would wait for the
    end of a long one, whose chunks wait for room in the short one's ring. KDA's kernel tells that a chunk is ready only
    when its CTA has room for its next chunk: a ring too short to hold both would deadlock.
    """
    if not overlap.num_ctas or not dims.are_chains:
        return 0
    sequences = overlap.sequences_per_group or dims.sequences
    scan_ctas = sequences * -(-dims.value_dim // overlap.v_block)
    chunks_to_next = -(-overlap.num_ctas // sequences)
    ring = -(-RING_TILES // sequences)
    is_safe = overlap.num_ctas + scan_ctas <= num_sms and ring >= 2 * chunks_to_next
    return ring if is_safe and ring < dims.n_chunks else 0


def _few_segments(dims: Dims, num_sms: int) -> bool:
    """Whether a scan has one segment of each row, which are of one length, and leaves multiprocessors idle."""
    _, columns = v_blocks(dims)
    return dims.segments == 1 and dims.sequences * dims.value_dim < num_sms * columns


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


def time_splits(dims: Dims, num_sms: int) -> int:
    """Spans of time that are scanned side by side: 1, unless most multiprocessors would be idle for long.

    Segments are side by side as it is.
    """
    if dims.segments is not None:
        return 1
    ctas = dims.sequences * (dims.value_dim // 64)
    splits = min(
        num_sms // (2 * ctas), dims.n_chunks // MIN_SPLIT_CHUNKS, MAX_TIME_SPLITS
    )
    return splits if splits >= MIN_TIME_SPLITS and dims.key_dim == dims.value_dim else 1


def stretch_splits(dims: Dims, num_sms: int) -> int:
    """`time_splits` of a device's stretch of a sequence, whose map is needed anyway: as the GPU has room."""
    ctas = dims.sequences * (dims.value_dim // 64)
    splits = min(num_sms // ctas, dims.n_chunks // MIN_SPLIT_CHUNKS, MAX_TIME_SPLITS)
    return max(splits, 1)


def num_spans(op: Op, dims: Dims, num_sms: int) -> int:
    """Spans of time that the backward of a scalar gate takes one after the other, with the states of one in memory.

    0: all at once, where the states are few, or spans would be short, each of which fills the GPU anew, or time is
    split into spans that run side by side, or segments do; or with K = 256, for which the scans have no register left.
    """
    if dims.segments is not None:
        return 0
    # bf16, at both ends
    states_bytes = dims.num_chunks * dims.key_dim * dims.value_dim * 2 * 2
    n_chunks = dims.n_chunks
    if not op.scalar_gate or states_bytes < MANY_STATES_BYTES:
        return 0
    if n_chunks % NUM_SPANS or n_chunks < NUM_SPANS * MIN_SPAN_CHUNKS:
        return 0
    return NUM_SPANS if dims.key_dim <= 128 and time_splits(dims, num_sms) == 1 else 0


def decode_v_block(dims: Dims, num_sms: int) -> int:
    """Columns of a state that one CTA holds: fewer while that gives idle multiprocessors something to do.

    With 128 a warp reads 64 bytes of a row of bfloat16, with 64 half of that: 256 states of 32 heads take 0.159 ms
    instead of 0.182. For K = 256 there are no registers.
    """
    states = dims.sequences
    if dims.value_dim % 128 == 0 and dims.key_dim <= 128 and states >= 8 * num_sms:
        return 128
    return 32 if states * (dims.value_dim // 64) < 2 * num_sms else 64
