"""KDA's decays between the tokens of a chunk as sums over spans: the exponents of `common/pair_passes.py`."""

from typing import NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jfla.pallas.common.decay_sums import GATE_SCALE
from jfla.pallas.common.pair_passes import BLOCK, GREATEST, RANGE, SHIFT, passes_of
from jfla.pallas.mgpu.copies import commit_smem, load_with_layout
from jfla.pallas.mgpu.iota import column_numbers, iota, per_row
from jfla.pallas.mgpu.layouts import COLS, ROWS, WGMMA
from jfla.pallas.mgpu.mma import dot, zeros
from jfla.pallas.mgpu.smem import F16, F32, transposed
from jfla.pallas.mgpu.types import Index, Reg, Smem
from jfla.types import CHUNK


class ChunkDecays(NamedTuple):
    """The log2 decays of 64 channels of a chunk, and their sums over spans of tokens, as matmuls with 0/1 matrices."""

    decay_smem: Smem  # float16 tile, times GATE_SCALE
    line_smem: Smem  # of `write_iota`
    zero: Index  # an opaque zero, which keeps the matrices out of registers between their uses

    def from_start(self) -> Reg:
        """[C, 64]: from the chunk's start to the token."""
        row, column = self.tokens()
        return self._sums(column <= row)

    def to_end(self) -> Reg:
        """[C, 64]: after the token to the chunk's end."""
        row, column = self.tokens()
        return self._sums(column > row)

    def rows_in_block(self) -> Reg:
        """[C, 64]: of a row from the first token of its block, without that token's own."""
        row, column = self.tokens()
        first = row & ~(BLOCK - 1)
        return self._sums((column > first) & (column <= row))

    def columns_to_block(self, block: Index) -> Reg:
        """[C, 64]: of a column to the first token of a block; of the tokens behind it what they grow."""
        first = block * BLOCK
        token, summed = self.tokens()
        before = (token < summed) & (summed <= first)
        behind = (first < summed) & (summed <= token)
        return self._sums(before, behind)

    def whole_chunk(self) -> Reg:
        """[64]: of all tokens, with channels as rows, so that no warp needs another."""
        decay = plgpu.load(transposed(self.decay_smem), layout=WGMMA).astype(F32)
        return jnp.sum(decay, axis=1) * (1.0 / GATE_SCALE)

    def tokens(self) -> tuple[Reg, Reg]:
        """[C, C]: the row and the column number of every element."""
        row = per_row(iota(CHUNK, ROWS) + self.zero, CHUNK)
        return row, column_numbers(self.line_smem)

    def _sums(self, added: Reg, subtracted: Reg | None = None) -> Reg:
        zero = zeros(CHUNK, CHUNK)
        matrix = jnp.where(added, zero + 1.0 / GATE_SCALE, zero)
        if subtracted is not None:
            matrix = jnp.where(subtracted, zero - 1.0 / GATE_SCALE, matrix)
        commit_smem()  # keeps the compiler from computing several sums at once, for which registers are too few
        return dot(zero, (matrix.astype(F16), self.decay_smem))


def column_factor(columns: Reg, which_pass: Index) -> Reg:
    """The factor of the columns in a pass, of sums from `ChunkDecays.columns_to_block`."""
    return jnp.exp2(jnp.minimum(columns - (SHIFT + RANGE * which_pass), GREATEST))


def num_passes(least_smem: Smem, block: int) -> Index:
    """How many passes a block takes, from the least of each row's sums [C]."""
    rows = least_smem.at[pl.ds(block * BLOCK, BLOCK)]
    return passes_of(jnp.min(load_with_layout(rows, COLS)))


def block_rows(tile_smem: Smem, block: Index) -> Smem:
    """The rows of a block of a tile."""
    first = block * BLOCK
    if not isinstance(block, int):
        first = pl.multiple_of(first, BLOCK)
    return tile_smem.at[pl.ds(first, BLOCK)]


def causal_columns(block: int, strictly: bool) -> Reg:
    """[C, BLOCK]: of A^T, column tokens by the rows of a block: True where the column is not behind the row."""
    shape = (CHUNK, BLOCK)
    column = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=WGMMA)
    row = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=WGMMA) + block * BLOCK
    return column < row if strictly else column <= row
