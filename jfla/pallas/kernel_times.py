"""Estimates of how long kernels take, in microseconds, from times of a chunk and bytes.

Of KDA and GDN with K = V = 128 on an H200; what differs between GPUs is how fast memory is copied.
"""

from typing import NamedTuple

from jfla.pallas.dims import Dims
from jfla.types import CHUNK, Op

# Bytes that a copy was measured to move in a microsecond, by device kind; other GPUs count as an H200.
H200_BYTES_PER_US = 4.29e6
BYTES_PER_US = {"NVIDIA H100 80GB HBM3": 3.03e6}
CLEARLY_SHORTER = 0.97  # of two estimates, the shorter over the longer at most


class IntraTimes(NamedTuple):
    """Microseconds for the intra-chunk work of a chunk, of a warpgroup (scalar gate) or a CTA (gate per channel)."""

    alone: float
    beside_scan: float
    with_ring: float  # beside a scan


INTRA_US = {
    False: IntraTimes(alone=5.6, beside_scan=7.2, with_ring=5.8),
    True: IntraTimes(alone=8.4, beside_scan=10.8, with_ring=7.6),
}  # by whether the gate is a scalar
# Of a chunk, for both kernels side by side with a ring, by the scan's columns of V a CTA: no division of the GPU took
# less. Two CTAs of 64 columns read the same q, k and A. None was seen for KDA.
LEAST_BESIDE_US = {False: {64: 0.0, 128: 0.0}, True: {64: 0.0365, 128: 0.0335}}
# Of a chunk, by the CTA's columns of V: two warpgroups share the tensor cores where there are 128.
SCAN_US = {False: {64: 1.25, 128: 2.0}, True: {64: 1.25, 128: 1.85}}
# The same of segments side by side: a multiprocessor's time for a chunk, with its share of the start of a segment.
SEGMENT_SCAN_US = {64: 1.55, 128: 2.0}
# Of a chunk of one of the backward's scans, which store states, by the CTA's columns of V
BACKWARD_SCAN_US = {64: 1.35, 128: 2.25}
# Of a copy's rate, where these scans or the gradients fill the GPU
BACKWARD_COPY_SHARE = 0.88
# Of a chunk of a scalar gate, of a CTA of the gradient kernel that waits for no bytes, also beside the scans
GRADS_US = 5.6
# The least for a chunk of all sequences beside the gradients. Of 32 sequences an H200's second-level cache lets no more
# through; of 16 a step waits for its stores, and the producer for room in a ring.
BACKWARD_BESIDE_US = 2.9
SPARED_STATES = 2  # what the second-level cache spares them and the gradients, in stores or loads of a state
NEXT_GROUP_US = 10.0  # between two groups of the backward's scans beside the gradients
SEGMENTS_COPY_SHARE = 0.9  # of a copy's rate, beside the scans of segments (an H100)


class ChunkBytes(NamedTuple):
    """What a chunk moves from and to device memory, where no kernel finds it in the second-level cache."""

    intra: int
    scan: int
    backward_scans: int  # both

    @classmethod
    def of(cls, op: Op, dims: Dims) -> "ChunkBytes":
        """Of operands of 16 bits, and a gate per channel in float32."""
        a_bytes = 2 * 2 * CHUNK * CHUNK
        rows_of_k = 2 * CHUNK * dims.key_dim
        rows_of_v = 2 * CHUNK * dims.value_dim
        # q and k; with a gate per channel g, and q, k and k to the chunk's end as they decay
        intra = (2 if op.scalar_gate else 7) * rows_of_k + a_bytes
        of_qk = (2 if op.scalar_gate else 3) * rows_of_k
        scan = of_qk + a_bytes + 2 * rows_of_v
        # k, or its two factors, A_inv and v again; S, dS, v_new and dv
        states = 2 * 2 * dims.key_dim * dims.value_dim
        backward_scans = scan + of_qk - rows_of_k + a_bytes // 2 + 2 * rows_of_v
        return cls(intra, scan, backward_scans + states)


