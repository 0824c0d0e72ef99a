"""A persistent tile scheduler: CTAs that stay on their multiprocessor and take tiles in a stride of the whole grid."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from jfla.pallas.mgpu.branches import when
from jfla.pallas.mgpu.opaque import opaque_zero
from jfla.pallas.mgpu.types import Index


class WorkTile(NamedTuple):
    """The tile that a warpgroup works on: tile_index = first + iteration * grid_stride.

    `zero` is an opaque zero (see `opaque.py`) that changes with every tile.
    """

    tile_index: Index
    iteration: Index
    zero: Index
    scheduler: "TileScheduler"
    # of the warpgroup's tiles, where the scheduler has a limit: `has_next` would keep that limit in a register
    count: Index | None = None

    @property
    def next_index(self) -> Index:
        return self.tile_index + self.scheduler.grid_stride

    @property
    def next_or_last_index(self) -> Index:
        """The next tile, or this one if it is the last: what is read ahead is of a tile that there is."""
        return jnp.where(self.has_next, self.next_index, self.tile_index)

    @property
    def previous_index(self) -> Index:
        return self.tile_index - self.scheduler.grid_stride

    @property
    def has_next(self) -> Index:
        if self.count is not None:
            return self.iteration + 1 < self.count
        return self.next_index < self.scheduler.end

    @property
    def has_previous(self) -> Index:
        return self.tile_index >= self.scheduler.grid_stride


class TileScheduler(NamedTuple):
    """`num_tiles` tiles over at most `max_ctas` CTAs, in each of which `wgs_per_cta` warpgroups take tiles alone.

    With a `limit`, known to the kernel alone, only so many of the tiles are taken.
    """

    num_tiles: int
    max_ctas: int
    wgs_per_cta: int = 1
    limit: Index | None = None

    @classmethod
    def one_for_each_cta(cls, num_tiles: int) -> "TileScheduler":
        """Of a kernel whose CTAs do not stay."""
        return cls(num_tiles, num_tiles)

    def up_to(self, limit: Index | None) -> "TileScheduler":
        """In the kernel: the same with a limit, or without one."""
        return self._replace(limit=limit)

    def if_any(self, cta: Index, wg: Index, run: Callable[[], None]) -> None:
        """`run()` if the warpgroup takes a tile."""
        if self.limit is None:
            run()
        else:
            when(self._first_index(cta, wg) < self.limit)(run)

    @property
    def end(self) -> Index:
        """The number of tiles that are taken."""
        return self.num_tiles if self.limit is None else self.limit

    @property
    def num_ctas(self) -> int:
        return min(self.max_ctas, -(-self.num_tiles // self.wgs_per_cta))

    @property
    def grid_stride(self) -> int:
        return self.num_ctas * self.wgs_per_cta

    def first(self, cta: Index, wg: Index = 0) -> WorkTile:
        """The first tile of a warpgroup, with a zero that is not opaque: for copies ahead of the loop."""
        return WorkTile(self._first_index(cta, wg), jnp.int32(0), jnp.int32(0), self)

    def tile_count(self, cta: Index, wg: Index = 0) -> Index:
        """How many tiles a warpgroup takes."""
        remaining = jnp.maximum(self.end - self._first_index(cta, wg), 0)
        return lax.div(remaining + (self.grid_stride - 1), jnp.int32(self.grid_stride))

    def for_each_tile(
        self,
        body: Callable[..., Any],
        cta: Index,
        wg: Index,
        carry: Any = None,
    ) -> Index:
        """Runs `body(tile)` on every tile of a warpgroup and returns the index of its last one.

        With a `carry`, which goes from tile to tile, it is `carry = body(tile, carry)`.
        """
        first = self._first_index(cta, wg)
        num_tiles = self.tile_count(cta, wg)

        def step(i: Index, carry: Any) -> Any:
            count = None if self.limit is None else num_tiles
            index = first + i * self.grid_stride
            tile = WorkTile(index, i, opaque_zero(), self, count)
            return body(tile) if carry is None else body(tile, carry)

        lax.fori_loop(0, num_tiles, step, carry)
        return first + (num_tiles - 1) * self.grid_stride

    def _first_index(self, cta: Index, wg: Index) -> Index:
        return cta * self.wgs_per_cta + wg
