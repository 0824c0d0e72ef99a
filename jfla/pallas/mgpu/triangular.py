"""The inverse of a unit lower triangular tile by doubling its blocks, on the tensor cores in float16.

    X <- X + X N' X      with the N' of the squares that join two diagonal blocks of X

starts from the diagonal and ends with (I - N)^-1. No power of N is formed, so it is as stable as substitution. float16
has 8 times the precision of bfloat16 at the same cost, and range enough: in a recurrence that does not blow up, the
entries of N and X are bounded by beta |k_i| |k_j|.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jfla.pallas.mgpu.copies import commit_smem
from jfla.pallas.mgpu.iota import iota2d, paired_blocks
from jfla.pallas.mgpu.mma import dot, load, zeros
from jfla.pallas.mgpu.smem import F16, F32, tile_smem
from jfla.pallas.mgpu.types import Index, MemorySpec, Reg, Smem

SIZE = 64
LEVELS = 6  # doublings, from blocks of 1 to a block of 64


def masks_smem() -> MemorySpec:
    """Shared memory for `write_masks`: the diagonal, then per level the squares that join two blocks."""
    return tile_smem(1 + LEVELS, SIZE, SIZE, dtype=F16)


def write_masks(masks_smem: Smem, line_smem: Smem, wg: Index, num_wgs: int) -> None:
    """One warpgroup's share of the masks."""

    @pl.loop(0, -(-(1 + LEVELS) // num_wgs))
    def _(n: Index) -> None:
        i = n * num_wgs + wg

        @pl.when(i <= LEVELS)
        def _():
            block = paired_blocks(jnp.minimum(i, 1), jnp.maximum(i - 1, 0), SIZE, line_smem)
            here = block & (iota2d(1, SIZE, line_smem) <= iota2d(0, SIZE))
            mask = jnp.where(here, 1.0 + zeros(SIZE, SIZE), zeros(SIZE, SIZE))
            masks_smem.at[i][...] = mask.astype(F16)

    commit_smem()


class TriangularInverse(NamedTuple):
    """Call it for (I - N)^-1 [64, 64] float32.

    With `masks_smem` of `write_masks` a square is cut out by one multiplication; without, the mask is computed for
    every element, in four times the instructions, and N must be 0 above the diagonal.
    """

    lower_smem: (
        Smem  # float16 tile: N, of which the diagonal is not read, and with masks nothing above it
    )
    work_smem: Smem  # float16 tile
    zero: Index  # opaque zero
    line_smem: Smem = None  # of `write_iota`; where there are no masks
    masks_smem: Smem = None

    def __call__(self) -> Reg:
        start = self._diagonal() + self._square(0).astype(F32)
        return lax.fori_loop(1, LEVELS, self._double, start)

    def _double(self, level: Index, x: Reg) -> Reg:
        x16 = x.astype(F16)
        self.work_smem[...] = x16
        commit_smem()
        right = dot(zeros(SIZE, SIZE), (self._square(level), self.work_smem)).astype(F16)
        self.work_smem[...] = right
        commit_smem()
        return dot(x, (x16, self.work_smem))

    def _square(self, level: Index) -> Reg:
        n = self.lower_smem[...]
        if self.masks_smem is not None:
            return n * load(self.masks_smem.at[level + 1 + self.zero])
        here = paired_blocks(1, level, SIZE, self.line_smem, self.zero * level)
        return jnp.where(here, n, zeros(SIZE, SIZE).astype(F16))

    def _diagonal(self) -> Reg:
        if self.masks_smem is not None:
            return load(self.masks_smem.at[self.zero]).astype(F32)
        same = iota2d(0, SIZE) == iota2d(1, SIZE, self.line_smem)
        return jnp.where(same, zeros(SIZE, SIZE) + 1.0, zeros(SIZE, SIZE))
