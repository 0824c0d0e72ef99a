"""Launches a kernel: operands, grid, warpgroups and shared memory; compiled for the GPU or interpreted anywhere."""

import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.core import eval_jaxpr
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import LoweringSemantics
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from jfla.pallas.context import interpreting
from jfla.pallas.machine import for_same_machine
from jfla.pallas.mgpu import row_tiles as _row_tiles  # noqa: F401  copies from any row on
from jfla.pallas.mgpu import target as _target  # noqa: F401  Mosaic asks it for the architecture
from jfla.pallas.mgpu.fingerprint import fingerprint
from jfla.pallas.mgpu.kernel_call import call
from jfla.pallas.mgpu.module_name import name_module
from jfla.pallas.mgpu.registers import check_registers
from jfla.pallas.mgpu.types import Barrier, MemorySpec, Smem, Tree

_REDUCTION_BYTES = plgpu.CompilerParams().reduction_scratch_bytes

# body(inputs_gmem, outputs_gmem, smem, barriers)
Body = Callable[[Tree, Tree, Smem, Barrier], None]


def launch(
    body: Body,
    inputs: Tree,
    outputs: Tree,
    *,
    grid: dict[str, int],
    num_warpgroups: int,
    registers: tuple[int, ...] = (),
    smem: MemorySpec = (),
    barriers: MemorySpec = (),
    name: str,
    auto_barriers: bool = True,
    detect_races: bool = True,
    reduces_across_warps: bool = True,
) -> Tree:
    """Runs `body` on every point of `grid`, by axis name, and returns arrays in the structure of `outputs`.

    `inputs` is a pytree of arrays, `outputs` one of `jax.ShapeDtypeStruct`, `smem` and `barriers` of what is allocated
    for a CTA; None in any of them stays None. An input may be a `jax.Ref`, which the kernel may write. The warpgroup's
    number is the axis "wg".

    An array that occurs twice among the inputs becomes one operand: every TMA descriptor costs compile time.
    Without `auto_barriers` the threads of a warpgroup synchronise only where the kernel says so. `detect_races` is of
    interpret mode, whose detector reports CTAs that synchronise through global memory.
    `registers` are the limits that warpgroups set themselves, from the first on.
    A kernel that never `reduces_across_warps`, as over rows of tiles, spares the shared memory for it.
    """
    if registers:
        check_registers(name, registers, num_warpgroups)
    leaves, structure = jax.tree.flatten(inputs)
    out_leaves, out_structure = jax.tree.flatten(outputs)
    operands = list({id(x): x for x in leaves}.values())
    position = {id(x): i for i, x in enumerate(operands)}
    order = [position[id(x)] for x in leaves]
    num_operands = len(operands)

    def entry(*refs: Any) -> None:
        name_module(name)
        inputs_gmem = structure.unflatten([refs[i] for i in order])
        outputs_gmem = out_structure.unflatten(refs[num_operands:])

        def with_scratch(smem: Smem, barriers: Barrier) -> None:
            body(inputs_gmem, outputs_gmem, smem, barriers)

        allocate(with_scratch, smem, barriers)

    interpret: Any = False
    if interpreting():
        _check_threads(name, num_warpgroups)
        interpret = plgpu.InterpretGPUParams(detect_races=detect_races)
    kernel = plgpu.kernel(
        for_same_machine(entry),
        out_type=tuple(out_leaves),
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        num_threads=num_warpgroups,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            # Loads and casts name their layouts. Inferring them takes two thirds of the time of lowering KDA's kernels.
            lowering_semantics=LoweringSemantics.Lane,
            unsafe_no_auto_barriers=not auto_barriers,
            reduction_scratch_bytes=_REDUCTION_BYTES if reduces_across_warps else 0,
        ),
        kernel_name=name,
        interpret=interpret,
    )
    if not interpret:
        sizes = [(x.shape, x.dtype, isinstance(x, jax.Ref)) for x in operands]
        called = (sizes, order, str(structure), out_leaves, str(out_structure))
        options = (auto_barriers, reduces_across_warps)
        launched = (name, list(grid.items()), num_warpgroups, smem, barriers, options)
        key = fingerprint(body, called, launched)
        kernel = _on_arrays(name, kernel, out_leaves, key)
    # Kernels have no batching rule.
    results = untracked(jax.custom_batching.sequential_vmap(kernel), operands)
    return out_structure.unflatten(results)


def _on_arrays(
    name: str, kernel: Callable[..., Any], outputs: list[Any], key: str | None
) -> Callable[..., Any]:
    """The kernel as a call of a program, with arrays in the place of references: read before it, and written after."""

    def run(*operands: Any) -> Any:
        written = [i for i, x in enumerate(operands) if isinstance(x, jax.Ref)]

        def on_arrays(*arrays: Array) -> Sequence[Array]:
            inputs: list[Any] = list(arrays)
            for i in written:
                inputs[i] = jax.new_ref(inputs[i])
            results = kernel(*inputs)
            return (*results, *(jax.freeze(inputs[i]) for i in written))

        arrays = [x[...] if i in written else x for i, x in enumerate(operands)]
        left = [jax.ShapeDtypeStruct(arrays[i].shape, arrays[i].dtype) for i in written]
        results = call(name, on_arrays, arrays, [*outputs, *left], key)
        for i, x in zip(written, results[len(outputs) :]):
            operands[i][...] = x
        return results[: len(outputs)]

    return run


def untracked(kernel: Callable[..., Any], operands: list[Any]) -> Any:
    """The kernel's results; inside shard_map it is traced as if its operands did not vary over the mesh.

    What it loads would vary and what it makes itself would not, so that the types of a loop's carry could not agree.
    """
    if not any(jax.typeof(x).manual_axis_type.varying for x in operands):
        return kernel(*operands)
    traced = jax.make_jaxpr(kernel)(
        *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands)
    )
    return eval_jaxpr(traced.jaxpr, traced.consts, *operands)


def _check_threads(name: str, num_warpgroups: int) -> None:
    """Refuses a kernel that could not end when interpreted.

    Each warpgroup is a program of its own on XLA's pool of CPU threads, and keeps its thread while it waits for
    another one. With fewer threads than warpgroups the last one never starts.
    """
    if jax.default_backend() != "cpu":
        return
    processors = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        processors = len(os.sched_getaffinity(0))
    # XLA reads this variable, too.
    processors = int(os.environ.get("NPROC") or processors)
    threads = max(processors, jax.local_device_count())
    if threads < num_warpgroups:
        raise RuntimeError(
            f"interpret mode needs a thread for each of the {num_warpgroups} warpgroups of the kernel "
            f"{name}, and JAX has {threads} on this CPU; set "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={max(num_warpgroups, 4)} "
            "before JAX starts"
        )


def allocate(
    body: Callable[[Any, Any], None], smem: MemorySpec, barriers: MemorySpec
) -> None:
    """Inside a kernel: runs `body(smem, barriers)` with this shared memory, one allocation for all warpgroups."""
    pl.run_scoped(body, smem, barriers, collective_axes="wg")
