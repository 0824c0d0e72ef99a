"""How the parts of a call are spread over multiprocessors: V, time, sequences and warpgroups, from shapes alone."""

from jfla.pallas.dims import Dims
from jfla.pallas.kernel_times import CLEARLY_SHORTER, backward_scans_us
from jfla.types import Op

MIN_SPLIT_CHUNKS = 16
MAX_TIME_SPLITS = 16
# Finding where the splits begin takes a scan over each in two forms.
MIN_TIME_SPLITS = 3
LONG_SEGMENT_CHUNKS = 8  # chunks of the aligned grid for each segment

NUM_SPANS = 4
MIN_SPAN_CHUNKS = 32
MANY_STATES_BYTES = 256 * 2**20


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


def equal_group_sizes(dims: Dims) -> list[int]:
    """Numbers of sequences that each group may have."""
    return [n for n in range(1, dims.sequences + 1) if dims.sequences % n == 0]
