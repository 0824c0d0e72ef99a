"""What the warpgroup of a CTA of jfla_grads_kda_mma sees: operands, shared memory, and where things lie in it."""

from collections.abc import Callable
from typing import Any, NamedTuple

from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from jfla.pallas.common.chunk_index import TILE_K, ChunkIndex
from jfla.pallas.common.grads_tiles import DO, DV, V_NEW
from jfla.pallas.common.qk_tiles import QkgOperands, QkTiles
from jfla.pallas.context import interpreting
from jfla.pallas.mgpu.copies import store_from_layout
from jfla.pallas.mgpu.iota import iota_smem
from jfla.pallas.mgpu.mma import load
from jfla.pallas.mgpu.smem import BF16, F16, F32, tile_smem
from jfla.pallas.mgpu.types import Gmem, Index, MemorySpec, Reg, Smem
from jfla.pallas.mma.kda_blocks import ChunkDecays
from jfla.stages import ScanResults
from jfla.types import CHUNK

# Of SharedStorage.lines: squared norms of q and k, two lines; log2_bias, where there is a gate; resets, where sequences
# are packed; do . v_new and dv . v_new of every token, two lines; of a row the least sum of log2 decays since its block
# began; what the states give to dg of every token.
SQUARE_NORMS, LOG2_BIAS, RESETS, DIAGONALS, LEAST, DG_CHUNK, NUM_LINES = (
    0,
    2,
    3,
    4,
    6,
    7,
    8,
)
LEAST_OF_ALL = DG_CHUNK  # which has been read by then
HIGH, LOW = range(2)  # the two bf16 parts of a number


class GradsKdaInputs(NamedTuple):
    """Global memory that the kernel reads."""

    qkg: QkgOperands
    scans: ScanResults
    zero: Gmem  # of `zero_operand`


class SharedStorage(NamedTuple):
    """Shared memory of a CTA: tiles [C, 64] of 16 bits, vectors float32."""

    values: Smem  # [3] tiles: 64 columns of V of do, dv, v_new; then q and k as rows of a pass, and k as its columns
    states_or_z: tuple[Smem, Smem]  # in one place, see the properties `states` and `z`
    q: Smem  # [1] tile
    k: Smem  # [1] tile
    weights: Smem  # [2, 2] tiles: W_q and W_k in two parts
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
    def states(self) -> Smem:
        """[2] tiles: 64 rows, of V, of S^T and dS^T; then the two parts of a summand of dg."""
        return self.smem.states_or_z[0]

    @property
    def z(self) -> Smem:
        """[C, 64] float32: the summands of dg whose decays reach from or to a token of the chunk."""
        return self.smem.states_or_z[1].at[self.zero]

    @property
    def parts(self) -> tuple[Smem, Smem]:
        """Two tiles, in the place of the states."""
        return self.states.at[self.zero + HIGH], self.states.at[self.zero + LOW]

    def rows_of(self, which: Index) -> Smem:
        """q or k with the factors of rows in a pass."""
        return self.smem.values.at[self.zero + DO + which]

    def weights(self, which: Index) -> tuple[Smem, Smem]:
        """Both parts of W_q or W_k."""
        weights = self.smem.weights.at[self.zero + which]
        return weights.at[HIGH], weights.at[LOW]

    @property
    def rows(self) -> tuple[Smem, Smem]:
        """q and k with the factors of rows in a pass: the place of do and dv."""
        return self.smem.values.at[self.zero + DO], self.smem.values.at[self.zero + DV]

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
        return self.smem.values.at[self.zero + V_NEW]


def shared_storage() -> SharedStorage:
    def tiles(*lead: int, dtype: DTypeLike = BF16) -> MemorySpec:
        return tile_smem(*lead, CHUNK, TILE_K, dtype=dtype)

    def vectors(*shape: int) -> MemorySpec:
        return plgpu.SMEM(shape, F32)

    states_or_z: MemorySpec = (tiles(2), vectors(1, CHUNK, TILE_K))
    if not interpreting():  # its race detector cannot tell the two apart
        states_or_z = plgpu.RefUnion(*states_or_z)
    return SharedStorage(
        values=tiles(3),
        states_or_z=states_or_z,
        q=tiles(1),
        k=tiles(1),
        weights=tiles(2, 2),
        decay=tiles(1, dtype=F16),
        lines=vectors(NUM_LINES, 1, CHUNK),
        iota=iota_smem(1, CHUNK),
    )
