"""Launches a kernel: the grid, its warpgroups, its shared memory; compiled for Hopper or interpreted on any device."""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

_INTERPRET: contextvars.ContextVar[bool] = contextvars.ContextVar("jfla_interpret", default=False)


@contextlib.contextmanager
def interpret() -> Iterator[None]:
    """Inside, implementation="pallas" runs in Pallas' interpret mode, on any device, with race detection: for tests.

    >>> import jax, jfla
    >>> with jfla.pallas.interpret():
    ...     jfla.pallas.interpreting()
    True
    """
    with interpreted(True):
        yield


@contextlib.contextmanager
def interpreted(flag: bool) -> Iterator[None]:
    token = _INTERPRET.set(flag)
    try:
        yield
    finally:
        _INTERPRET.reset(token)


def interpreting() -> bool:
    """Whether kernels are interpreted here and now."""
    return _INTERPRET.get()


def launch(
    kernel: Callable[..., None],
    arguments: tuple[Any, ...],
    *,
    out_type: Any,
    grid: dict[str, int],
    warpgroups: int,
    buffers: tuple[Any, ...] = (),
    barriers: tuple[Any, ...] = (),
    name: str,
    auto_barriers: bool = True,
    detect_races: bool = True,
) -> Any:
    """Runs `kernel(*argument_refs, *output_refs, (buffers, *barriers))` on every point of `grid`, axis by axis name.

    An argument that is there twice goes in once: to describe one to the copy engine takes long to compile.
    A buffer may be None: the kernel then gets None in its place. An argument may be a mutable array (`jax.Ref`), which
    the kernel may write. The warpgroup's number is the axis "wg". Without `auto_barriers` the threads of a warpgroup
    wait for each other only where the kernel says so. `detect_races`: in interpret mode, which then knows nothing of
    programs that wait for each other.
    """

    distinct = list({id(x): x for x in arguments}.values())
    numbers = {id(x): number for number, x in enumerate(distinct)}

    def entry(*refs: Any) -> None:
        ins = [refs[numbers[id(x)]] for x in arguments]
        scoped(lambda scratch: kernel(*ins, *refs[len(distinct) :], scratch), buffers, barriers)

    extra: dict[str, Any] = {"interpret": plgpu.InterpretGPUParams(detect_races=detect_races)} if interpreting() else {}
    run = plgpu.kernel(
        entry,
        out_type=out_type,
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        num_threads=warpgroups,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=not auto_barriers),
        kernel_name=name,
        **extra,
    )
    return jax.custom_batching.sequential_vmap(run)(*distinct)  # a kernel has no batching rule


def scoped(body: Callable[[tuple[Any, ...]], None], buffers: tuple[Any, ...], barriers: tuple[Any, ...]) -> None:
    """Inside a kernel: runs `body((buffers, *barriers))` with shared memory for as long as it runs."""
    used = [i for i, buffer in enumerate(buffers) if buffer is not None]

    def with_all(present: tuple[Any, ...], *rest: Any) -> None:
        everything = [None] * len(buffers)
        for i, ref in zip(used, present):
            everything[i] = ref
        body((everything, *rest))

    pl.run_scoped(with_all, tuple(buffers[i] for i in used), *barriers, collective_axes="wg")
