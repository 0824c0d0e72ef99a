"""Sums of log2 decays over spans of tokens, as products with 0/1 matrices on the tensor cores.

Every exponent is a sum of decays over a span, (matrix of ones) @ log2_decay, and none is the difference of two sums: a
strong gate costs the weak ones after it no digit. The adjoint is the product with the transposed matrix.

The matrices stream from global memory through one shared tile: LLVM materialises a matrix that is known at compile
time as register operands too late for wgmma, and a part of it is then missing.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from jfla.pallas.mgpu.iota import block_of, paired_blocks, per_column, per_row
from jfla.pallas.mgpu.mma import dot, zeros
from jfla.pallas.mgpu.smem import F16, transposed
from jfla.pallas.mgpu.triangular import LEVELS
from jfla.pallas.mgpu.types import Barrier, Gmem, Index, Reg, Smem
from jfla.types import CHUNK

# log2 decays are kept as float16 times this, and the ones as 1 / this: a decay loses 2^-12 of itself, or 2^-33 where
# that is more.
GATE_SCALE = 256.0
# Sums (log2) whose negative may be an exponent: 2^110 leaves bfloat16 room for k, and 2^-110 for q.
FAST_RANGE = 110.0

NEAR = 4  # log2 size of the blocks of 16 tokens

_ROW, _COLUMN = np.indices((CHUNK, CHUNK))
FROM_START = _COLUMN <= _ROW  # from the chunk's start to the token
TO_END = _COLUMN > _ROW  # after the token to the chunk's end
WHOLE_CHUNK = np.ones((CHUNK, CHUNK), bool)


def to_middle(level: int) -> np.ndarray:
    """From a token to the middle of its block of 2 * 2^level: back in the later half, on in the earlier one."""
    same = (_ROW >> level) == (_COLUMN >> level)
    return same & np.where((_ROW >> level) & 1, FROM_START, TO_END)


def from_block_start(level: int) -> np.ndarray:
    """From the start of a block of 2^level to the token, without its first: 16 tokens of -5 .. 0 are in range."""
    same = (_ROW >> level) == (_COLUMN >> level)
    return same & FROM_START & (_COLUMN % (1 << level) != 0)


def from_middle(level: int) -> np.ndarray:
    """From the middle token of a block of 2^level to the token; back to it from the tokens before, with a minus."""
    same = (_ROW >> level) == (_COLUMN >> level)
    middle = ((_ROW >> level) << level) + (1 << level) // 2
    on = (middle <= _ROW) & (middle < _COLUMN) & FROM_START
    back = (middle > _ROW) & (middle >= _COLUMN) & TO_END
    return np.where(same, on.astype(int) - back, 0)


# Pairs of tokens where gates are too strong for decays from the chunk's start: first those inside blocks of 16, from
# the block's start; then ever smaller squares, through their middle: NEAR_STEPS in all where 16 tokens are in range.
DECAY_STEPS = (from_block_start(NEAR), *map(to_middle, reversed(range(LEVELS))))
NEAR_STEPS = 1 + LEVELS - NEAR

# The same for gradients, which may depend on later tokens: blocks of 32 decay from their middle, 16 tokens each way.
GRAD_NEAR = 5
MIDDLE_RANGE = 118.0  # 16 tokens of -5 .. 0; k has 2^9 left
GRAD_STEPS = (from_middle(GRAD_NEAR), *map(to_middle, reversed(range(LEVELS))))
GRAD_NEAR_STEPS = 1 + LEVELS - GRAD_NEAR


def step_pairs(step: Index) -> Reg:
    """[C, C]: the pairs that a step of GRAD_STEPS is about, and their mirror image."""
    return paired_blocks(*_paired(step, GRAD_NEAR), CHUNK)


def step_pairs_in_rows(step: Index, rows: Reg, line_smem: Smem) -> Reg:
    """[C, C]: those of `step_pairs` in the chosen `rows` [C], without the mirror image; of step 0 with it."""
    paired, level = _paired(step, NEAR)
    row = block_of(lax.iota(jnp.int32, CHUNK), level)
    row = jnp.where(rows & (row & paired == paired), row ^ paired, -1)
    return per_row(row, CHUNK) == per_column(block_of(line_smem[...], level), CHUNK)


def _paired(step: Index, near: int) -> tuple[jax.Array, jax.Array]:
    """The first two arguments of `paired_blocks`."""
    paired = jnp.where((step == 0) | (step > LEVELS), 0, 1)
    level = jnp.where(step == 0, near, jnp.maximum(LEVELS - step, 0))
    return paired, level


def stack_matrices(dtype: DTypeLike, *matrices: np.ndarray) -> jax.Array:
    """[len(matrices), C, C]: float16 to sum log2 decays, bfloat16 for the adjoint."""
    return jnp.asarray(np.stack(matrices) / (GATE_SCALE if dtype == F16 else 1.0), dtype)


class DecaySumMatrix:
    """One warpgroup's stream of 0/1 matrices: one in shared memory, or on its way there."""

    def __init__(self, matrices_gmem: Gmem, matrix_smem: Smem, barrier: Barrier):
        self.matrices_gmem = matrices_gmem
        self.matrix_smem = matrix_smem
        self.barrier = barrier

    def prefetch(self, step: Index) -> None:
        """Starts the copy of a matrix; nothing may still read the last one."""
        plgpu.copy_gmem_to_smem(self.matrices_gmem.at[step], self.matrix_smem, self.barrier)

    def segment_sum(self, log2_decay_smem: Smem, transpose: bool = False) -> Reg:
        """[C, 64]: every token's sum; or its transpose, of a matrix that is its own transpose."""
        plgpu.barrier_wait(self.barrier)
        product = (self.matrix_smem, log2_decay_smem)
        if transpose:
            product = (transposed(log2_decay_smem), self.matrix_smem)
        return dot(zeros(CHUNK, CHUNK), product)

    def segment_sum_adjoint(self, acc: Reg, *parts_smem: Smem, transpose: bool = False) -> Reg:
        """acc + matrix^T @ (sum of parts); or its transpose."""
        plgpu.barrier_wait(self.barrier)
        if transpose:
            return dot(acc, *[(transposed(part), self.matrix_smem) for part in parts_smem])
        return dot(acc, *[(transposed(self.matrix_smem), part) for part in parts_smem])
