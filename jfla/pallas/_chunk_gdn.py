"""What one warpgroup sees of a chunk whose gradients GDN makes: tiles, barriers, copies, and the other warpgroup."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jfla._types import CHUNK
from jfla.pallas._ends import Ends
from jfla.pallas._keys import BLOCK, KeyOptions
from jfla.pallas._operands import Place
from jfla.pallas._tile import F32, ROWS, SHARED_MEMORY, number_buffer, per_row, tile_buffer
from jfla.pallas._work import Turn
from jfla.pallas.prepare_gdn import NORMS

COMPUTING = 2  # warpgroups
DO, DV, V_NEW = range(3)
STATE, DSTATE = range(2)
STAGES = 3  # blocks of V in flight, at most


class Sources(NamedTuple):
    """Device memory: q and k as the caller passed them, what the scans left, and what prepare_gdn knows of tokens."""

    q: Any  # [B, T, H, K]
    k: Any
    ends: Ends
    factors: Any  # [B, HV, N, 4, C]
    known: Any  # [B, HV, N, 1 or 3, C]
    later: Any  # a Stretch's, or None


class Tiles(NamedTuple):
    """Shared memory. Tiles are [C, 64], vectors [C]; `blocks` counts 64 channels."""

    ends: Any  # [stages, 2, blocks] tiles: 64 rows of S^T and of dS^T
    values: Any  # [stages, 3] tiles: do, dv, v_new
    keys: Any  # [2, blocks] tiles: q and k; then dq and dk
    weights: Any  # [2] tiles: W_q without its diagonal, and W_k
    factors: Any  # [4] vectors
    known: Any  # [1 or 3] vectors
    diagonal: Any  # [2] vectors: do . v_new and dv . v_new
    along: Any  # [2, blocks] vectors: what of dq and dk lies along q and k (qk_norm)
    numbers: Any  # [2, C]: see `index`
    meeting: Any  # [3, blocks] vectors: x . dx of the decays up to a token; after it; of the whole chunk


class Barriers(NamedTuple):
    full: Any  # [stages]
    empty: Any
    keys: Any  # q, k and what belongs to tokens are there
    done: Any  # and may be replaced
    met: Any


class Shape(NamedTuple):
    """Static. `parts`: of K, 128 channels each, which lie like heads of their own in the order of work."""

    heads: int
    blocks: int
    parts: int
    value_blocks: int
    stages: int
    options: KeyOptions


class Chunk(NamedTuple):
    """One warpgroup at one chunk and part of K."""

    me: Any
    turn: Turn
    shape: Shape
    source: Sources
    s: Tiles
    barriers: Barriers

    @property
    def near(self) -> Place:
        """Of what the scans left of a stretch."""
        place = self.turn.place
        return place._replace(head=lax.div(place.head, jnp.int32(self.shape.parts)))

    @property
    def place(self) -> Place:
        """Of everything else."""
        if self.source.later is None:
            return self.near
        all_chunks, here = self.source.factors.shape[2], self.source.ends.states.shape[2]
        return self.near._replace(chunk=self.turn.place.chunk + all_chunks - (self.source.later[0] + 1) * here)

    @property
    def part(self) -> Any:
        return lax.rem(self.turn.place.head, jnp.int32(self.shape.parts))

    def columns(self, block: Any) -> Any:
        return pl.ds((self.part * self.shape.blocks + block) * BLOCK, BLOCK)

    def slot(self, n: Any) -> tuple[Any, Any]:
        """(number among all of this program's blocks of V, slot) of the chunk's block n."""
        count = self.turn.number * self.shape.value_blocks + n
        return count, lax.rem(count, jnp.int32(self.shape.stages))

    def at(self, n: int) -> Any:
        return self.turn.zero + n  # `dot` cannot close over a reference that a Python int indexed

    @property
    def block(self) -> Any:
        """This warpgroup's channels; with one block both have the same, and the first keeps its results."""
        return self.me if self.shape.blocks == COMPUTING else self.turn.zero

    def meet(self) -> None:
        """Waits for the other warpgroup."""
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.barriers.met)
        plgpu.barrier_wait(self.barriers.met)

    @property
    def numbers(self) -> Any:
        return self.s.numbers.at[self.me]

    def factor(self, which: int) -> jax.Array:
        """[C, 64]: one of prepare_gdn's factors of rows."""
        return per_row(plgpu.load(self.s.factors.at[which], layout=ROWS), BLOCK)

    def norm(self, which: Any) -> jax.Array:
        """[C]: 1 / norm of q or k."""
        return plgpu.load(self.s.known.at[NORMS + which], layout=ROWS)

    def fetch(self) -> None:
        """Issues the copies of a chunk, each as soon as there is room."""
        for n in range(self.shape.value_blocks):
            count, slot = self.slot(n)
            pl.when(count >= self.shape.stages)(lambda slot=slot: plgpu.barrier_wait(self.barriers.empty.at[slot]))
            self.fetch_block(n, slot)
        pl.when(self.turn.number > 0)(lambda: plgpu.barrier_wait(self.barriers.done))
        place, s = self.place, self.s
        views = [(place.tile(self.source.factors), s.factors), (place.tile(self.source.known), s.known)]
        for which, source in enumerate((self.source.q, self.source.k)):
            for b in range(self.shape.blocks):
                views.append((place.rows(source, self.shape.heads, self.columns(b)), s.keys.at[which, b]))
        for source, target in views:
            plgpu.copy_gmem_to_smem(source, target, self.barriers.keys)

    def fetch_block(self, n: int, slot: Any) -> None:
        rows, ends = pl.ds(n * BLOCK, BLOCK), self.source.ends
        views = [
            (place.rows(source, self.shape.heads, rows), self.s.values.at[slot, which])
            for which, place, source in (
                (DO, self.place, ends.do),
                (DV, self.place, ends.dv),
                (V_NEW, self.near, ends.v_new),
            )
        ]
        for which, source in ((STATE, ends.states), (DSTATE, ends.dends)):
            for b in range(self.shape.blocks):
                views.append((self.near.tile(source).at[rows, self.columns(b)], self.s.ends.at[slot, which, b]))
        for source, target in views:
            plgpu.copy_gmem_to_smem(source, target, self.barriers.full.at[slot])


