"""q, k and the gate of a chunk in shared memory, by tiles of 64 channels: loaded, gated, normalised."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jfla.gates import NORM_EPSILON
from jfla.pallas.common.chunk_index import TILE_K, ChunkIndex
from jfla.pallas.common.decay_sums import GATE_SCALE
from jfla.pallas.common.gate import (
    STRONGEST_OF_CHANNEL,
    GateKind,
    log2_decay,
    with_resets,
)
from jfla.pallas.mgpu.columns import widened
from jfla.pallas.mgpu.copies import Copies, commit_smem, load_with_layout, write
from jfla.pallas.mgpu.iota import iota, per_column, per_row
from jfla.pallas.mgpu.layouts import ROWS, WGMMA
from jfla.pallas.mgpu.mma import load
from jfla.pallas.mgpu.moves import load_rows, load_rows_wide
from jfla.pallas.mgpu.row_dots import row_squares
from jfla.pallas.mgpu.smem import F16, F32
from jfla.pallas.mgpu.types import Gmem, Index, Layout, Reg, Smem
from jfla.types import CHUNK

Q, K = range(2)


class QkgOperands(NamedTuple):
    """q, k and g in global memory. `rates` and `log2_bias` belong to the gate, if there is one, `resets` to packing."""

    q: Gmem  # [B, T, H, K]
    k: Gmem  # [B, T, H, K]
    g: Gmem  # [B, T, HV, K], raw where there is a gate
    rates: Gmem  # [HV, 2] or None: `rate_of` a_log
    log2_bias: Gmem  # [HV, K] or None
    resets: Gmem  # [B, T] or None


class QkOptions(NamedTuple):
    """Static. Tokens from `time` on are padding of the last chunk."""

    scale: float
    qk_norm: bool
    time: int
    gate: GateKind = GateKind()

    @property
    def no_gate(self) -> bool:
        """Whether g is the log decay itself."""
        return self.gate.name == "none"

    def factor(self, which: int) -> float:
        """What the recurrence multiplies q (or k) with."""
        return self.scale if which == Q else 1.0


class QkTiles(NamedTuple):
    """The q and k of one chunk, bf16 as the caller passed them.

    They may be a part of the channels: a power of two of tiles, from tile `first` on, a multiple of that power.
    """

    options: QkOptions
    index: ChunkIndex
    value_heads: int
    num_tiles: int
    q: Smem  # [num_tiles, C, 64]
    k: Smem  # [num_tiles, C, 64]
    # [2, up to num_tiles, C] float32: sum of x^2; None where the caller has the norms itself
    square_norms: Smem
    first: Index = 0

    def columns(self, tile: Index) -> Index:
        """Where a tile lies among all channels."""
        return pl.ds((tile ^ self.first) * TILE_K, TILE_K)

    def for_rows(self, ref_gmem: Gmem, tile: Index, use: Callable[[Gmem], Any]) -> Any:
        """`use` of a tile of an array [B, T, heads, K]."""
        return self.index.for_rows(ref_gmem, self.value_heads, self.columns(tile), use)

    def prefetch(self, tile: Index, q_gmem: Gmem, k_gmem: Gmem, copies: Copies) -> None:
        """Starts the copies of a tile of q and of k."""
        for source, target in ((q_gmem, self.q), (k_gmem, self.k)):
            start = functools.partial(copies.start, target_smem=target.at[tile])
            self.for_rows(source, tile, start)

    def write_square_norms(self, tile: Index, gmem: QkgOperands | None = None) -> None:
        """Writes the row sums of x^2 of a tile, and of the tiles that have no line of their own in `square_norms`.

        With `gmem` also of the tiles of K that other CTAs own.
        """
        step = self.square_norms.shape[1]
        own = [
            [tiles.at[tile ^ n] for n in range(0, self.num_tiles, step)]
            for tiles in (self.q, self.k)
        ]
        for which, total in enumerate(row_squares(*own)):
            if gmem is not None:
                others = self._squares_of_others(which, tile, gmem)
                total = functools.reduce(jnp.add, others, total)
            write(self.square_norms.at[which, tile], total)

    def _squares_of_others(
        self, which: int, tile: Index, gmem: QkgOperands
    ) -> list[Reg]:
        """[C]: the row sums of x^2 of each tile of q or k that other CTAs own."""
        squares = []
        step = self.square_norms.shape[1]
        for n in range(self.num_tiles, gmem.q.shape[-1] // TILE_K, step):
            load_tile = functools.partial(load_with_layout, layout=WGMMA)
            x = self.for_rows(gmem[which], tile ^ n, load_tile)
            squares.append(jnp.sum(jnp.square(x.astype(F32)), axis=1))
        return squares

    def inv_norm(self, which: int, layout: Layout = ROWS) -> Reg:
        """[C]: 1 / norm of each row of q or k, under qk_norm, of what `write_square_norms` left."""
        lines = [
            load_with_layout(self.square_norms.at[which, tile], layout)
            for tile in range(self.square_norms.shape[1])
        ]
        return lax.rsqrt(functools.reduce(jnp.add, lines) + NORM_EPSILON)

    def scaled(self, which: int, tile: Index) -> Reg:
        """[C, 64] float32 of q or k as the recurrence reads it: q is scaled."""
        x = load((self.q, self.k)[which].at[tile]).astype(F32)
        if self.options.qk_norm:
            factor = self.inv_norm(which) * self.options.factor(which)
            return x * per_row(factor, TILE_K)
        return x * self.options.scale if which == Q else x

    def load_raw_gate(
        self, gmem: QkgOperands, tile: Index, layout: Layout = WGMMA
    ) -> Reg:
        """A tile of g as the caller passed it, straight from global memory."""
        if layout == WGMMA:
            return self.for_rows(gmem.g, tile, load_rows)
        load_wide = functools.partial(load_rows_wide, layout=layout)
        return self.for_rows(gmem.g, tile, load_wide)

    def write_decays(
        self,
        tile: Index,
        gmem: QkgOperands,
        log2_bias_smem: Smem,
        resets_smem: Smem,
        decay_smem: Smem,
    ) -> None:
        """A tile of the gate, as the caller passed it, to `scaled_log2_decay` in shared memory."""
        raw = self.load_raw_gate(gmem, tile)
        decay_smem[...] = self.scaled_log2_decay(raw, gmem, log2_bias_smem, resets_smem)
        commit_smem()

    def scaled_log2_decay(
        self,
        raw: Reg,
        gmem: QkgOperands,
        log2_bias_smem: Smem,
        resets_smem: Smem,
        layout: Layout = WGMMA,
    ) -> Reg:
        """float16 log2 decay times GATE_SCALE of a tile of raw gate input in `layout`, with packing applied.

        `log2_bias_smem` is the tile's [64], `resets_smem` the chunk's [C], either None.
        """
        head = self.index.head
        log2_bias = None
        if log2_bias_smem is not None:
            log2_bias = load_with_layout(log2_bias_smem, layout.reduce(0))
            log2_bias = per_column(log2_bias, CHUNK, layout)
        rate = (
            None if self.options.no_gate else (gmem.rates[head, 0], gmem.rates[head, 1])
        )
        decay = log2_decay(
            self.options.gate,
            widened(raw, layout),
            rate,
            log2_bias,
            times=GATE_SCALE,
            strongest=STRONGEST_OF_CHANNEL,
        )
        if not self.options.no_gate and self.options.time % CHUNK:
            row = iota(CHUNK, layout.reduce(1)) + self.index.chunk * CHUNK
            token = per_row(row, TILE_K, layout)
            decay = jnp.where(token < self.options.time, decay, 0.0 * decay)
        if resets_smem is not None:
            resets = load_with_layout(resets_smem, layout.reduce(1))
            decay = with_resets(decay, resets, GATE_SCALE, layout)
        return decay.astype(F16)
