"""What the first kernel leaves in memory for the scans, and how a program finds and decays its chunk: KDA and GDN."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jfla._types import CHUNK
from jfla.pallas._tile import COLS, F32, per_column


class Operands(NamedTuple):
    """q and k as they meet the state.

    KDA: `q_in`, `k_in`, `k_out` are tiles [B, HV, N, C, K] with every decay applied, and `decay` [B, HV, N, K] is that
    of the whole chunk. GDN: q, k, k as the caller passed them, [B, T, H, K], and `decay` [B, HV, N, 4, C] holds the
    factor of each row of the three, and the decay of the whole chunk.
    """

    q_in: Any
    k_in: Any
    k_out: Any
    decay: Any


class Pairs(NamedTuple):
    """What a chunk knows about its pairs of tokens, [B, HV, N, C, C] bf16: A_qk and (I + L)^-1 diag(beta)."""

    a_qk: Any
    inverse: Any


class Place(NamedTuple):
    """The chunk that a program works on."""

    batch: Any
    head: Any
    chunk: Any

    def tile(self, ref: Any) -> Any:
        """Of an array [B, HV, N, ...]."""
        return ref.at[self.batch, self.head, self.chunk]

    @property
    def tokens(self) -> Any:
        return pl.ds(pl.multiple_of(self.chunk * CHUNK, CHUNK), CHUNK)

    def rows(self, ref: Any, value_heads: int, columns: Any = slice(None)) -> Any:
        """Of an array [B, T, heads, D], whose heads may be shared by groups of value heads."""
        return ref.at[self.batch, self.tokens, lax.div(self.head, jnp.int32(value_heads // ref.shape[2])), columns]

    def operand(self, ref: Any, value_heads: int) -> Any:
        return self.tile(ref) if len(ref.shape) == 5 else self.rows(ref, value_heads)


class Stretch(NamedTuple):
    """Only a stretch of time is gone through: what is made and used up meanwhile is of its chunks, all else of all.

    `results`, where given: references to results of all chunks, which take those of the stretch.
    """

    later: Any  # [1] int32: as long stretches that follow in time
    results: Any = None


BLOCK = 64  # columns of V that one warpgroup owns
Q_IN, K_IN, K_OUT, WHOLE = range(4)  # rows of GDN's `decay`


class Decays:
    """Applies the decays of the chunk in `ref` to what is kept transposed: tokens are columns, or keys are columns."""

    def __init__(self, scalar: bool, ref: Any):
        self.scalar, self.ref = scalar, ref

    def factor(self, which: int) -> jax.Array | None:
        """[V, C]: the factor of each token; KDA has it in its tiles already."""
        return per_column(plgpu.load(self.ref.at[which], layout=COLS), BLOCK) if self.scalar else None

    def tokens(self, x: jax.Array, which: int) -> jax.Array:
        """x [V, C] times the factor of each token."""
        return times(x, self.factor(which))

    def state(self, x: jax.Array) -> jax.Array:
        """x [V, K] decayed by the whole chunk."""
        if self.scalar:
            return x * self.ref[WHOLE, 0]
        return x * per_column(plgpu.load(self.ref, layout=COLS), x.shape[0])


def times(x: jax.Array, factor: jax.Array | None) -> jax.Array:
    return x if factor is None else x * factor


def decay_buffer(scalar: bool, stages: int, key_dim: int) -> Any:
    return plgpu.SMEM((stages, 4, CHUNK) if scalar else (stages, key_dim), F32)
