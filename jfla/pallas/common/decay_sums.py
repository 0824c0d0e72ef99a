"""Sums of log2 decays over spans of tokens, as products with 0/1 matrices on the tensor cores.

Every exponent is a sum of decays over a span, (matrix of ones) @ log2_decay, and none is the difference of two sums: a
strong gate costs the weak ones after it no digit.

The matrices come from global memory: LLVM materialises a matrix that is known at compile time as register operands too
late for wgmma, and a part of it is then missing.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jfla.pallas.common.pair_passes import BLOCK, NUM_BLOCKS, SHIFT
from jfla.pallas.mgpu.iota import iota, per_column
from jfla.pallas.mgpu.layouts import COLS, TILE_ROWS
from jfla.pallas.mgpu.smem import F16
from jfla.pallas.mgpu.types import Index, Reg
from jfla.types import CHUNK

# log2 decays are kept as float16 times this, and the ones as 1 / this: a decay loses 2^-12 of itself, or 2^-33 where
# that is more.
GATE_SCALE = 256.0

_ROW, _COLUMN = np.indices((CHUNK, CHUNK))
_BLOCK_OF_ROW = _ROW // BLOCK
# From a block's first token to a row, without that token's own; and from a column to the first token of the next block,
# or to the chunk's end.
IN_BLOCK = (
    (_BLOCK_OF_ROW == _COLUMN // BLOCK) & (_COLUMN <= _ROW) & (_COLUMN % BLOCK != 0)
)
TO_NEXT_BLOCK = (_COLUMN > _ROW) & (_COLUMN <= (_BLOCK_OF_ROW + 1) * BLOCK)
AFTER = _ROW > _COLUMN  # of what a sum over later tokens has
SUM_MATRICES = (IN_BLOCK, TO_NEXT_BLOCK)
# Of SUM_MATRICES: for the factors of rows, and of columns.
ROW_SUMS, COLUMN_SUMS = range(2)

# Rows of `block_spans`: the first number of one a block, where the blocks have it.
FROM_CHUNK_START = 0  # to the block's first token
TO_CHUNK_END = 4  # behind the next block's first token
ON_BY_ONE = 8  # from the next block's first token to that of the one behind it; of the first two blocks
ON_BY_TWO = 10  # and on to the third; of the first block
ALL_TOKENS = 11
WITHIN = 12  # behind the block's first token
NUM_BLOCK_SPANS = 16


def block_spans() -> np.ndarray:
    """[NUM_BLOCK_SPANS, C]: the spans of tokens over which whole blocks decay."""
    spans = np.zeros((NUM_BLOCK_SPANS, CHUNK), bool)
    first = [block * BLOCK for block in range(NUM_BLOCKS)] + [CHUNK]
    token = np.arange(CHUNK)
    for block in range(NUM_BLOCKS):
        spans[FROM_CHUNK_START + block] = token <= first[block]
        spans[TO_CHUNK_END + block] = token > first[block + 1]
        spans[WITHIN + block] = (token > first[block]) & (token < first[block + 1])
    for block in range(NUM_BLOCKS - 2):
        spans[ON_BY_ONE + block] = (token > first[block + 1]) & (
            token <= first[block + 2]
        )
    spans[ON_BY_TWO] = (token > first[2]) & (token <= first[3])
    spans[ALL_TOKENS] = True
    return spans


def block_decays(sums: Reg, zero: Index) -> Reg:
    """exp2 of sums over `block_spans` [channels, NUM_BLOCK_SPANS], with which rows and columns are multiplied.

    Rows are shifted up by SHIFT and columns down: those two spans shift them back.
    """
    span = span_numbers(zero)
    shift = jnp.where(span < ON_BY_ONE, 0.0 * sums + SHIFT, 0.0 * sums)
    shift = jnp.where(span < TO_CHUNK_END, 0.0 * sums - SHIFT, shift)
    return jnp.exp2(sums + shift)


def least_within(sums: Reg, zero: Index) -> Reg:
    """[channels]: the least of the sums within a block."""
    return jnp.min(jnp.where(span_numbers(zero) >= WITHIN, sums, 0.0 * sums), axis=1)


def span_numbers(zero: Index) -> Reg:
    """[64, NUM_BLOCK_SPANS]: the number of every column, made of an opaque zero so that none is kept."""
    return per_column(iota(NUM_BLOCK_SPANS, COLS) + zero, TILE_ROWS)


def stack_matrices(dtype: DTypeLike, *matrices: np.ndarray) -> jax.Array:
    """[len(matrices), rows, C]: float16 to sum log2 decays, bfloat16 to sum anything else."""
    return jnp.asarray(
        np.stack(matrices) / (GATE_SCALE if dtype == F16 else 1.0), dtype
    )
