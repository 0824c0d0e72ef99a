"""What a warpgroup of jfla_intra_gdn sees: the spec, global memory, shared storage, barriers.

From shapes to allocations, and in the kernel to each warpgroup's own parts of them.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from jfla.pallas.common.chunk_index import TILE_K, ChunkGrid, ChunkIndex
from jfla.pallas.common.packed_rows import INPUTS, Rows, places_of
from jfla.pallas.common.qk_tiles import QkOptions, QkTiles
from jfla.pallas.common.results import RingChunks
from jfla.pallas.machine import on_hopper
from jfla.pallas.mgpu.opaque import opaque_zero
from jfla.pallas.mgpu.scheduler import WorkTile
from jfla.pallas.mgpu.smem import F16, F32, in_one_place, tile_smem
from jfla.pallas.mgpu.types import Barrier, Gmem, Index, MemorySpec, Smem
from jfla.stages import (
    IntraChunk,
)
from jfla.types import CHUNK

# Rows of token_inputs.
LOG2_DECAY, BETA = range(2)
NUM_TOKEN_INPUTS = 2

# Rows of token_scalars.
LOG2_CUM = 0  # sum of log2 decay from the chunk's start to the token
INV_NORMS = 1  # 1 / norm of q, and in the next row of k; only under qk_norm


class IntraGdnConfig(NamedTuple):
    """How the chunks are spread: persistent warpgroups of a CTA, and CTAs at most."""

    wgs_per_cta: int
    max_ctas: int
    ring: RingChunks


class IntraGdnSpec(NamedTuple):
    """Static."""

    options: QkOptions
    grid: ChunkGrid
    num_tiles: int  # of 64 channels of K
    wgs_per_cta: int
    dtype: DTypeLike  # of q, k and the A matrices: bfloat16 or float16

    @property
    def num_token_scalars(self) -> int:
        return 1 + 2 * self.options.qk_norm


class IntraGdnInputs(NamedTuple):
    """Global memory that the kernel reads."""

    q: Gmem  # [B, T, H, K] bfloat16 or float16
    k: Gmem  # [B, T, H, K] the same
    token_inputs: Gmem  # [B, HV, N, NUM_TOKEN_INPUTS, C] float32: see LOG2_DECAY


class IntraGdnOutputs(NamedTuple):
    """Global memory that the kernel writes."""

    factors: Gmem  # [B, HV, N, 4, C] float32: see `FactoredQK`
    token_scalars: Gmem  # [B, HV, N, 1 or 3, C] float32: see LOG2_CUM
    intra: IntraChunk


class TokenVectors(NamedTuple):
    """Shared memory: vectors [C] float32. All warpgroups' have a leading axis."""

    token_inputs: Smem  # [NUM_TOKEN_INPUTS, C]
    token_scalars: Smem  # [1 or 3, C]
    beta_scaling: Smem  # [2, C]
    norm_scaling: Smem  # [2, C]: the same over the norms of k, under qk_norm
    factors: Smem  # [4, C]


class SharedStorage(NamedTuple):
    """Shared memory of a CTA. `q` and `k` are pairs (tiles in their dtype, float16 tiles): see `_qk_smem`."""

    q: Smem
    k: Smem
    vectors: TokenVectors
    # [wgs] int32: of the rows that the warpgroup copies next, where they are packed
    places: Smem


class Barriers(NamedTuple):
    """Mbarriers of a CTA."""

    loaded: Barrier  # [wgs]: the chunk of that warpgroup is in shared memory


