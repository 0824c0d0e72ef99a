"""Which tokens' decays add up, as matrices of ones for the tensor cores: one at a time in shared memory, one coming.

Every exponent is a sum of decays over a stretch of tokens, (matrix of ones) @ g, and none is the difference of two: a
strong gate costs the weak ones after it no digit. The adjoint is the transposed matrix. The matrices
come from memory: a pattern that is known at compile time, as an operand in registers, is put there too late for the
tensor cores, and part of it is missing.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jfla._types import CHUNK
from jfla.pallas._tile import F16, LEVELS, block_of, blocks_apart, dot, per_column, per_row, transposed, zeros

# g is kept as float16 times this, and the ones as 1 / this: a decay loses 2^-12 of itself, or 2^-33 where that is more.
GATE_SCALE = 256.0
# Sums (log2) that may be taken backwards: 2^110 leaves bfloat16 room for k, and 2^-110 for q.
FAST_RANGE = 110.0

NEAR = 4  # the level of blocks of 16

_ROW, _COLUMN = np.indices((CHUNK, CHUNK))
BEFORE = _COLUMN <= _ROW  # from the chunk's start to the token
AFTER = _COLUMN > _ROW  # after the token to the chunk's end
ALL = np.ones((CHUNK, CHUNK), bool)


def stretch(level: int) -> np.ndarray:
    """From a token to the middle of its block of 2 * 2^level: back for the later half, on for the earlier one."""
    same = (_ROW >> level) == (_COLUMN >> level)
    return same & np.where((_ROW >> level) & 1, BEFORE, AFTER)


def within(level: int) -> np.ndarray:
    """From the start of a block of 2^level to the token, without its first: 16 tokens of -5 .. 0 are in range."""
    return ((_ROW >> level) == (_COLUMN >> level)) & BEFORE & (_COLUMN % (1 << level) != 0)


# Pairs of tokens where gates are too strong for decays from the chunk's start: first what is inside blocks of 16, from
# the block's start; then ever smaller squares, through their middle: NEAR_STEPS in all where 16 tokens are in range.
PAIRS = (within(NEAR), *map(stretch, reversed(range(LEVELS))))
NEAR_STEPS = 1 + LEVELS - NEAR


def pairs_of(step: Any) -> jax.Array:
    """[C, C]: the pairs that a step of PAIRS is about, and their mirror image; behind the last step, the diagonal."""
    return blocks_apart(*_apart(step))


def pairs_in_rows(step: Any, chosen: jax.Array, numbers: Any) -> jax.Array:
    """[C, C]: of `pairs_of` those in the `chosen` [C] rows, without the mirror image; of step 0 with it.

    What is true of rows is asked of the line of them: element by element it would be an operation more for every pair.
    """
    apart, level = _apart(step)
    row = block_of(lax.iota(jnp.int32, CHUNK), level)
    row = jnp.where(chosen & (row & apart == apart), row ^ apart, -1)
    return per_row(row, CHUNK) == per_column(block_of(numbers[...], level), CHUNK)


def _apart(step: Any) -> tuple[jax.Array, jax.Array]:
    """`apart` and `level` of `blocks_apart`."""
    return jnp.where((step == 0) | (step > LEVELS), 0, 1), jnp.where(step == 0, NEAR, jnp.maximum(LEVELS - step, 0))


def stack(dtype: Any, *patterns: np.ndarray) -> jax.Array:
    """[len(patterns), C, C]: float16 to sum g, bfloat16 for the adjoint."""
    return jnp.asarray(np.stack(patterns) / (GATE_SCALE if dtype == F16 else 1.0), dtype)


class Window:
    """One warpgroup's view of a stack: the pattern in shared memory, or on its way there."""

    def __init__(self, source: Any, buffer: Any, barrier: Any):
        self.source, self.buffer, self.barrier = source, buffer, barrier

    def fetch(self, step: Any) -> None:
        plgpu.copy_gmem_to_smem(self.source.at[step], self.buffer, self.barrier)

    def sums(self, g: Any, flat: bool = False) -> jax.Array:
        """[C, 64]: what g [C, 64] adds up to over every token's stretch. `flat`: its transpose, if the pattern is."""
        plgpu.barrier_wait(self.barrier)
        return dot(zeros(CHUNK, CHUNK), (transposed(g), self.buffer) if flat else (self.buffer, g))

    def adjoint(self, acc: jax.Array, *parts: Any, flat: bool = False) -> jax.Array:
        """acc + pattern^T @ sum of parts; or its transpose."""
        plgpu.barrier_wait(self.barrier)
        pair = lambda part: (transposed(part), self.buffer) if flat else (transposed(self.buffer), part)
        return dot(acc, *map(pair, parts))
