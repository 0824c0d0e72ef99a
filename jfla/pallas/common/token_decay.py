"""Decays that are applied per token: the factors of a scalar gate (GDN); KDA has them in its tiles already."""

from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jfla.pallas.common.chunk_index import TILE_V
from jfla.pallas.mgpu.copies import load_with_layout
from jfla.pallas.mgpu.iota import per_column, per_row
from jfla.pallas.mgpu.layouts import COLS, ROWS
from jfla.pallas.mgpu.smem import F32
from jfla.pallas.mgpu.types import MemorySpec, Reg, Smem
from jfla.stages import CHUNK_DECAY
from jfla.types import CHUNK


class TokenDecay:
    """Applies a chunk's decays to transposed values, [V, C], where tokens are columns, and to the state, [V, K].

    `decay_smem` is [4, C], rows of `FactoredQK.factors`, for a scalar gate; else [K], the chunk's decay.
    """

    def __init__(self, scalar_gate: bool, decay_smem: Smem):
        self.scalar_gate = scalar_gate
        self.decay_smem = decay_smem

    def factor(self, row: int) -> Reg | None:
        """[V, C]: the factor of each token, or None where the tiles hold it."""
        if not self.scalar_gate:
            return None
        return per_column(load_with_layout(self.decay_smem.at[row], COLS), TILE_V)

    def scale_tokens(self, x: Reg, row: int) -> Reg:
        """x [V, C] times the factor of each token."""
        return times(x, self.factor(row))

    def decay_state(self, x: Reg) -> Reg:
        """x [V, K] decayed by the whole chunk."""
        if self.scalar_gate:
            return x * self.decay_smem[CHUNK_DECAY, 0]
        return x * per_column(load_with_layout(self.decay_smem, COLS), x.shape[0])


def times(x: Reg, factor: Reg | None) -> Reg:
    """x * factor, with None for a factor of 1."""
    return x if factor is None else x * factor


def decay_smem(scalar_gate: bool, stages: int, key_dim: int) -> MemorySpec:
    """Shared memory for `TokenDecay`, for each pipeline stage."""
    return plgpu.SMEM((stages, 4, CHUNK) if scalar_gate else (stages, key_dim), F32)


def pair_decay(log2_cum_smem: Smem, log2_factor: Any = 0.0) -> Reg:
    """[C, C]: decay from token j to token i, from the running sum of log2 decay, times a factor.

    The factor is one number, or one for every row i. Above the diagonal it is anything, also infinite.

    The one exponent that is a difference of sums. The sums are float32 and at most 64 * 150 in size (see
    `gate.STRONGEST`), so their rounding costs a decay 6e-4 of itself at most, and that of a sum with the factor of its
    row half as much: less than bf16 operands do.
    """
    rows = per_row(load_with_layout(log2_cum_smem, ROWS) + log2_factor, CHUNK)
    columns = per_column(load_with_layout(log2_cum_smem, COLS), CHUNK)
    return jnp.exp2(rows - columns)
