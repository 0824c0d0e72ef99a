"""Kernels as values: run alone, or a producer and its consumer in one launch, tile by tile through flags in memory.

A scan over few sequences leaves most multiprocessors idle. There the kernel that makes the scan's operands can run at
the same time: it signals every tile that it has written, and the scan waits for the tile that it reads next. The
producer may be a few tiles ahead: what it reads and writes is then in the second-level cache when the scan reads it,
and the tiles of a row may be a ring, whose places it writes again before they ever go to device memory.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from jfla.pallas.context import interpreting
from jfla.pallas.mgpu.branches import when
from jfla.pallas.mgpu.copies import wait_for_stores
from jfla.pallas.mgpu.launch import allocate, launch
from jfla.pallas.mgpu.types import (
    Barrier,
    Gmem,
    Index,
    InlineContext,
    MemorySpec,
    MemRef,
    Smem,
    Tree,
)


class Lead(NamedTuple):
    """How far a producer may be ahead of its consumer.

    Needs to be resident at once: the producer's CTAs, and the consumer's for all rows that are produced at a time.
    """

    tiles: int = 0  # of each row of the flags; 0: any number
    num_readers: int = 1  # warpgroups of the consumer that release each tile
    num_writers: int = 1  # CTAs of the producer that signal each tile
    descending: bool = False  # the last tile of a row is consumed first


ANY_LEAD = Lead()


class ReadyFlags(NamedTuple):
    """A semaphore in global memory for each tile that a producer writes; None where nobody waits.

    It counts the writers, which are first, and the readers. Interpret mode has no semaphores, but runs CTAs one after
    the other.
    """

    flags_gmem: Gmem
    lead: Lead

    def signal(self, index: tuple[Index, ...]) -> None:
        """Tells that the tile is in global memory: this warpgroup's copies are waited for here.

        The copies of other warpgroups must have been waited for by them.
        """
        if self.flags_gmem is not None:
            wait_for_stores()
            plgpu.semaphore_signal(self.flags_gmem.at[tuple(index)], memory_scope="gpu")

    def wait(self, index: tuple[Index, ...]) -> None:
        if self.flags_gmem is not None:
            flag = self.flags_gmem.at[tuple(index)]
            writers = self.lead.num_writers
            plgpu.semaphore_wait(flag, writers, decrement=False, memory_scope="gpu")

    def release(self, index: tuple[Index, ...]) -> None:
        """Tells that this warpgroup has seen the copies of the tile arrive, and that nobody reads it again."""
        if self.flags_gmem is not None and self.lead.tiles:
            _signal_relaxed(self.flags_gmem.at[tuple(index)])

    def wait_for_room(self, index: tuple[Index, ...]) -> None:
        """Waits until all readers have read the tile whose place in a ring this one takes."""
        if self.flags_gmem is None or not self.lead.tiles:
            return
        *row, tile = index
        lead = self.lead
        earlier = tile + lead.tiles if lead.descending else tile - lead.tiles
        num_tiles = self.flags_gmem.shape[-1]

        @when(earlier < num_tiles if lead.descending else earlier >= 0)
        def _():
            flag = self.flags_gmem.at[(*row, earlier)]
            count = lead.num_writers + lead.num_readers
            plgpu.semaphore_wait(flag, count, decrement=False, memory_scope="gpu")


NO_FLAGS = ReadyFlags(None, ANY_LEAD)


def _signal_relaxed(flag_gmem: Gmem) -> None:
    """Adds 1 without the fence of `semaphore_signal`, for which a scan would wait: no write is to be seen behind it."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def signal(_: InlineContext, flag: MemRef) -> None:
        pointer = utils.memref_ptr(flag)
        utils.SemaphoreRef(pointer).signal(1, relaxed=True, memory_scope="gpu")

    signal(flag_gmem)  # pyright: ignore[reportCallIssue]: the first argument is Mosaic's


class Kernel(NamedTuple):
    """A kernel over a one-dimensional grid, not launched yet.

    `body(inputs_gmem, outputs_gmem, smem, barriers, cta, ready_flags)` gets the pytrees below as references.
    """

    name: str
    inputs: Tree  # arrays, `jax.Ref`s, and for a consumer `Placeholder`s
    outputs: Tree  # jax.ShapeDtypeStruct
    num_ctas: int
    num_warpgroups: int
    registers: tuple[int, ...]  # limits that the warpgroups set themselves; () for none
    smem: MemorySpec
    barriers: MemorySpec
    body: Callable[..., None]


@dataclasses.dataclass(frozen=True)
class Placeholder:
    """An output of the producer, by name, where a consumer has it among its inputs; a leaf of pytrees."""

    name: str
    shape: tuple[int, ...]
    dtype: Any


