"""Launches a kernel: operands, grid, warpgroups and shared memory; compiled for the GPU or interpreted anywhere."""

from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jfla.pallas.context import interpreting
from jfla.pallas.mgpu.types import MemorySpec

# body(inputs_gmem, outputs_gmem, smem, barriers)
Body = Callable[[Any, Any, Any, Any], None]


def launch(
    body: Body,
    inputs: Any,
    outputs: Any,
    *,
    grid: dict[str, int],
    num_warpgroups: int,
    smem: MemorySpec = (),
    barriers: MemorySpec = (),
    name: str,
    auto_barriers: bool = True,
    detect_races: bool = True,
) -> Any:
    """Runs `body` on every point of `grid`, by axis name, and returns arrays in the structure of `outputs`.

    `inputs` is a pytree of arrays, `outputs` one of `jax.ShapeDtypeStruct`, `smem` and `barriers` of what is allocated
    for a CTA; None in any of them stays None. An input may be a `jax.Ref`, which the kernel may write. The warpgroup's
    number is the axis "wg".

    An array that occurs twice among the inputs becomes one operand: every TMA descriptor costs compile time.
    Without `auto_barriers` the threads of a warpgroup synchronise only where the kernel says so. `detect_races` is of
    interpret mode, whose detector reports CTAs that synchronise through global memory.
    """
    leaves, structure = jax.tree.flatten(inputs)
    out_leaves, out_structure = jax.tree.flatten(outputs)
    operands = list({id(x): x for x in leaves}.values())
    position = {id(x): i for i, x in enumerate(operands)}

    def entry(*refs: Any) -> None:
        inputs_gmem = structure.unflatten([refs[position[id(x)]] for x in leaves])
        outputs_gmem = out_structure.unflatten(refs[len(operands) :])
        allocate(lambda *scratch: body(inputs_gmem, outputs_gmem, *scratch), smem, barriers)

    extra: dict[str, Any] = {}
    if interpreting():
        extra["interpret"] = plgpu.InterpretGPUParams(detect_races=detect_races)
    kernel = plgpu.kernel(
        entry,
        out_type=tuple(out_leaves),
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        num_threads=num_warpgroups,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, unsafe_no_auto_barriers=not auto_barriers
        ),
        kernel_name=name,
        **extra,
    )
    results = jax.custom_batching.sequential_vmap(kernel)(
        *operands
    )  # kernels have no batching rule
    return out_structure.unflatten(results)


def allocate(body: Callable[[Any, Any], None], smem: MemorySpec, barriers: MemorySpec) -> None:
    """Inside a kernel: runs `body(smem, barriers)` with this shared memory, one allocation for all warpgroups."""
    pl.run_scoped(body, smem, barriers, collective_axes="wg")
