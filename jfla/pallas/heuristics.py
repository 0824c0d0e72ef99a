"""Tile sizes and the order of kernels, from the op, the shape of a call and the device; nothing is tuned at run time.

Everything here is arithmetic: no kernel is imported. A `Schedule` is static and hashable, so that a call that is
compiled with another one is another entry in jit's cache.
"""

import dataclasses

from jfla.pallas.backward_overlap import BackwardOverlap, backward_overlap
from jfla.pallas.dims import Dims
from jfla.pallas.forward_overlap import overlap_schedule, ring_chunks
from jfla.pallas.kernel_times import H200_BYTES_PER_US
from jfla.pallas.machine import Machine
from jfla.pallas.splits import (
    backward_v_block,
    intra_wgs,
    num_spans,
    scan_v_block,
    stretch_splits,
    time_splits,
)
from jfla.types import CHUNK, Op

SUPPORTED_DIMS = (64, 128, 256)
# Of K and of V of a chunked call
MAX_DIM: dict[Machine, int] = {"hopper": 256, "ampere": 128}
DECODE_TOKENS = 8  # of one call: a CTA keeps all of them in shared memory
HOPPER_SMS = 132  # of an H100 SXM or H200, where no device says
# By compute capability, of a CTA's shared memory what its tiles may take: all but 1 KiB; of 10.0 and 10.3 less than
# their 226, because the scans of mma.sync spill with another pipeline stage.
SMEM_BYTES = {
    "8.0": 162 * 1024,
    "8.6": 98 * 1024,
    "8.9": 98 * 1024,
    "9.0": 226 * 1024,
    "10.0": 162 * 1024,
    "10.3": 162 * 1024,
    "12.0": 98 * 1024,
    "12.1": 98 * 1024,
}
HOPPER_SMEM_BYTES = SMEM_BYTES["9.0"]
# Of copies of rows: the tables and copies of packed segments take half as long.
MIN_COPY_US = 64


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
    # of a scalar gate; None: the scans, then the gradients
    backward_overlap: BackwardOverlap | None
    intra_wgs: int  # warpgroups of a CTA of the intra-chunk kernel that take chunks of their own
    intra_ctas: int  # CTAs of the intra-chunk kernel, at most
    # every row is read in place as one packed segment, see `row_is_segment`
    row_is_segment: bool = False
    # the forward scans packed segments as one chain, whose state decays to 0 where each begins
    segments_in_turn: bool = False
    # of a device's part: `num_checkpoints` of the whole call, where that is more than the part needs; 0: no more
    checkpoints_of_whole: int = 0

    @property
    def num_checkpoints(self) -> int:
        """Spans of time whose first states the forward keeps for the backward."""
        if self.backward_overlap is not None:
            return self.backward_overlap.num_spans
        return self.checkpoints_of_whole or self.num_spans


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
        backward_overlap=backward_overlap(op, dims, num_sms, bytes_per_us)
        if exclusive
        else None,
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
        backward_overlap=None,
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
    checkpoints = whole.num_checkpoints
    if not checkpoints:
        return dataclasses.replace(part, num_spans=0)
    # Each of `num_spans` has to begin where one of those does whose states the forward keeps.
    spans = whole.num_spans
    if dims.n_chunks % checkpoints or checkpoints % (spans or 1):
        spans = 0
    return dataclasses.replace(
        part, num_spans=spans, checkpoints_of_whole=checkpoints, time_splits=1
    )


def decode_v_block(dims: Dims, num_sms: int) -> int:
    """Columns of a state that one CTA holds: fewer while that gives idle multiprocessors something to do.

    With 128 a warp reads 64 bytes of a row of bfloat16, with 64 half of that: 256 states of 32 heads take 0.159 ms
    instead of 0.182. For K = 256 there are no registers.
    """
    states = dims.sequences
    if dims.value_dim % 128 == 0 and dims.key_dim <= 128 and states >= 8 * num_sms:
        return 128
    return 32 if states * (dims.value_dim // 64) < 2 * num_sms else 64
