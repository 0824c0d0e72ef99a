"""Whether the backward's scans of a scalar gate run beside the gradient kernel: from shapes and the device's numbers.

The scans leave S, v_new, dS and dv of every chunk, which the gradient kernel reads once. One kernel after the other,
these go to device memory and back. Side by side, a few chunks apart, much of dS and dv is found in the second-level
cache, and so are q, k and do, which the scan in reverse has read just before.

The scans meet every chunk in opposite orders. So the scan of the states goes through spans of time from the last to the
first, each from a state that the forward has kept, a span ahead of the scan in reverse.
"""

from typing import NamedTuple

from jfla.pallas.dims import Dims
from jfla.pallas.kernel_times import (
    BACKWARD_SCAN_US,
    CLEARLY_SHORTER,
    backward_beside_us,
    backward_scans_us,
    grads_us,
)
from jfla.pallas.splits import backward_v_block, group_sizes, num_spans, time_splits
from jfla.types import Op

# The fewest and the most of a span. Nothing runs beside the scan of the states in its first span, so that long spans
# cost the backward time, and the forward stores a state for each, so that short ones cost time and memory.
SPAN_CHUNKS = (8, 32)
# A chunk's operands are copied while three others are in the pipeline, so that the scan is at most two chunks ahead of
# the gradients. Of more, the second-level cache has lost the first when they are read.
DSTATE_RING = 5
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
    spans = _short_spans(dims.n_chunks, num_spans(op, dims, num_sms))
    length = -(-dims.n_chunks // spans)
    choices = []
    for sequences in group_sizes(dims, num_sms, in_groups=True):
        grads_ctas = num_sms - 2 * sequences
        if grads_ctas <= 0:
            continue
        us = backward_beside_us(op, dims, sequences, grads_ctas, bytes_per_us)
        us += length * BACKWARD_SCAN_US[DIM]
        group = 0 if sequences == dims.sequences else sequences
        choices.append((us, grads_ctas, group))
    v_block = backward_v_block(op, dims, num_sms, bytes_per_us)
    one_by_one = backward_scans_us(op, dims, v_block, num_sms, bytes_per_us)
    one_by_one += grads_us(dims, num_sms, bytes_per_us)
    if not choices or min(choices)[0] >= CLEARLY_SHORTER * one_by_one:
        return None
    _, grads_ctas, group = min(choices)
    state_ring = 2 * length + STATE_RING_SLACK
    if state_ring >= dims.n_chunks:
        state_ring = 0
    return BackwardOverlap(grads_ctas, spans, group, state_ring, DSTATE_RING)


def _short_spans(n_chunks: int, long_spans: int) -> int:
    """Longer ones the longer time is, and whole parts of the long spans where these have such."""
    shortest, longest = SPAN_CHUNKS
    wanted = min(max(n_chunks // longest, shortest), longest)
    if long_spans:
        long_span = n_chunks // long_spans
        lengths = range(shortest, longest + 1)
        parts = [length for length in lengths if long_span % length == 0]
        if parts:
            return n_chunks // min(parts, key=lambda length: abs(length - wanted))
    return -(-n_chunks // wanted)