class PendingResults(NamedTuple):
    """A kernel that is to run, and what its caller makes of its outputs."""

    kernel: Kernel
    resolve: Callable[[Any], Any]

    def placeholders(self) -> Tree:
        """The results with a `Placeholder` for every output."""
        named = lambda path, x: Placeholder(
            jax.tree_util.keystr(path), x.shape, x.dtype
        )
        return self.resolve(
            jax.tree_util.tree_map_with_path(named, self.kernel.outputs)
        )


def run(pending: PendingResults) -> Tree:
    """Launches a kernel alone and returns its results."""
    kernel = pending.kernel
    # Not all of `kernel`, whose arrays would live as long as the program: its body is traced when that is lowered.
    work = kernel.body

    def body(
        inputs_gmem: Tree, outputs_gmem: Tree, smem: Smem, barriers: Barrier
    ) -> None:
        cta = lax.axis_index("cta")
        work(inputs_gmem, outputs_gmem, smem, barriers, cta, NO_FLAGS)

    outputs = launch(
        body,
        kernel.inputs,
        kernel.outputs,
        grid={"cta": kernel.num_ctas},
        num_warpgroups=kernel.num_warpgroups,
        registers=kernel.registers,
        smem=kernel.smem,
        barriers=kernel.barriers,
        name=kernel.name,
    )
    return pending.resolve(outputs)


def overlap(
    producing: PendingResults,
    consume: Callable[[Any], PendingResults],
    flags_shape: tuple[int, ...],
    lead: Lead,
    *,
    consumer_first: bool = False,
) -> tuple[Any, Any]:
    """Launches a producer and its consumer together; `consume` makes the consumer from the producer's placeholders.

    CTAs with the lowest numbers are scheduled first. If they are the producer's, with any `lead`, they never wait for a
    consumer: there is then no deadlock even if the grid exceeds what is resident at once. With `consumer_first` the
    consumer's CTAs hold multiprocessors while they wait, and have to leave some to the producer's.
    """
    consuming = consume(producing.placeholders())
    inputs = (producing.kernel.inputs, consuming.kernel.inputs)
    arrays = jax.tree.map(lambda x: None if _is_placeholder(x) else x, inputs)
    # The body is traced when the program is lowered, and must not keep the arrays alive until then.
    sources = jax.tree.map(lambda x: x if _is_placeholder(x) else "array", inputs[1])
    producer = producing.kernel._replace(inputs=None)
    consumer = consuming.kernel._replace(inputs=None)

    def body(
        inputs_gmem: Tree, outputs_gmem: Tree, _smem: Smem, _barriers: Barrier
    ) -> None:
        producer_inputs, consumer_inputs = inputs_gmem
        producer_outputs, consumer_outputs = outputs_gmem
        produced = _by_name(producer_outputs)
        consumer_inputs = jax.tree.map(
            lambda x, ref: produced[x.name] if _is_placeholder(x) else ref,
            sources,
            consumer_inputs,
        )
        ready_flags = ReadyFlags(allocate_flags(flags_shape), lead)
        cta = lax.axis_index("cta")
        roles = [
            (producer, producer_inputs, producer_outputs),
            (consumer, consumer_inputs, consumer_outputs),
        ]
        first, second = reversed(roles) if consumer_first else roles
        num_first = first[0].num_ctas

        @when(cta < num_first)
        def _first():
            _run_role(*first, cta, ready_flags)

        @when(cta >= num_first)
        def _second():
            _run_role(*second, cta - num_first, ready_flags)

    outputs = launch(
        body,
        arrays,
        (producer.outputs, consumer.outputs),
        grid={"cta": producer.num_ctas + consumer.num_ctas},
        num_warpgroups=max(producer.num_warpgroups, consumer.num_warpgroups),
        registers=consumer.registers,
        detect_races=False,
        name=f"{producer.name}_beside_{consumer.name.removeprefix('jfla_')}",
    )
    return producing.resolve(outputs[0]), consuming.resolve(outputs[1])


def _run_role(
    kernel: Kernel, inputs: Tree, outputs: Tree, cta: Index, flags: ReadyFlags
) -> None:
    def body(smem: Smem, barriers: Barrier) -> None:
        kernel.body(inputs, outputs, smem, barriers, cta, flags)

    allocate(body, kernel.smem, kernel.barriers)


def allocate_flags(shape: tuple[int, ...]) -> Gmem:
    """Semaphores of this launch, all 0; None in interpret mode."""
    return None if interpreting() else pl.get_global(plgpu.SemaphoreType.REGULAR(shape))


def _is_placeholder(x: Any) -> bool:
    return isinstance(x, Placeholder)


def _by_name(outputs: Tree) -> dict[str, Gmem]:
    return {
        jax.tree_util.keystr(path): x
        for path, x in jax.tree_util.tree_leaves_with_path(outputs)
    }