def one_by_one_us(
    op: Op, dims: Dims, v_block: int, wgs: int, num_sms: int, bytes_per_us: float
) -> float:
    """The intra-chunk kernel, in rounds, and then the scan, in waves of CTAs; each may be bound by its bytes.

    `wgs` warpgroups of a CTA of the intra-chunk kernel have chunks of their own.
    """
    rounds = -(-dims.num_chunks // (num_sms * wgs))
    chunk_bytes = ChunkBytes.of(op, dims)
    bytes_us = dims.num_chunks / bytes_per_us
    alone_us = INTRA_US[op.scalar_gate].alone
    intra_us = max(rounds * alone_us, chunk_bytes.intra * bytes_us)
    scan_ctas = dims.sequences * (dims.value_dim // v_block)
    chain_us = dims.n_chunks * SCAN_US[op.scalar_gate][v_block]
    return intra_us + _waves_us(
        scan_ctas, num_sms, chain_us, chunk_bytes.scan * bytes_us
    )


def backward_scans_us(
    op: Op, dims: Dims, v_block: int, num_sms: int, bytes_per_us: float
) -> float:
    """Both scans of the backward in one grid, in waves of CTAs."""
    ctas = 2 * dims.sequences * (dims.value_dim // v_block)
    chain_us = dims.n_chunks * BACKWARD_SCAN_US[v_block]
    bytes_us = ChunkBytes.of(op, dims).backward_scans * dims.num_chunks / bytes_per_us
    return _waves_us(ctas, num_sms, chain_us, bytes_us / BACKWARD_COPY_SHARE)


def grads_us(dims: Dims, num_sms: int, bytes_per_us: float) -> float:
    """The gradients of a scalar gate by their kernel alone."""
    rounds = -(-dims.num_chunks // num_sms)
    bytes_us = _grads_bytes(dims) * dims.num_chunks / bytes_per_us
    return max(rounds * GRADS_US, bytes_us / BACKWARD_COPY_SHARE)


def _grads_bytes(dims: Dims) -> int:
    """Of a chunk: q, k, do, v_new, dv, S and dS; dq and dk."""
    rows = 2 * CHUNK * (4 * dims.key_dim + 3 * dims.value_dim)
    return rows + 2 * _state_bytes(dims)


def _state_bytes(dims: Dims) -> int:
    return 2 * dims.key_dim * dims.value_dim


class BesideTimes(NamedTuple):
    """Of the backward's scans beside the gradients of a scalar gate."""

    total_us: float  # without the start, when the gradients have nothing to do
    bound_by_bytes: bool

    @classmethod
    def of(
        cls, op: Op, dims: Dims, sequences: int, grads_ctas: int, bytes_per_us: float
    ) -> "BesideTimes":
        """Scans of so many sequences at a time, and the gradients on other CTAs."""
        of_scans = ChunkBytes.of(op, dims).backward_scans
        spared = SPARED_STATES * _state_bytes(dims)
        chunk_bytes = of_scans + _grads_bytes(dims) - spared
        bytes_us = chunk_bytes / (BACKWARD_COPY_SHARE * bytes_per_us)
        work_us = GRADS_US / grads_ctas
        step_us = max(BACKWARD_BESIDE_US, sequences * work_us)
        group_us = dims.n_chunks * max(step_us, sequences * bytes_us) + NEXT_GROUP_US
        num_groups = dims.sequences // sequences
        return cls(num_groups * group_us, sequences * bytes_us > step_us)


def _waves_us(ctas: int, num_sms: int, chain_us: float, bytes_us: float) -> float:
    """CTAs that each take `chain_us` alone and together move what takes `bytes_us`; the last wave has the rest."""
    full_waves, last_ctas = divmod(ctas, num_sms)
    waves = [num_sms] * full_waves + [last_ctas] * (last_ctas > 0)
    return sum(max(chain_us, bytes_us * in_wave / ctas) for in_wave in waves)


def beside_us(
    op: Op,
    dims: Dims,
    v_block: int,
    wgs: int,
    num_ctas: int,
    num_groups: int = 1,
    *,
    ring: bool,
) -> float:
    """The intra-chunk kernel on `num_ctas` multiprocessors beside the scan of chains on the others.

    With t_intra and t_scan for all chunks and the intra-chunk work in so many rounds,

        t = max(rounds * t_intra + t_scan / rounds, t_scan)

    because the scan ends a round after the last one; with a ring at least `LEAST_BESIDE_US` a chunk.
    """
    times = INTRA_US[op.scalar_gate]
    intra_us = times.with_ring if ring else times.beside_scan
    scan_us = num_groups * dims.n_chunks * SCAN_US[op.scalar_gate][v_block]
    rounds = -(-dims.num_chunks // (num_ctas * wgs))
    longest = max(rounds * intra_us + scan_us / rounds, scan_us)
    if ring:
        least_us = LEAST_BESIDE_US[op.scalar_gate][v_block]
        longest = max(longest, least_us * dims.num_chunks)
    return longest


def segments_us(
    op: Op, dims: Dims, wgs: int, num_ctas: int, bytes_per_us: float
) -> float:
    """The intra-chunk kernel beside scans of segments side by side, which read from device memory, not from a ring."""
    intra_us = INTRA_US[op.scalar_gate].beside_scan
    chunk_bytes = sum(ChunkBytes.of(op, dims))
    bytes_us = chunk_bytes / (SEGMENTS_COPY_SHARE * bytes_per_us)
    return dims.num_chunks * max(intra_us / (num_ctas * wgs), bytes_us)
