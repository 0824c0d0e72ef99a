"""What one warpgroup sees of a chunk that KDA prepares: tiles, barriers, copies, and the other warpgroup."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jfla._types import CHUNK
from jfla.pallas import _patterns
from jfla.pallas._jobs import Handover
from jfla.pallas._keys import BLOCK, K, KeyArrays, KeyOptions, Keys, Q
from jfla.pallas._operands import Place
from jfla.pallas._tile import BF16, F16, F32, dot, number_buffer, tile_buffer, transposed, write_roots, zeros
from jfla.pallas._work import Turn

WARPGROUPS = 3
START = (_patterns.BEFORE, _patterns.AFTER)
STRONG = (*_patterns.PAIRS, np.zeros((CHUNK, CHUNK), bool))  # last a token with itself


class PrepareArrays(NamedTuple):
    """What the kernel reads."""

    keys: KeyArrays
    beta: Any  # [B, HV, N, 1, C], or None where the pairs are known
    patterns: Any  # START; and STRONG, for the pairs


class Tiles(NamedTuple):
    """Shared memory. Tiles are [C, 64], one per block of 64 channels where there are blocks."""

    starts: Any  # the patterns of START, float16
    rows: Any  # [2 chunks, 2, blocks]: q and k, raw and then decayed
    raw: Any  # [blocks]: g as the caller passed it
    norms: Any  # [2, blocks, C]
    g: Any  # [blocks], float16
    decayed: Any  # [1, or 3 with pairs, blocks]: k_out; k as columns of pairs; of the third, a_qk in the first tile
    decay: Any  # [blocks, 64]
    lowest: Any  # [blocks, C]: the strongest sum of decays from the chunk's start to a token
    near: Any  # [blocks, C]: the same from the start of its block of 16
    bias: Any  # [2 chunks, blocks, 64]
    resets: Any  # [2 chunks, blocks, C]
    pattern: Any  # one float16 tile of STRONG
    lower: Any  # one float16 tile, what is inverted
    work: Any  # one float16 tile
    inverse: Any  # one tile
    roots: Any  # [2, 2, C]: beta's, for the second and the third warpgroup
    numbers: Any  # [3, C]: see `index`


class Barriers(NamedTuple):
    started: Any
    loaded: Any  # [2 warpgroups * 2 chunks]
    raw: Any  # [2 warpgroups]
    beta: Any  # [2]
    met: Any
    again: Any  # q and k once more
    pattern: Any
    handed: Any  # what is inverted is there
    taken: Any  # and may be replaced


class Team(NamedTuple):
    """One warpgroup at one chunk."""

    me: Any
    turn: Turn
    keys: Keys
    arrays: PrepareArrays
    s: Tiles
    barriers: Barriers
    handover: Handover

    def all(self, tiles: Any) -> list[Any]:
        """Every block's tile; traced numbers, because `dot` cannot close over a reference that a Python int indexed."""
        return [tiles.at[self.turn.zero + b] for b in range(self.keys.blocks)]

    @property
    def rows(self) -> Any:
        """This warpgroup's rows, q or k, by blocks."""
        return self.s.rows.at[self.turn.number & 1, self.me]

    @property
    def columns(self) -> Any:
        """k as the rows meet it, by blocks."""
        return self.s.decayed.at[self.turn.zero + 1]

    @property
    def numbers(self) -> Any:
        return self.s.numbers.at[self.me]

    def products(self, rows: Any, columns: Any) -> jax.Array:
        """[C, C]: rows @ columns^T, over all blocks."""
        return dot(zeros(CHUNK, CHUNK), *[(a, transposed(b)) for a, b in zip(self.all(rows), self.all(columns))])

    def anew(self, zero: Any) -> "Team":
        """The same, of which the compiler knows nothing yet.

        It would compute what both need once, before a loop that few chunks enter, and keep it in registers meanwhile.
        """
        chunk = self.keys.place.chunk + zero
        slot, rows = self.turn.number & 1, self.s.rows
        keys = self.keys._replace(
            place=self.keys.place._replace(chunk=chunk), q=rows.at[slot, zero], k=rows.at[slot, zero + 1]
        )
        return self._replace(me=self.me + zero, turn=self.turn._replace(zero=zero), keys=keys)

    def meet(self) -> None:
        """Of the two warpgroups that share the chunk."""
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.barriers.met)
        plgpu.barrier_wait(self.barriers.met)

    def channels(self, body: Callable[[], None]) -> None:
        """Runs `body` in the warpgroups that have channels."""
        if self.keys.blocks == 2:
            body()
        else:
            pl.when(self.me == 0)(body)

    def fetch(self, place: Place, number: Any) -> None:
        """q and k of this warpgroup's channels, into the slot of that chunk."""
        b, slot = self.me, number & 1
        barrier, columns = self.barriers.loaded.at[2 * b + slot], pl.ds(b * BLOCK, BLOCK)
        for which, source in ((Q, self.arrays.keys.q), (K, self.arrays.keys.k)):
            view = place.rows(source, self.keys.value_heads, columns)
            plgpu.copy_gmem_to_smem(view, self.s.rows.at[slot, which, b], barrier)
        if self.s.bias is not None:
            plgpu.copy_gmem_to_smem(self.arrays.keys.bias.at[place.head, columns], self.s.bias.at[slot, b], barrier)
        if self.s.resets is not None:
            resets = self.arrays.keys.resets.at[place.batch, place.tokens]
            plgpu.copy_gmem_to_smem(resets, self.s.resets.at[slot, b], barrier)

    def fetch_pattern(self, i: Any) -> None:
        source, target = self.arrays.patterns.at[len(START) + i], self.s.pattern.at[self.turn.zero]
        plgpu.copy_gmem_to_smem(source, target, self.barriers.pattern)

    def fetch_again(self) -> None:
        """q and k of this warpgroup's channels, in whose place is what was made of them; and the first pattern."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        self.meet()  # nobody reads the tiles any more
        self.channels(lambda: self.keys.fetch(self.me, self.arrays.keys.q, self.arrays.keys.k, self.barriers.again))
        pl.when(self.me == 1)(lambda: self.fetch_pattern(0))
        plgpu.barrier_wait(self.barriers.again)

    def fetch_gate(self, place: Place) -> None:
        view = place.rows(self.arrays.keys.g, self.keys.value_heads, pl.ds(self.me * BLOCK, BLOCK))
        plgpu.copy_gmem_to_smem(view, self.s.raw.at[self.me], self.barriers.raw.at[self.me])

    def fetch_beta(self) -> None:
        """For the warpgroups 1 and 2."""
        place, which = self.keys.place, self.me - 1
        source, target = place.tile(self.arrays.beta), self.s.roots.at[which]
        plgpu.copy_gmem_to_smem(source.at[0], target.at[0], self.barriers.beta.at[which])

    def roots(self, which: int) -> Any:
        """The same warpgroup's, from beta once it has arrived, in whose place they are written."""
        plgpu.barrier_wait(self.barriers.beta.at[which])
        roots = self.s.roots.at[self.turn.zero + which]
        write_roots(roots.at[0], roots)
        return roots


