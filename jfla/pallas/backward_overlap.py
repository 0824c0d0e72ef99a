"""Whether the backward's scans run beside the gradient kernel: from shapes and the device's numbers.

The scans leave S, v_new, dS and dv of every chunk, which the gradient kernel reads once. One kernel after the other,
these go to device memory and back. Side by side, a few chunks apart, much of dS and dv is found in the second-level
cache, and so are q, k and do, which the scan in reverse has read just before.

The scans meet every chunk in opposite orders. So the scan of the states goes through spans of time from the last to the
first, each from a state that the forward has kept, a span ahead of the scan in reverse.

With a gate per channel the kernels run one after the other: the forward keeps two 64 x 64 matrices of a chunk and no
state.
"""

from typing import NamedTuple

from jfla.pallas.dims import Dims
from jfla.pallas.kernel_times import (
    BACKWARD_SCAN_US,
    CLEARLY_SHORTER,
    BesideTimes,
    backward_scans_us,
    grads_us,
)
from jfla.pallas.splits import (
    backward_v_block,
    equal_group_sizes,
    num_spans,
    time_splits,
)
from jfla.types import Op

# The fewest and the most of a span. Nothing runs beside the scan of the states in its first span, so that long spans
# cost the backward time, and the forward stores a state for each, so that short ones cost time and memory.
SPAN_CHUNKS = (8, 32)
# The fewest where bytes bound the launch: more spans cost more than a shorter start saves.
SPAN_CHUNKS_BY_BYTES = 16
# Chunks of a sequence's dS beyond those that the gradient kernel has in work. Of a longer ring the second-level cache
# has lost the first chunks when they are read. With so many the scan issues copies before signals, see
# `ScanCta.signals_behind_copies`.
DSTATE_RING_SLACK = 3
# The same where bytes bound the launch, which took longer with a longer ring.
DSTATE_RING_SLACK_BY_BYTES = 2
LEAST_IN_WORK = 3  # chunks of a sequence
# Chunks of the states' ring beyond two spans. A producer waits for room for a chunk before it has signalled the last
# three: with two spans alone the gradients could not begin a span until they had ended the one before.
STATE_RING_SLACK = 4
DIM = 128  # K and V; with others the two kernels were not timed


class BackwardOverlap(NamedTuple):
    """The backward's two scans beside the gradient kernel."""

    grads_ctas: int  # CTAs of the gradient kernel
    num_spans: int  # of the scan of the states, see `EqualSpans`
    sequences_per_group: int  # scanned at a time; 0: all
    state_ring: int  # chunks of a sequence whose S and v_new are in memory; 0: all
    dstate_ring: int  # the same of dS


def backward_overlap(
    op: Op, dims: Dims, num_sms: int, bytes_per_us: float
) -> BackwardOverlap | None:
    """The shortest launch of both; None where one kernel after the other is not clearly longer, or it was not timed.

    The scans have a CTA each for every sequence of a group, and the gradient kernel has the other multiprocessors. All
    of these CTAs have to find room at once.
    """
    if not op.scalar_gate or not dims.key_dim == dims.value_dim == DIM:
        return None
    if time_splits(dims, num_sms) > 1:
        return None
    if dims.segments is not None or dims.n_chunks < 2 * SPAN_CHUNKS[0]:
        return None
    choices = [
        _of_group(op, dims, n, num_sms, bytes_per_us)
        for n in equal_group_sizes(dims)
        if 2 * n < num_sms
    ]
    v_block = backward_v_block(op, dims, num_sms, bytes_per_us)
    one_by_one = backward_scans_us(op, dims, v_block, num_sms, bytes_per_us)
    one_by_one += grads_us(dims, num_sms, bytes_per_us)
    if not choices or min(choices)[0] >= CLEARLY_SHORTER * one_by_one:
        return None
    return min(choices)[1]


def _of_group(
    op: Op, dims: Dims, sequences: int, num_sms: int, bytes_per_us: float
) -> tuple[float, BackwardOverlap]:
    """Microseconds, and the launch of so many sequences at a time."""
    grads_ctas = num_sms - 2 * sequences
    times = BesideTimes.of(op, dims, sequences, grads_ctas, bytes_per_us)
    by_bytes = times.bound_by_bytes
    wanted = SPAN_CHUNKS_BY_BYTES if by_bytes else SPAN_CHUNKS[0]
    spans = _short_spans(dims.n_chunks, num_spans(op, dims, num_sms), wanted)
    length = -(-dims.n_chunks // spans)
    us = times.total_us + length * BACKWARD_SCAN_US[DIM]
    state_ring = 2 * length + STATE_RING_SLACK
    if state_ring >= dims.n_chunks:
        state_ring = 0
    in_groups = sequences < dims.sequences
    dstate_ring = max(-(-grads_ctas // sequences), LEAST_IN_WORK)
    dstate_ring += DSTATE_RING_SLACK_BY_BYTES if by_bytes else DSTATE_RING_SLACK
    group = sequences if in_groups else 0
    return us, BackwardOverlap(grads_ctas, spans, group, state_ring, dstate_ring)


def _short_spans(n_chunks: int, long_spans: int, least_wanted: int) -> int:
    """Longer ones the longer time is, and whole parts of the long spans where these have such."""
    shortest, longest = SPAN_CHUNKS
    wanted = min(max(n_chunks // longest, least_wanted), longest)
    if long_spans:
        long_span = n_chunks // long_spans
        lengths = range(shortest, longest + 1)
        parts = [length for length in lengths if long_span % length == 0]
        if parts:
            return n_chunks // min(parts, key=lambda length: abs(length - wanted))
    return -(-n_chunks // wanted)
