"""The contract between stages: what lies in memory after each of them, in every backend, with its equation and shape.

A chunked op is five stages, named alike in code, tests, benchmarks and profiles. The equations are those of
docs/math.md; S is the state at a chunk's start, and every decay is the exponential of a sum of log decays.

    intra            q, k, g, beta of a chunk           -> QK, IntraChunk
    output_scan      + v, initial state                 -> output, final state
    backward_scans   + do, cotangent of the final state -> ScanResults, cotangent of the initial state
    chunk_grads      the states at both ends of a chunk -> ChunkGrads
    decode           the recurrence, a few tokens

A backend may fuse or overlap stages; `jfla.xla.stages` and `jfla.pallas.stages` have them one by one, with the
signatures at the end of this file, for tests and benchmarks.
"""

from typing import NamedTuple, Protocol

import jax.numpy as jnp
from jaxtyping import Array, Float

from jfla.parallel.stretch import Entered
from jfla.types import CHUNK, Inputs, Options


class DecayedQK(NamedTuple):
    """q and k as they meet the state, decayed from the start of their chunk or to its end. q is scaled.

    q_from_start = scale * q * exp(g_cum)      k_to_end    = k * exp(g_last - g_cum)
    k_from_start =         k * exp(g_cum)      chunk_decay = exp(g_last)
    """

    q_from_start: Float[Array, "B HV N C K"]
    k_from_start: Float[Array, "B HV N C K"]
    k_to_end: Float[Array, "B HV N C K"]
    chunk_decay: Float[Array, "B HV N G"]


class JoinedQK(NamedTuple):
    """`DecayedQK` of a gate per channel (KDA), with q_from_start and k_from_start side by side in one array.

    That array has the bytes of dg in float32, whose memory XLA gives it until the gradients are made.
    """

    qk_from_start: Float[Array, "B HV N C 2K"]
    k_to_end: Float[Array, "B HV N C K"]
    chunk_decay: Float[Array, "B HV N K"]

    @property
    def key_dim(self) -> int:
        return self.k_to_end.shape[-1]

    @property
    def scalar_gate(self) -> bool:
        """False: decays are in the tiles, not in factors of rows."""
        return False

    @classmethod
    def join(cls, qk: DecayedQK) -> "JoinedQK":
        """The same numbers in this layout."""
        qk_from_start = jnp.concatenate([qk.q_from_start, qk.k_from_start], axis=-1)
        return cls(qk_from_start, qk.k_to_end, qk.chunk_decay)

    def expanded(self) -> DecayedQK:
        """The same numbers, q and k apart."""
        q_from_start, k_from_start = jnp.split(self.qk_from_start, 2, axis=-1)
        return DecayedQK(q_from_start, k_from_start, self.k_to_end, self.chunk_decay)


class FactoredQK(NamedTuple):
    """`DecayedQK` of a scalar gate (GDN): q and k as the caller passed them, and what every row is multiplied with.

    `factors` are rows Q_FROM_START, K_FROM_START, K_TO_END (1 / norm and the scale included) and CHUNK_DECAY, which
    is the same for every token.
    """

    q: Float[Array, "B T H K"]
    k: Float[Array, "B T H K"]
    factors: Float[Array, "B HV N 4 C"]

    @property
    def key_dim(self) -> int:
        return self.k.shape[-1]

    @property
    def scalar_gate(self) -> bool:
        """True: one decay for all channels, in the factors of rows."""
        return True

    def expanded(self) -> DecayedQK:
        """The same with every row multiplied: [B, HV, N, C, K]."""
        heads = self.factors.shape[1]
        q = _by_chunk(self.q, heads)
        k = _by_chunk(self.k, heads)
        q_from_start, k_from_start, k_to_end, chunk_decay = jnp.moveaxis(
            self.factors, 3, 0
        )
        return DecayedQK(
            q_from_start=q_from_start[..., None] * q,
            k_from_start=k_from_start[..., None] * k,
            k_to_end=k_to_end[..., None] * k,
            chunk_decay=chunk_decay[..., :1],
        )


