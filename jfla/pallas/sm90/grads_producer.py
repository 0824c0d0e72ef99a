"""The producer warpgroup of the gradient kernels: its pipeline stages, and when it issues the copies of a chunk.

First come 64 columns of V at a time, of all that the scans left, each to a pipeline stage that the consumers have
freed; then q and k, for which there is room once, as soon as the consumers are done with the chunk before.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jfla.pallas.common.chunk_index import TILE_V, ChunkIndex
from jfla.pallas.common.grads_tiles import DSTATE, STATE
from jfla.pallas.heuristics import HOPPER_SMEM_BYTES
from jfla.pallas.mgpu.branches import when
from jfla.pallas.mgpu.copies import Copies
from jfla.pallas.mgpu.smem import num_bytes
from jfla.pallas.mgpu.types import Index, Smem
from jfla.stages import ScanResults

MAX_V_STAGES = 3  # tiles of V in flight, at most


def with_most_stages[Storage](storage: Callable[[int], Storage]) -> Storage:
    """On the host: the shared storage of a kernel, a function of its stages of V, with as many as there is room for."""
    fixed = num_bytes(storage(0))
    per_stage = num_bytes(storage(1)) - fixed
    return storage(min(MAX_V_STAGES, (HOPPER_SMEM_BYTES - fixed) // per_stage))


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


def produce_chunk(
    ctx: Any,
    load_v_tile: Callable[[Any, int, Index], None],
    load_qk: Callable[[Any], None],
    prefetch: Callable[[Any], None] | None = None,
) -> None:
    """Issues the copies of a chunk, each as soon as there is room; `prefetch` comes before the wait for q's and k's.

    `ctx` is the `GradsKdaWarpgroup` or `GradsGdnWarpgroup` of the producer.
    """
    for v_tile in range(ctx.spec.v_tiles):
        stage = ctx.stage(v_tile)

        @when(ctx.v_copy_count(v_tile) >= ctx.num_stages)
        def _(stage: Index = stage):
            plgpu.barrier_wait(ctx.barriers.v_empty.at[stage])
            # Orders what the consumers have read in the stage before the copies to it. A consumer's own fence would
            # wait for all of its loads and stores in flight.
            plgpu.commit_smem()

        load_v_tile(ctx, v_tile, stage)

    if prefetch is not None:
        prefetch(ctx)

    @when(ctx.work.iteration > 0)
    def _():
        plgpu.barrier_wait(ctx.barriers.chunk_done)
        plgpu.commit_smem()  # the same for the tiles of q and k

    load_qk(ctx)


def drain(barriers: Any, num_chunks: Index, v_tiles: int, stages: int) -> None:
    """Waits for the last arrivals: each has to be observed before the kernel ends."""
    count = num_chunks * v_tiles

    @pl.loop(jnp.maximum(count - stages, 0), count)
    def _(i: Index) -> None:
        plgpu.barrier_wait(barriers.v_empty.at[lax.rem(i, jnp.int32(stages))])

    plgpu.barrier_wait(barriers.chunk_done)
