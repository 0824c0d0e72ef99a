"""Estimates of how long the forward's kernels take, in microseconds, from times of a chunk and bytes.

Of KDA and GDN with K = V = 128 on an H200; what differs between GPUs is how fast memory is copied.
"""

from typing import NamedTuple

from jfla.pallas.dims import Dims
from jfla.types import CHUNK, Op


class IntraTimes(NamedTuple):
    """Microseconds for the intra-chunk work of a chunk, of a warpgroup (scalar gate) or a CTA (gate per channel)."""

    alone: float
    beside_scan: float
    with_ring: float  # beside a scan


INTRA_US = {
    False: IntraTimes(alone=5.6, beside_scan=7.2, with_ring=6.2),
    True: IntraTimes(alone=8.4, beside_scan=10.8, with_ring=7.6),
}  # by whether the gate is a scalar
# Of a chunk, for both kernels side by side with a ring: no division of the GPU took less. None was seen for KDA.
LEAST_BESIDE_US = {False: 0.0, True: 0.0365}
# Of a chunk, by the CTA's columns of V: two warpgroups share the tensor cores where there are 128.
SCAN_US = {False: {64: 1.25, 128: 2.0}, True: {64: 1.25, 128: 1.85}}
# The same of segments side by side: a multiprocessor's time for a chunk, with its share of the start of a segment.
SEGMENT_SCAN_US = {64: 1.55, 128: 2.0}
# Of a chunk of one of the backward's scans, which store states, by the CTA's columns of V
BACKWARD_SCAN_US = {64: 1.35, 128: 2.25}
BACKWARD_COPY_SHARE = 0.88  # of a copy's rate, where these scans fill the GPU
NEXT_GROUP_US = 10  # until a scan's CTAs are those of the next group
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

    because the scan ends a round after the last one; with a ring at least `LEAST_BESIDE_US` a chunk. Where sequences go
    in groups, both kernels wait while the scan's CTAs for the next group begin.
    """
    times = INTRA_US[op.scalar_gate]
    intra_us = times.with_ring if ring else times.beside_scan
    scan_us = num_groups * dims.n_chunks * SCAN_US[op.scalar_gate][v_block]
    rounds = -(-dims.num_chunks // (num_ctas * wgs))
    longest = max(rounds * intra_us + scan_us / rounds, scan_us)
    if ring:
        longest = max(longest, LEAST_BESIDE_US[op.scalar_gate] * dims.num_chunks)
    return longest + (num_groups - 1) * NEXT_GROUP_US


def segments_us(
    op: Op, dims: Dims, wgs: int, num_ctas: int, bytes_per_us: float
) -> float:
    """The intra-chunk kernel beside scans of segments side by side, which read from device memory, not from a ring."""
    intra_us = INTRA_US[op.scalar_gate].beside_scan
    chunk_bytes = sum(ChunkBytes.of(op, dims))
    bytes_us = chunk_bytes / (SEGMENTS_COPY_SHARE * bytes_per_us)
    return dims.num_chunks * max(intra_us / (num_ctas * wgs), bytes_us)