QK = JoinedQK | FactoredQK


def _by_chunk(
    x: Float[Array, "B T H K"], value_heads: int
) -> Float[Array, "B HV N C K"]:
    batch, time, heads, key_dim = x.shape
    x = jnp.repeat(x, value_heads // heads, axis=2)
    return jnp.moveaxis(
        x.reshape(batch, time // CHUNK, CHUNK, value_heads, key_dim), 3, 1
    )


# Rows of FactoredQK.factors.
Q_FROM_START, K_FROM_START, K_TO_END, CHUNK_DECAY = range(4)


class IntraChunk(NamedTuple):
    """What a chunk knows about its pairs of tokens; the most of what the backward keeps beside the inputs.

    a_qk  = tril(scale * q D k^T)            D_ij = exp(g_cum_i - g_cum_j), per channel for KDA
    a_inv = (I + L)^-1 diag(beta)            L = stril(diag(beta) k D k^T)
    """

    a_qk: Float[Array, "B HV N C C"]
    a_inv: Float[Array, "B HV N C C"]


class ScanResults(NamedTuple):
    """What the two scans of the backward leave of every chunk: states are transposed, [V, K].

    v_new = a_inv (v - k_from_start S)
    dv    = a_inv^T (a_qk^T do + k_to_end dS)          dS at the chunk's end
    """

    states: Float[Array, "B HV N V K"]  # S^T at the chunk's start
    dstates: Float[Array, "B HV N V K"]  # dS^T at the chunk's end
    v_new: Float[Array, "B T HV V"]
    do: Float[Array, "B T HV V"]
    dv: Float[Array, "B T HV V"]


class ChunkGrads(NamedTuple):
    """Per value head: cotangents of q and k as the caller passed them, and of the log decay.

    dbeta is v_new_dot_dv / beta^2, because v_new and dv both carry a factor beta.
    """

    dq: Float[Array, "B T HV K"]
    dk: Float[Array, "B T HV K"]
    dg: Float[Array, "B T HV G"]
    v_new_dot_dv: Float[Array, "B T HV"]


class Residuals(NamedTuple):
    """What the forward leaves for the backward beside the inputs."""

    intra: IntraChunk
    # S^T where the spans of time begin
    state_checkpoints: Float[Array, "B HV spans V K"] | None
    # Where time is split over devices, and R of the spans that a device scans side by side.
    entered: Entered | None = None
    split_r: Float[Array, "B HV splits K K"] | None = None
    # Of a scalar gate: `FactoredQK.factors`, and the vectors that they follow from
    factors: Float[Array, "B HV N 4 C"] | None = None
    token_scalars: Float[Array, "B HV N scalars C"] | None = None


class Stages(Protocol):
    """The stages of a backend one by one, on validated calls without a state per segment.

    Time is whole chunks: tokens past T are 0. A stage takes what the one before left, whichever backend that was.
    """

    def intra(self, inputs: Inputs, options: Options) -> tuple[QK, IntraChunk]: ...

    def output_scan(
        self, inputs: Inputs, options: Options, qk: QK, pairs: IntraChunk
    ) -> tuple[Float[Array, "B T HV V"], Float[Array, "B HV K V"]]:
        """The output and the final state."""
        ...

    def backward_scans(
        self,
        inputs: Inputs,
        options: Options,
        qk: QK,
        pairs: IntraChunk,
        do: Float[Array, "B T HV V"],
        d_final: Float[Array, "B HV K V"],
    ) -> tuple[ScanResults, Float[Array, "B HV K V"]]:
        """`ScanResults`, and the cotangent of the initial state."""
        ...

    def chunk_grads(
        self, inputs: Inputs, options: Options, scans: ScanResults
    ) -> ChunkGrads: ...
