"""What the warpgroup of a CTA of jfla_grads_kda_mma sees: operands, shared memory, and where things lie in it."""

from collections.abc import Callable
from typing import Any, NamedTuple

from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from jfla.pallas.common.chunk_index import TILE_K, ChunkIndex
from jfla.pallas.common.grads_tiles import DO, DV, V_NEW
from jfla.pallas.common.qk_tiles import QkgOperands, QkTiles
from jfla.pallas.mgpu.copies import store_from_layout
from jfla.pallas.mgpu.iota import iota_smem
from jfla.pallas.mgpu.mma import load
from jfla.pallas.mgpu.smem import BF16, F16, F32, in_one_place, tile_smem
from jfla.pallas.mgpu.types import Gmem, Index, MemorySpec, Reg, Smem
from jfla.pallas.mma.kda_blocks import ChunkDecays
from jfla.stages import ScanResults
from jfla.types import CHUNK

# Of SharedStorage.lines
SQUARE_NORMS = 0  # of q and of k
LOG2_BIAS = 2  # where there is a gate
RESETS = 3  # where sequences are packed
DIAGONALS = 4  # do . v_new and dv . v_new of every token
LEAST = 6  # of a row the least sum of log2 decays since its block began
DG_CHUNK = 7  # what the states give to dg of every token
NUM_LINES = 8
LEAST_OF_ALL = DG_CHUNK  # which has been read by then
HIGH, LOW = range(2)  # the two bf16 parts of a number


class GradsKdaInputs(NamedTuple):
    """Global memory that the kernel reads."""

    qkg: QkgOperands
    scans: ScanResults
    zero: Gmem  # of `zero_operand`


class SharedStorage(NamedTuple):
    """Shared memory of a CTA: tiles [C, 64] in the dtype of q unless said otherwise, vectors float32.

    Buffers of a tuple lie in one place: see the properties of `GradsKdaCta`.
    """

    values_or_factors: tuple[Smem, Smem]
    states_or_z: tuple[Smem, Smem, Smem]
    q: Smem  # [1] tile
    k: Smem  # [1] tile
    weights: Smem  # [2, 2] bf16 tiles: W_q and W_k in two parts
    # [1] float16 tile: log2 decays of the tile of channels, times GATE_SCALE
    decay: Smem
    lines: Smem  # [NUM_LINES, 1, 64]: vectors, in one buffer because each begins at a multiple of 1 KiB
    iota: Smem  # [1, C] int32


class GradsKdaCta(NamedTuple):
    """What the warpgroup of a CTA sees of its chunk."""

    qk: QkTiles
    gmem: GradsKdaInputs
    smem: SharedStorage
    zero: Index

    @property
    def index(self) -> ChunkIndex:
        return self.qk.index

    @property
    def decays(self) -> ChunkDecays:
        return ChunkDecays(
            self.smem.decay.at[self.zero], self.smem.iota.at[self.zero], self.zero
        )

    def with_later_zero(self, zero: Index) -> "GradsKdaCta":
        """The same with addresses in global memory that are computed anew, not kept since the last ones."""
        index = self.qk.index
        qk = self.qk._replace(index=index._replace(chunk=index.chunk + zero))
        return self._replace(qk=qk, zero=zero)

    def line(self, number: int) -> Smem:
        """[64]: of `SharedStorage.lines`."""
        return self.smem.lines.at[number, 0]

    @property
    def log2_bias(self) -> Smem:
        return None if self.qk.options.no_gate else self.line(LOG2_BIAS)

    @property
    def resets(self) -> Smem:
        return None if self.gmem.qkg.resets is None else self.line(RESETS)

    def add_to_z(self, x: Reg) -> None:
        """Adds to z in shared memory: registers have no room for it beside dq and dk."""
        store_from_layout(self.z, load(self.z) + x)

    @property
    def values(self) -> Smem:
        """[3] tiles: 64 columns of V of do, dv, v_new."""
        return self.smem.values_or_factors[0]

    @property
    def states(self) -> Smem:
        """[2] tiles: 64 rows, of V, of S^T and dS^T."""
        return self.smem.states_or_z[0]

    @property
    def z(self) -> Smem:
        """[C, 64] float32: the summands of dg whose decays reach from or to a token of the chunk."""
        return self.smem.states_or_z[2].at[self.zero]

    @property
    def parts(self) -> tuple[Smem, Smem]:
        """Two bf16 tiles: the two parts of a summand of dg, in the place of the states and of z."""
        tiles = self.smem.states_or_z[1]
        return tiles.at[self.zero + HIGH], tiles.at[self.zero + LOW]

    def factor_tile(self, which: Index) -> Smem:
        """A bf16 tile of q or k with factors of pairs, in the place of the values."""
        return self.smem.values_or_factors[1].at[self.zero + which]

    def rows_of(self, which: Index) -> Smem:
        """q or k with the factors of rows in a pass."""
        return self.factor_tile(DO + which)

    def weights(self, which: Index) -> tuple[Smem, Smem]:
        """Both parts of W_q or W_k."""
        weights = self.smem.weights.at[self.zero + which]
        return weights.at[HIGH], weights.at[LOW]

    @property
    def rows(self) -> tuple[Smem, Smem]:
        """q and k with the factors of rows in a pass: the place of do and dv."""
        return self.factor_tile(DO), self.factor_tile(DV)

    @property
    def columns(self) -> Index:
        """Where the CTA's channels lie among all."""
        return self.qk.columns(0)

    def for_own_rows(self, ref_gmem: Gmem, use: Callable[[Gmem], Any]) -> Any:
        """`use` of the CTA's channels of an array [B, T, heads, K] that the kernel writes."""
        return self.index.for_rows(ref_gmem, self.qk.value_heads, self.columns, use)

    @property
    def k_columns(self) -> Smem:
        """k with the factors of columns in a pass: the place of v_new."""
        return self.factor_tile(V_NEW)


def shared_storage(own: DTypeLike) -> SharedStorage:
    """On the host, for q, k and values in a dtype."""

    def tiles(*lead: int, dtype: DTypeLike = own) -> MemorySpec:
        return tile_smem(*lead, CHUNK, TILE_K, dtype=dtype)

    def vectors(*shape: int) -> MemorySpec:
        return plgpu.SMEM(shape, F32)

    return SharedStorage(
        values_or_factors=in_one_place(tiles(3), tiles(3, dtype=BF16)),
        states_or_z=in_one_place(
            tiles(2), tiles(2, dtype=BF16), vectors(1, CHUNK, TILE_K)
        ),
        q=tiles(1),
        k=tiles(1),
        weights=tiles(2, 2, dtype=BF16),
        decay=tiles(1, dtype=F16),
        lines=vectors(NUM_LINES, 1, CHUNK),
        iota=iota_smem(1, CHUNK),
    )
