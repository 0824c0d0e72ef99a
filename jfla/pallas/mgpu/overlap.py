"""Kernels as values: run alone, or a producer and its consumer in one launch, tile by tile through flags in memory.

A scan over few sequences leaves most multiprocessors idle. There the kernel that makes the scan's operands can run at
the same time: it signals every tile that it has written, and the scan waits for the tile that it reads next.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jfla.pallas.context import interpreting
from jfla.pallas.mgpu.copies import wait_for_stores
from jfla.pallas.mgpu.launch import allocate, launch
from jfla.pallas.mgpu.types import Gmem, Index, MemorySpec


class ReadyFlags(NamedTuple):
    """A semaphore in global memory for each tile that a producer writes; None where nobody waits.

    Interpret mode has no semaphores, but runs CTAs one after the other.
    """

    flags_gmem: Gmem

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
            plgpu.semaphore_wait(flag, 1, decrement=False, memory_scope="gpu")


class Kernel(NamedTuple):
    """A kernel over a one-dimensional grid, not launched yet.

    `body(inputs_gmem, outputs_gmem, smem, barriers, cta, ready_flags)` gets the pytrees below as references.
    """

    name: str
    inputs: Any  # arrays, `jax.Ref`s, and for a consumer `Placeholder`s
    outputs: Any  # jax.ShapeDtypeStruct
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

    def placeholders(self) -> Any:
        """The results with a `Placeholder` for every output."""
        named = lambda path, x: Placeholder(
            jax.tree_util.keystr(path), x.shape, x.dtype
        )
        return self.resolve(
            jax.tree_util.tree_map_with_path(named, self.kernel.outputs)
        )


def run(pending: PendingResults) -> Any:
    """Launches a kernel alone and returns its results."""
    kernel = pending.kernel

    def body(inputs_gmem: Any, outputs_gmem: Any, smem: Any, barriers: Any) -> None:
        cta = lax.axis_index("cta")
        kernel.body(inputs_gmem, outputs_gmem, smem, barriers, cta, ReadyFlags(None))

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
) -> tuple[Any, Any]:
    """Launches a producer and its consumer together; `consume` makes the consumer from the producer's placeholders.

    Producer CTAs have the lowest numbers, are scheduled first and never wait for a consumer, so that there is no
    deadlock even if the grid exceeds what is resident at once. Only the consumer's warpgroups move registers.
    """
    consuming = consume(producing.placeholders())
    producer = producing.kernel
    consumer = consuming.kernel
    consumer_arrays = jax.tree.map(
        lambda x: None if _is_placeholder(x) else x, consumer.inputs
    )

    def body(inputs_gmem: Any, outputs_gmem: Any, _smem: Any, _barriers: Any) -> None:
        producer_inputs, consumer_inputs = inputs_gmem
        producer_outputs, consumer_outputs = outputs_gmem
        produced = _by_name(producer_outputs)
        consumer_inputs = jax.tree.map(
            lambda x, ref: produced[x.name] if _is_placeholder(x) else ref,
            consumer.inputs,
            consumer_inputs,
        )
        ready_flags = ReadyFlags(allocate_flags(flags_shape))
        cta = lax.axis_index("cta")

        @pl.when(cta < producer.num_ctas)
        def _produce():
            _run_role(producer, producer_inputs, producer_outputs, cta, ready_flags)

        @pl.when(cta >= producer.num_ctas)
        def _consume():
            number = cta - producer.num_ctas
            _run_role(consumer, consumer_inputs, consumer_outputs, number, ready_flags)

    outputs = launch(
        body,
        (producer.inputs, consumer_arrays),
        (producer.outputs, consumer.outputs),
        grid={"cta": producer.num_ctas + consumer.num_ctas},
        num_warpgroups=max(producer.num_warpgroups, consumer.num_warpgroups),
        registers=consumer.registers,
        detect_races=False,
        name=f"{producer.name}_beside_{consumer.name.removeprefix('jfla_')}",
    )
    return producing.resolve(outputs[0]), consuming.resolve(outputs[1])


def _run_role(
    kernel: Kernel, inputs: Any, outputs: Any, cta: Index, flags: ReadyFlags
) -> None:
    def body(smem: Any, barriers: Any) -> None:
        kernel.body(inputs, outputs, smem, barriers, cta, flags)

    allocate(body, kernel.smem, kernel.barriers)


def allocate_flags(shape: tuple[int, ...]) -> Gmem:
    """Semaphores of this launch, all 0; None in interpret mode."""
    return None if interpreting() else pl.get_global(plgpu.SemaphoreType.REGULAR(shape))


def _is_placeholder(x: Any) -> bool:
    return isinstance(x, Placeholder)


def _by_name(outputs: Any) -> dict[str, Gmem]:
    return {
        jax.tree_util.keystr(path): x
        for path, x in jax.tree_util.tree_leaves_with_path(outputs)
    }
