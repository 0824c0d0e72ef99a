"""The producer warpgroup of the gradient kernels: when it issues the copies of a chunk.

First come 64 columns of V at a time, of all that the scans left, each to a pipeline stage that the consumers have
freed; then q and k, for which there is room once, as soon as the consumers are done with the chunk before.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jfla.pallas.mgpu.branches import when
from jfla.pallas.mgpu.types import Index


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