def buffers(x: KeyArrays, options: KeyOptions, blocks: int, with_pairs: bool) -> Tiles:
    tiles = lambda *shape, dtype=BF16: tile_buffer(*shape, CHUNK, BLOCK, dtype=dtype)
    vectors = lambda *shape: plgpu.SMEM((*shape, CHUNK), F32)
    return Tiles(
        starts=tiles(len(START), dtype=F16),
        rows=tiles(2, 2, blocks),
        raw=tiles(blocks, dtype=x.g.dtype),
        norms=vectors(2, blocks),
        g=tiles(blocks, dtype=F16),
        decayed=tiles(3 if with_pairs else 1, blocks),
        decay=vectors(blocks),
        lowest=vectors(blocks),
        near=vectors(blocks) if with_pairs else None,
        bias=None if options.given else vectors(2, blocks),
        resets=vectors(2, blocks) if x.resets is not None else None,
        pattern=tiles(1, dtype=F16) if with_pairs else None,
        lower=tiles(1, dtype=F16) if with_pairs else None,
        work=tiles(1, dtype=F16) if with_pairs else None,
        inverse=tiles(1) if with_pairs else None,
        roots=vectors(2, 2) if with_pairs else None,
        numbers=number_buffer(WARPGROUPS),
    )


def barriers(x: KeyArrays, options: KeyOptions, blocks: int) -> Barriers:
    return Barriers(
        started=plgpu.Barrier(num_arrivals=len(START)),
        loaded=plgpu.Barrier(num_arrivals=2 + (not options.given) + (x.resets is not None), num_barriers=4),
        raw=plgpu.Barrier(num_barriers=2),
        beta=plgpu.Barrier(num_barriers=2),
        met=plgpu.Barrier(num_arrivals=2),
        again=plgpu.Barrier(num_arrivals=2 * blocks),
        pattern=plgpu.Barrier(),
        handed=plgpu.Barrier(),
        taken=plgpu.Barrier(),
    )
