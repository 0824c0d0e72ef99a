"""Kernels as jobs: run alone, or two in one launch, where the second reads what the first is making.

A scan over few sequences leaves most multiprocessors idle. What has to be made for it, chunk by chunk, can be made
there meanwhile: each chunk is handed over through a semaphore in device memory.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jfla.pallas._launch import interpreting, launch, scoped
from jfla.pallas._operands import Place


class Handover(NamedTuple):
    """Semaphores [B, HV, N]: which chunks are in device memory. None where nobody waits.

    Interpret mode has no semaphores, but runs the programs one after the other.
    """

    made: Any

    def tell(self, place: Place) -> None:
        """Once this warpgroup's copies to device memory have arrived; another's have already."""
        if self.made is not None:
            plgpu.wait_smem_to_gmem(0)
            plgpu.semaphore_signal(place.tile(self.made), memory_scope="gpu")

    def wait(self, place: Place) -> None:
        if self.made is not None:
            plgpu.semaphore_wait(place.tile(self.made), 1, decrement=False, memory_scope="gpu")


class Job(NamedTuple):
    """`body(refs, scratch, program, handover)` in each of `programs` programs.

    refs: of the arguments and the results. scratch: (buffers, *barriers), as `launch` has them.
    """

    name: str
    arguments: tuple[Any, ...]  # arrays, or results of the job that this one runs beside
    results: tuple[jax.ShapeDtypeStruct, ...]
    programs: int
    warpgroups: int
    buffers: tuple[Any, ...]
    barriers: tuple[Any, ...]
    body: Callable[[list[Any], Any, Any, Handover], None]


class Promise(NamedTuple):
    """What a job will leave: a tree, some of whose leaves are the job's results, still without values.

    A result is known by the object that describes it: no two of them may share one.
    """

    job: Job
    value: Any

    def kept(self, arrays: Sequence[jax.Array]) -> Any:
        assert len({id(x) for x in self.job.results}) == len(self.job.results)
        return jax.tree.map(lambda x: _swapped(x, self.job.results, arrays), self.value)


def run(promise: Promise) -> Any:
    """Runs a job alone."""
    job, nobody = promise.job, Handover(None)

    def kernel(*refs: Any) -> None:
        job.body(list(refs[:-1]), refs[-1], lax.axis_index("program"), nobody)

    out = launch(
        kernel,
        job.arguments,
        out_type=job.results,
        grid={"program": job.programs},
        warpgroups=job.warpgroups,
        buffers=job.buffers,
        barriers=job.barriers,
        name=job.name,
    )
    return promise.kept(out)


def beside(first: Promise, then: Promise, chunks: tuple[int, int, int]) -> tuple[Any, Any]:
    """Runs two jobs at once. `then` reads results of `first`, of each of the `chunks` (B, HV, N) when it is there.

    The programs of `first` come first: they wait for nobody, so that those of `then` never wait in vain, even where
    not all of them find room at once.
    """
    maker, reader = first.job, then.job
    brought = [x for x in reader.arguments if not any(x is r for r in maker.results)]
    arguments = (*maker.arguments, *brought)

    def kernel(*refs: Any) -> None:
        ins, outs = refs[: len(arguments)], refs[len(arguments) : -1]
        made, mine = outs[: len(maker.results)], outs[len(maker.results) :]
        known = [*maker.results, *brought]
        read = [_swapped(x, known, [*made, *ins[len(maker.arguments) :]]) for x in reader.arguments]
        handover, program = Handover(_semaphores(chunks)), lax.axis_index("program")

        def role(job: Job, refs: list[Any], number: Any) -> None:
            scoped(lambda scratch: job.body(refs, scratch, number, handover), job.buffers, job.barriers)

        pl.when(program < maker.programs)(lambda: role(maker, [*ins[: len(maker.arguments)], *made], program))
        pl.when(program >= maker.programs)(lambda: role(reader, [*read, *mine], program - maker.programs))

    out = launch(
        kernel,
        arguments,
        out_type=(*maker.results, *reader.results),
        grid={"program": maker.programs + reader.programs},
        warpgroups=max(maker.warpgroups, reader.warpgroups),
        detect_races=False,
        name=f"{maker.name}_beside_{reader.name.removeprefix('jfla_')}",
    )
    return first.kept(out[: len(maker.results)]), then.kept(out[len(maker.results) :])


def _semaphores(chunks: tuple[int, int, int]) -> Any:
    return None if interpreting() else pl.get_global(plgpu.SemaphoreType.REGULAR(chunks))


def _swapped(x: Any, old: Any, new: Any) -> Any:
    """x, or what stands in `new` where x itself stands in `old`."""
    return next((b for a, b in zip(old, new) if a is x), x)