class IntraGdnWarpgroup(NamedTuple):
    """What one warpgroup sees of the chunk that it works on: its own parts of shared memory."""

    spec: IntraGdnSpec
    smem: SharedStorage
    barriers: Barrier  # Barriers, or None without TMA
    wg: Index
    work: WorkTile
    places: Gmem  # `places_of` q

    def anew(self) -> "IntraGdnWarpgroup":
        """The same chunk, with addresses and indices computed again: kept, each would hold a register."""
        return self._replace(work=self.work._replace(zero=opaque_zero()))

    @property
    def index(self) -> ChunkIndex:
        index = self.spec.grid(self.work.tile_index + self.work.zero, self.places)
        if self.smem.places is None:
            return index
        return index._replace(place_ahead=lambda: self.smem.places[self._row])

    def next_place(self) -> Index | None:
        """Of the next chunk, from global memory; of this one if it is the last."""
        index = self.spec.grid(self.work.next_or_last_index, self.places)
        return index.read_place(INPUTS)

    def keep_place(self, place: Index | None) -> None:
        """Writes the place of the next chunk to shared memory, where the copies of that chunk find it."""
        if place is not None:
            self.smem.places[self._row] = place

    @property
    def vectors(self) -> TokenVectors:
        own = [None if x is None else x.at[self._row] for x in self.smem.vectors]
        return TokenVectors(*own)

    @property
    def qk(self) -> QkTiles:
        return QkTiles(
            options=self.spec.options,
            index=self.index,
            value_heads=self.spec.grid.heads,
            num_tiles=self.spec.num_tiles,
            q=self._own_tiles(self.smem.q)[0],
            k=self._own_tiles(self.smem.k)[0],
            square_norms=None,
        )

    def tiles(self, which: int) -> list[Smem]:
        """Of q or k. By traced numbers: `dot` cannot close over a reference that a Python int indexed."""
        tiles = self._own_tiles((self.smem.q, self.smem.k)[which])[0]
        return [tiles.at[self.work.zero + n] for n in range(self.spec.num_tiles)]

    @property
    def lower(self) -> Smem:
        """[C, C] float16: the matrix to invert."""
        return self._own_tiles(self.smem.q)[1]

    @property
    def scratch(self) -> Smem:
        """[C, C] float16: of the inverse."""
        return self._own_tiles(self.smem.k)[1]

    @property
    def _row(self) -> Index:
        return self.wg + self.work.zero

    def _own_tiles(self, tiles_smem: Smem) -> tuple[Smem, Smem]:
        """The tiles of q or of k, and the last float16 tile."""
        own_tiles, f16_tiles = tiles_smem
        last_tile = self.work.zero + self.spec.num_tiles - 1
        return own_tiles.at[self._row], f16_tiles.at[self._row, last_tile]

    def opaque_index(self, n: int) -> Index:
        """n, as a traced value: `dot` cannot close over a reference that a Python int indexed."""
        return self.work.zero + n


def intra_gdn_spec(
    q: Rows,
    inputs_shape: tuple[int, ...],
    options: QkOptions,
    config: IntraGdnConfig,
) -> IntraGdnSpec:
    batch, heads, n_chunks, *_ = inputs_shape
    return IntraGdnSpec(
        options=options,
        grid=ChunkGrid(batch, heads, n_chunks, config.ring.sequences_per_group),
        num_tiles=q.shape[-1] // TILE_K,
        wgs_per_cta=config.wgs_per_cta,
        dtype=q.dtype,
    )


def output_shapes(spec: IntraGdnSpec, ring: RingChunks) -> IntraGdnOutputs:
    def per_chunk(rows: int, dtype: DTypeLike, ring_chunks: int = 0) -> Gmem:
        lead = spec.grid.ring_shape(ring_chunks)
        return jax.ShapeDtypeStruct((*lead, rows, CHUNK), dtype)

    square = per_chunk(CHUNK, spec.dtype, ring.intra)
    return IntraGdnOutputs(
        factors=per_chunk(4, F32),
        token_scalars=per_chunk(spec.num_token_scalars, F32),
        intra=IntraChunk(square, square),
    )


def intra_gdn_storage(spec: IntraGdnSpec, q: Rows) -> SharedStorage:
    def vectors(*rows: int) -> MemorySpec:
        return plgpu.SMEM((spec.wgs_per_cta, *rows, CHUNK), F32)

    return SharedStorage(
        q=_qk_smem(spec),
        k=_qk_smem(spec),
        vectors=TokenVectors(
            token_inputs=vectors(NUM_TOKEN_INPUTS),
            token_scalars=vectors(spec.num_token_scalars),
            beta_scaling=vectors(2),
            norm_scaling=vectors(2) if spec.options.qk_norm else None,
            factors=vectors(4),
        ),
        places=None
        if places_of(q) is None
        else plgpu.SMEM((spec.wgs_per_cta,), jnp.int32),
    )


def _qk_smem(spec: IntraGdnSpec) -> MemorySpec:
    """All warpgroups' tiles of q or of k, and as many float16 ones; each uses its last.

    With more than one tile the two share their memory: the inverse is computed when the dots have
    read q and k. With one tile they lie apart, because a_qk and a_inv are staged in it.
    """
    shape = (spec.wgs_per_cta, spec.num_tiles, CHUNK, TILE_K)
    own_tiles = tile_smem(*shape, dtype=spec.dtype)
    f16_tiles = tile_smem(*shape, dtype=F16)
    if spec.num_tiles > 1:
        return in_one_place(own_tiles, f16_tiles)
    return own_tiles, f16_tiles


def intra_gdn_barriers(spec: IntraGdnSpec) -> Barriers | None:
    if not on_hopper():
        return None
    copies_of_qk = 2 * spec.num_tiles
    return Barriers(
        loaded=plgpu.Barrier(
            num_arrivals=1 + copies_of_qk, num_barriers=spec.wgs_per_cta
        ),
    )
