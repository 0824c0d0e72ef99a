"""KDA's decays between two tokens as products of two factors, one form for every gate: blocks of 16 rows, in passes.

The rows of a block decay from its first token; the columns, any tokens up to the row, decay to that token or, within
the block, grow. Rows are shifted up by SHIFT bits and columns down by as many. Where a channel loses more than RANGE
bits within the block, its rows go in several passes: a row takes part in the pass into whose RANGE bits its own decay
falls, and is 0 in the others. So every factor is in range, and of a decay only what is below 2^-66 may be dropped. What
a row becomes depends on no later token.

In passes behind the first a row has lost RANGE bits since its block began: to it earlier blocks give nothing, and all
pairs are between two tokens of a block.
"""

import jax.numpy as jnp

from jfla.pallas.mgpu.types import Index, Reg
from jfla.types import CHUNK

BLOCK = 16
NUM_BLOCKS = CHUNK // BLOCK
# These are log2: a column of at least 2^-126 meets a row of 2^SHIFT.
SHIFT = 60.0
GREATEST = 110.0  # growth of a column; leaves bfloat16 room for k, and float32 for sums over channels
RANGE = SHIFT + GREATEST
# The bits after which a row goes to the next pass are summed in two ways, by tokens and by blocks: a row must find a
# pass where the two differ in their last digits.
MARGIN = 2.0**-7


def row_factor(shifted: Reg, bits: Reg | float = 0.0) -> Reg:
    """The factor of rows in the pass that begins `bits` down, a multiple of RANGE; of those in other passes 0.

    `shifted`: sums of log2 decays from the block's first token, plus SHIFT.
    """
    of_pass = shifted if isinstance(bits, float) else shifted + bits
    takes_part = of_pass > -GREATEST
    if not isinstance(bits, float):
        takes_part = takes_part & (of_pass <= SHIFT)
        of_pass = jnp.minimum(of_pass, SHIFT)
    return jnp.where(takes_part, jnp.exp2(of_pass), 0.0 * shifted)


def growth(shifted: Reg, bits: Reg | float = 0.0) -> Reg:
    """The factor of columns in their own block, in that pass: 1 / that of a row, which no row needs beyond GREATEST."""
    of_pass = shifted if isinstance(bits, float) else shifted + bits
    return jnp.exp2(jnp.minimum(-of_pass, GREATEST))


def passes_of(least: Reg) -> Index:
    """How many passes it takes where the least sum within a block is this one."""
    return 1 + ((MARGIN - least) * (1.0 / RANGE)).astype(jnp.int32)
