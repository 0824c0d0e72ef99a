"""The inverse of a unit lower triangular tile by doubling its blocks, on the tensor cores in float16.

    X <- X + X N' X      with the N' of the squares that join two diagonal blocks of X

starts from the diagonal and ends with (I - N)^-1. No power of N is formed, so it is as stable as substitution. float16
has 8 times the precision of bfloat16 at the same cost, and range enough: in a recurrence that does not blow up, the
entries of N and X are bounded by beta |k_i| |k_j|. Up to blocks of 16 every warp doubles its own: `block_inverse.py`.
"""

from typing import NamedTuple

from jfla.pallas.mgpu.block_inverse import (
    BLOCK_LEVELS,
    LEVELS,
    inverse_of_blocks,
    square_at,
)
from jfla.pallas.mgpu.copies import commit_smem, write
from jfla.pallas.mgpu.mma import dot, load, zeros
from jfla.pallas.mgpu.smem import F16
from jfla.pallas.mgpu.types import Reg, Smem

SIZE = 64


class TriangularInverse(NamedTuple):
    """Call it for (I - N)^-1 [64, 64] float32."""

    lower_smem: Smem  # float16 tile: N, of which what is below the diagonal is read; then scratch
    work_smem: Smem  # float16 tile

    def __call__(self) -> Reg:
        n = load(self.lower_smem)
        x = inverse_of_blocks(n)
        for level in range(BLOCK_LEVELS, LEVELS):
            x = self._double(x, square_at(n, level))
        return x

    def _double(self, x: Reg, square: Reg) -> Reg:
        x16 = x.astype(F16)
        # The tiles alternate: a commit of one lies between every warp's reads of the other and the next write to it.
        # Pallas' own store, not `write`: where four warpgroups have 128 registers each, the addresses of both stores
        # leave ptxas too few, and it serialises every wgmma of the kernel (C7512).
        self.work_smem[...] = x16
        commit_smem()
        right = dot(zeros(SIZE, SIZE), (square, self.work_smem)).astype(F16)
        write(self.lower_smem, right)
        commit_smem()
        return dot(x, (x16, self.lower_smem))
