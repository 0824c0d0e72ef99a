"""Copies between global memory, shared memory and registers, as the machine has them."""

import math
from typing import Any, NamedTuple

from jax.experimental.mosaic import gpu as mosaic
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import nvvm

from jfla.pallas.context import interpreting
from jfla.pallas.machine import on_hopper
from jfla.pallas.mgpu.cache_hint import hint_evict_first
from jfla.pallas.mgpu.cp_async import THREADS, cp_async, wait_cp_async
from jfla.pallas.mgpu.layouts import ROWS, TILE_ROWS, WGMMA, WIDE, WIDER
from jfla.pallas.mgpu.smem import transposed
from jfla.pallas.mgpu.tile_moves import (
    store_matrix,
    store_pairs,
    store_transposed,
    store_wide,
)
from jfla.pallas.mgpu.types import (
    Barrier,
    Gmem,
    InlineContext,
    Layout,
    Reg,
    Smem,
)


def commit_smem() -> None:
    """Orders this warpgroup's accesses of shared memory before its later ones, and before the copy engine's."""
    if on_hopper() or interpreting():
        plgpu.commit_smem()
    else:
        plgpu.inline_mgpu()(lambda _: mosaic.warpgroup_barrier())()


class Copies(NamedTuple):
    """Copies into shared memory that are waited for together.

    On Hopper they arrive on `barrier`; elsewhere it is None, and they are those of the CTA's one warpgroup.
    """

    barrier: Barrier
    evict_first: bool = False  # nobody reads it again soon: see `cache_hint.py`

    def start(self, source_gmem: Gmem, target_smem: Smem) -> None:
        """Starts a copy; all reads of the target must have been committed."""
        if on_hopper():
            plgpu.copy_gmem_to_smem(source_gmem, target_smem, self.barrier)
            if self.evict_first and not interpreting():
                hint_evict_first()
        elif interpreting():
            target_smem[...] = source_gmem[...]
        elif fits_cp_async(target_smem):
            cp_async(source_gmem, target_smem)
        else:
            for source, target in zip(_lines(source_gmem), _lines(target_smem)):
                target[...] = load_with_layout(source, ROWS)

    def wait(self, started_since: int = 0) -> None:
        """Waits for the copies, of which so many of others have been started since."""
        if on_hopper():
            plgpu.barrier_wait(self.barrier)
        elif not interpreting():
            wait_cp_async(started_since)


def prefetch_to_l2(source_gmem: Gmem) -> None:
    """Starts bringing an array of global memory into the second-level cache, on Hopper."""
    if on_hopper() and not interpreting():
        plgpu.async_prefetch(source_gmem)


def fits_cp_async(target_smem: Any) -> bool:
    """Whether the threads of a warpgroup can share a copy of so many elements."""
    return math.prod(target_smem.shape) % THREADS == 0


def _lines(ref: Gmem | Smem) -> list[Gmem | Smem]:
    """The lines of what has too few elements for a copy by all threads."""
    return [ref] if len(ref.shape) == 1 else [ref.at[i] for i in range(ref.shape[0])]


def write(target_smem: Smem, x: Reg, layout: Layout | None = None) -> None:
    """x, a tile or a line of rows, into shared memory, without the barriers that Pallas puts around it.

    (A line that another GPU than Hopper writes still has them.)
    Everything that was read there must have been committed, and so must be what is written before it is read.
    """
    if interpreting() or (not on_hopper() and len(x.shape) == 1):
        target_smem[...] = x
    elif not on_hopper():
        store_pairs(target_smem, x)
    elif len(x.shape) == 1:
        _write_line(target_smem, x)
    elif layout in (WIDE, WIDER):
        store_wide(target_smem, x, layout)
    else:
        store_matrix(target_smem, x)


def write_transposed(tile_smem: Smem, x: Reg) -> None:
    """`write` of x^T into a tile."""
    if interpreting():
        transposed(tile_smem)[...] = x
    elif on_hopper():
        store_matrix(tile_smem, x, transpose=True)
    else:
        store_transposed(tile_smem, x)


def _write_line(line_smem: Smem, x: Reg) -> None:
    @plgpu.inline_mgpu(arg_types=(ROWS, plgpu.RefType()))
    def store(_: Any, x: Any, line: Any) -> None:
        x.store_untiled(line, optimized=False)

    store(x, line_smem)  # pyright: ignore[reportCallIssue]: the first argument is Mosaic's


def store_tile(tile_smem: Smem, target_gmem: Gmem) -> None:
    """Starts the store of a tile of shared memory, committed before."""
    if on_hopper():
        plgpu.copy_smem_to_gmem(tile_smem, target_gmem)
    elif tile_smem.shape[0] == TILE_ROWS:
        store_from_layout(target_gmem, load_with_layout(tile_smem, WGMMA))
    else:
        for source, target in zip(_lines(tile_smem), _lines(target_gmem)):
            store_from_layout(target, load_with_layout(source, ROWS))


def wait_for_stores(read_only: bool = False, started_since: int = 0) -> None:
    """Waits for this warpgroup's stores but the last `started_since`, or until their tiles have been read."""
    if on_hopper():
        plgpu.wait_smem_to_gmem(started_since, wait_read_only=read_only)


def arrive_after_stores(
    barrier: Barrier, read_only: bool = False, started_since: int = 0
) -> None:
    """On Hopper: `wait_for_stores`, and this warpgroup's arrival at `barrier`, without a barrier between its threads.

    Each thread arrives by itself, and the one that has issued the stores does so when it has waited for them.
    """
    if interpreting():
        plgpu.wait_smem_to_gmem(started_since, wait_read_only=read_only)
    else:

        @plgpu.inline_mgpu()
        def wait(_: InlineContext) -> None:
            nvvm.cp_async_bulk_wait_group(started_since, read=read_only)

        wait()  # pyright: ignore[reportCallIssue]: the first argument is Mosaic's
    plgpu.barrier_arrive(barrier)


def load_with_layout(ref: Gmem | Smem, layout: Layout) -> Reg:
    """An array of global or shared memory in `layout`, without TMA, whatever bank conflicts that has."""
    return plgpu.load(ref, layout=layout, optimized=False)


def store_from_layout(ref: Gmem | Smem, x: Reg) -> None:
    """Registers to global or shared memory as they lie, without TMA, whatever bank conflicts that has."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, x, optimized=False)
    else:  # JAX 0.11
        ref[...] = x
