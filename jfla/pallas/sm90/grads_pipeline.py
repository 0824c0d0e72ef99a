"""What the gradient kernels of Hopper share: the pipeline of tiles of V, its barriers, and the roles of warpgroups.

A producer warpgroup issues the copies. First come 64 columns of V at a time, of all that the scans left, each to a
pipeline stage that the consumers have freed; then q and k, for which there is room once, as soon as the consumers are
done with the chunk before.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jfla.pallas.common.chunk_index import TILE_V, ChunkIndex
from jfla.pallas.common.grads_tiles import DSTATE, STATE
from jfla.pallas.heuristics import HOPPER_SMEM_BYTES
from jfla.pallas.mgpu.branches import when
from jfla.pallas.mgpu.copies import Copies
from jfla.pallas.mgpu.registers import RegisterLimits, leave_registers, take_registers
from jfla.pallas.mgpu.scheduler import TileScheduler, WorkTile
from jfla.pallas.mgpu.smem import num_bytes
from jfla.pallas.mgpu.types import Barrier, Index, Smem
from jfla.stages import ScanResults

NUM_CONSUMERS = 2  # consumer warpgroups, each of which owns 64 channels of K
MAX_V_STAGES = 3  # tiles of V in flight, at most


class GradsBarriers(NamedTuple):
    """Mbarriers of a CTA. Each kernel's `smem.py` has a table of the buffers that they guard."""

    v_full: Barrier  # [stages]: the copies of a tile of V have arrived
    v_empty: Barrier  # [stages]: both consumers have read the tile
    qk_full: Barrier  # the copies of the chunk's q, k and vectors have arrived
    chunk_done: Barrier  # both consumers and their stores have read the chunk
    synced: Barrier  # of `ValuePipeline.sync_consumers`


def grads_barriers(num_tiles: int, copies_of_qk: int, stages: int) -> GradsBarriers:
    """On the host, for so many tiles of channels. A copy arrives once at its barrier, and so does a consumer."""
    copies_of_values = 3
    copies_of_states = 2 * num_tiles
    v_copies = copies_of_values + copies_of_states
    return GradsBarriers(
        v_full=plgpu.Barrier(num_arrivals=v_copies, num_barriers=stages),
        v_empty=plgpu.Barrier(num_arrivals=NUM_CONSUMERS, num_barriers=stages),
        qk_full=plgpu.Barrier(num_arrivals=copies_of_qk),
        chunk_done=plgpu.Barrier(num_arrivals=NUM_CONSUMERS),
        synced=plgpu.Barrier(num_arrivals=NUM_CONSUMERS),
    )


def with_most_stages[Storage](storage: Callable[[int], Storage]) -> Storage:
    """On the host: the shared storage of a kernel, a function of its stages of V, with as many as there is room for."""
    fixed = num_bytes(storage(0))
    per_stage = num_bytes(storage(1)) - fixed
    return storage(min(MAX_V_STAGES, (HOPPER_SMEM_BYTES - fixed) // per_stage))


class Roles(NamedTuple):
    """What warpgroups do with a chunk, and what they do before the first one."""

    consume: Callable[[WorkTile], None]
    produce: Callable[[WorkTile], None]
    begin_consumer: Callable[[], None] | None = None
    begin_producer: Callable[[], None] | None = None


class ChunkCopies(NamedTuple):
    """Functions that start the copies of a chunk."""

    v_tile: Callable[[int, Index], None]  # of a tile of V to a stage
    qk: Callable[[], None]  # of q, k and vectors
    # of the same to the second-level cache, while the consumers work on the chunk before
    prefetch: Callable[[], None] | None = None


class ValuePipeline(NamedTuple):
    """The pipeline of a CTA."""

    barriers: GradsBarriers
    v_tiles: int  # of 64 columns of V, in a chunk
    num_stages: int  # tiles of V in flight

    def copy_count(self, work: WorkTile, v_tile: Index) -> Index:
        """How many tiles of V the CTA has loaded before this one."""
        return work.iteration * self.v_tiles + v_tile

    def stage(self, work: WorkTile, v_tile: Index) -> Index:
        """The pipeline stage of a tile of V of a chunk."""
        return lax.rem(self.copy_count(work, v_tile), jnp.int32(self.num_stages))

    def sync_consumers(self) -> None:
        """Waits for the other consumer; what either wrote to shared memory can then be read."""
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.barriers.synced)
        plgpu.barrier_wait(self.barriers.synced)

    def produce_chunk(self, work: WorkTile, copies: ChunkCopies) -> None:
        """Issues the copies of a chunk, each as soon as there is room."""
        for v_tile in range(self.v_tiles):
            stage = self.stage(work, v_tile)

            @when(self.copy_count(work, v_tile) >= self.num_stages)
            def _(stage: Index = stage):
                plgpu.barrier_wait(self.barriers.v_empty.at[stage])
                # Orders what the consumers have read in the stage before the copies to it. A consumer's own fence
                # would wait for all of its loads and stores in flight.
                plgpu.commit_smem()

            copies.v_tile(v_tile, stage)

        if copies.prefetch is not None:
            copies.prefetch()

        @when(work.iteration > 0)
        def _():
            plgpu.barrier_wait(self.barriers.chunk_done)
            plgpu.commit_smem()  # the same for the tiles of q and k

        copies.qk()

    def drain(self, num_chunks: Index) -> None:
        """In the producer: waits for the last arrivals, each of which has to be observed before the kernel ends."""
        count = num_chunks * self.v_tiles

        @pl.loop(jnp.maximum(count - self.num_stages, 0), count)
        def _(i: Index) -> None:
            stage = lax.rem(i, jnp.int32(self.num_stages))
            plgpu.barrier_wait(self.barriers.v_empty.at[stage])

        plgpu.barrier_wait(self.barriers.chunk_done)

    def run(
        self,
        wg: Index,
        cta: Index,
        tiles: TileScheduler,
        registers: RegisterLimits,
        roles: Roles,
    ) -> None:
        """All chunks of the CTA, by a warpgroup in its role."""

        @when(wg < NUM_CONSUMERS)
        def _():
            take_registers(registers.consumer)
            if roles.begin_consumer is not None:
                roles.begin_consumer()
            tiles.for_each_tile(roles.consume, cta, 0)
            plgpu.wait_smem_to_gmem(0)

        @when(wg == NUM_CONSUMERS)
        def _():
            leave_registers(registers.producer)
            if roles.begin_producer is not None:
                roles.begin_producer()
            tiles.for_each_tile(roles.produce, cta, 0)
            self.drain(tiles.tile_count(cta))


def load_states(
    copies: Copies,
    scans: ScanResults,
    index: ChunkIndex,
    v_tile: int,
    columns_of_tiles: list[Index],
    states_smem: Smem,
) -> None:
    """Starts the copies of 64 columns of V of S and dS, by tiles of channels, to `states_smem` [2, tiles]."""
    rows = pl.ds(v_tile * TILE_V, TILE_V)
    for which, source in ((STATE, scans.states), (DSTATE, scans.dstates)):
        for tile, columns in enumerate(columns_of_tiles):
            source_tile = index.tile(source).at[rows, columns]
            copies.start(source_tile, states_smem.at[which, tile])
