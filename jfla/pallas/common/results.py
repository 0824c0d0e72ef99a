"""What the Hopper kernels leave in global memory: the contract of `jfla.stages` in the kernels' own layouts."""

from typing import NamedTuple

from jfla.pallas.mgpu.types import Gmem


class RingChunks(NamedTuple):
    """Of how many chunks of each sequence there is memory for results of the intra-chunk kernel; 0: all.

    With `ChunkGrid.sequences_per_group`: a kernel that made chunks in another order than the scan reads them would wait
    for room in a ring for ever.
    """

    qk: int = 0  # `JoinedQK`
    intra: int = 0  # `IntraChunk`
    sequences_per_group: int = 0


ALL_CHUNKS = RingChunks()


class IntraResults(NamedTuple):
    """Of the intra-chunk kernel. `intra` is None where the backward has it."""

    qk: Gmem  # a QK
    intra: Gmem  # an IntraChunk or None
    # [B, HV, N, scalars, C] float32. GDN: 1 or 3, see intra_gdn.py. KDA: 2, 1 / norm of q and of k, under qk_norm
    # where `intra` is None, else None.
    token_scalars: Gmem


class KernelGrads(NamedTuple):
    """Of the gradient kernels, per value head.

    Cotangents of q and k as the caller passed them; under qk_norm with more than one block of 128 channels, of q and k
    after it.
    """

    dq: Gmem  # [B, T, HV, K]
    dk: Gmem
    # KDA [B, T, HV, K], GDN [B, HV, N, C]: of the natural-log decay. In float32; KDA's Hopper kernel has it in the
    # dtype of the caller's g where that is the decay itself.
    dg: Gmem
    v_new_dot_dv: Gmem  # [B, HV, N, C]: beta^2 dbeta
