"""KDA's decays between two tokens as products of two factors, one form for every gate: blocks of 16 rows, in passes.

The rows of a block decay from its first token; the columns, any tokens up to the row, decay to that token or, within
the block, grow. Where a channel loses more than RANGE bits within the block, its rows go in several passes: a row takes
part in the pass into whose RANGE bits its own decay falls, and is 0 in the others, so that every factor is in range and
nothing is dropped. What a row becomes depends on no later token.
"""

import jax.numpy as jnp

from jfla.pallas.mgpu.types import Index, Reg
from jfla.types import CHUNK

BLOCK = 16
NUM_BLOCKS = CHUNK // BLOCK
RANGE = 110.0  # log2; leaves bfloat16 room for k, and float32 for sums over channels


def row_factor(sums: Reg, bits: Reg | float = 0.0) -> Reg:
    """The factor of rows in the pass that begins `bits` down, a multiple of RANGE; of those in other passes 0."""
    shifted = sums if isinstance(bits, float) else sums + bits
    takes_part = shifted > -RANGE
    if not isinstance(bits, float):
        takes_part = takes_part & (shifted <= 0.0)
        shifted = jnp.minimum(shifted, 0.0)
    return jnp.where(takes_part, jnp.exp2(shifted), 0.0 * sums)


def growth(sums: Reg, bits: Reg | float = 0.0) -> Reg:
    """The factor of columns in their own block, in that pass: 1 / that of a row, which no row needs beyond RANGE."""
    shifted = sums if isinstance(bits, float) else sums + bits
    return jnp.exp2(jnp.minimum(-shifted, RANGE))


def passes_of(least: Reg) -> Index:
    """How many passes it takes where the least sum within a block is this one."""
    return 1 + (least * (-1.0 / RANGE)).astype(jnp.int32)