def buffers(blocks: int, known: int) -> tuple[int, Tiles]:
    """The blocks of V in flight, as there is room for, and everything in shared memory."""
    vectors = lambda *lead: plgpu.SMEM((*lead, CHUNK), F32)
    tile, rest = 2 * CHUNK * BLOCK, 4 * CHUNK * (4 + known + 2 + 2 * blocks + COMPUTING + 3 * blocks)
    stages = min(STAGES, (SHARED_MEMORY - rest - (2 * blocks + 2) * tile) // ((2 * blocks + 3) * tile))
    return stages, Tiles(
        ends=tile_buffer(stages, 2, blocks, CHUNK, BLOCK),
        values=tile_buffer(stages, 3, CHUNK, BLOCK),
        keys=tile_buffer(2, blocks, CHUNK, BLOCK),
        weights=tile_buffer(2, CHUNK, BLOCK),
        factors=vectors(4),
        known=vectors(known),
        diagonal=vectors(2),
        along=vectors(2, blocks),
        numbers=number_buffer(COMPUTING),
        meeting=vectors(3, blocks),
    )


def barriers(blocks: int, stages: int) -> Barriers:
    return Barriers(
        full=plgpu.Barrier(num_arrivals=3 + 2 * blocks, num_barriers=stages),
        empty=plgpu.Barrier(num_arrivals=COMPUTING, num_barriers=stages),
        keys=plgpu.Barrier(num_arrivals=2 + 2 * blocks),
        done=plgpu.Barrier(num_arrivals=COMPUTING),
        met=plgpu.Barrier(num_arrivals=COMPUTING),
    )
