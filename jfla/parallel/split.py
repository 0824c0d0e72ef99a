"""Kernels that XLA's partitioner splits over devices by batch and heads, as it splits plain JAX.

To the partitioner a kernel is opaque: it would gather the operands, and every device would run the whole call.
`split_by` says which dimensions of a function may be split. Each device then runs the function on its own part.

Dimensions are named as in annotations, "B T HV K". Batch rows and heads do not see each other, so that B, H and HV may
be split, H and HV together: a device has the value heads of its query heads. All other dimensions are whole on every
device, and what cannot be split so is gathered.
"""

import functools
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer, eval_jaxpr
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding

from jfla.pallas.context import interpreting

Names = tuple[str, ...]
SPLIT = ("B", "H", "HV")


class _Described(NamedTuple):
    """A function's operands or results, flat."""

    names: list[Names]  # of the dimensions of each
    shapes: list[tuple[int, ...]]

    def size(self, name: str) -> int | None:
        """Of the first dimension of that name."""
        for names, shape in zip(self.names, self.shapes, strict=True):
            if name in names:
                return shape[names.index(name)]
        return None


def split_by(
    operand_dims: tuple[Any, ...],
    result_dims: Any,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorates a function of pytrees of arrays: where they are sharded over B or heads, each device runs its part.

    `operand_dims` and `result_dims` are prefixes of the pytrees of operands and results, whose leaves name dimensions.
    An array has as many of the names as it has dimensions. The function is traced for the shapes of a part, outside of
    the call: it must get all that depends on the shape from its operands, and no tracer from around it.

    On one device the function is lowered as if it were called. Under `vmap`, and inside shard_map, nothing is split;
    nor where kernels are interpreted, which JAX does on one device only.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*operands: Any) -> Any:
            if interpreting() or jax.sharding.get_abstract_mesh().manual_axes:
                return function(*operands)
            return _splittable(function, operand_dims, result_dims)(*operands)

        return call

    return decorate


def why_gathered(operand_dims: Any, operands: Any) -> str | None:
    """Why a function of these arrays, laid out as they are, runs whole on every device; None where it does not.

    `operand_dims` are prefixes of the pytrees of operands, as for `split_by`. What is traced has no layout yet.
    """
    arrays = jax.tree.leaves(operands)
    described = _Described(_names_of(operand_dims, operands), [x.shape for x in arrays])
    layouts: dict[str, set[Any]] = {"rows": set(), "heads": set()}
    for names, x in zip(described.names, arrays, strict=True):
        for name, size, parts in _split_dimensions(names, x):
            if parts is None:
                return f"an array [{name}] is not split evenly"
            if name not in SPLIT:
                return f"{name} is split over {len(set(parts))} devices"
            heads = described.size("H") or size
            if name != "B" and heads % len(set(parts)):
                return f"{name} is split over {len(set(parts))} devices, which do not divide H = {heads}"
            layouts["rows" if name == "B" else "heads"].add(parts)
    for kind, found in layouts.items():
        if len(found) > 1:
            return f"the {kind} are not split alike in all arrays"
    return None


def _split_dimensions(
    names: Names, x: Any
) -> Iterator[tuple[str, int, tuple[Any, ...] | None]]:
    """The dimensions of an array that are split over devices: name, size, and each device's part; None if unequal."""
    sharding = None if isinstance(x, Tracer) else getattr(x, "sharding", None)
    if sharding is None or len(sharding.device_set) == 1:
        return
    try:
        parts = sharding.devices_indices_map(x.shape)
    except ValueError:
        yield " ".join(names), x.size, None
        return
    in_order = [parts[device] for device in sorted(parts, key=_device_id)]
    for axis, (name, size) in enumerate(zip(names, x.shape, strict=True)):
        of_devices = tuple(_part(indices[axis], size) for indices in in_order)
        if set(of_devices) != {(0, 1)}:
            yield name, size, of_devices


def _splittable(
    function: Callable[..., Any],
    operand_dims: tuple[Any, ...],
    result_dims: Any,
) -> Callable[..., Any]:
    """The function as one that the partitioner asks how to split; under `vmap` the function itself."""

    @custom_vmap
    def call(*operands: Any) -> Any:
        return _partitioned(function, operand_dims, result_dims, operands)

    @call.def_vmap
    def batched(axis_size: int, in_batched: Any, *operands: Any) -> Any:
        flat, structure = jax.tree.flatten(operands)
        in_axes = [
            0 if is_batched else None for is_batched in jax.tree.leaves(in_batched)
        ]

        def of_flat(*flat: Any) -> Any:
            return function(*structure.unflatten(flat))

        results = jax.vmap(of_flat, in_axes=in_axes, axis_size=axis_size)(*flat)
        return results, jax.tree.map(_true, results)

    return call


def _true(_: Any) -> bool:
    return True


def _partitioned(
    function: Callable[..., Any],
    operand_dims: tuple[Any, ...],
    result_dims: Any,
    operands: tuple[Any, ...],
) -> Any:
    flat, structure = jax.tree.flatten(operands)
    whole, shapes = jax.make_jaxpr(function, return_shape=True)(*operands)
    flat_shapes, result_structure = jax.tree.flatten(shapes)
    num_operands = len(flat)

    def of_whole(*flat: Any) -> list[Any]:
        return eval_jaxpr(whole.jaxpr, flat[num_operands:], *flat[:num_operands])

    def of_part(*flat: Any) -> list[Any]:
        return jax.tree.leaves(function(*structure.unflatten(flat[:num_operands])))

    # Constants go in as operands, because custom_partitioning takes no function that has some.
    flat += whole.consts
    names = _names_of(operand_dims, operands) + [
        ("constant",) * x.ndim for x in whole.consts
    ]
    described = _Described(names, [x.shape for x in flat])
    results = _Described(_names_of(result_dims, shapes), [x.shape for x in flat_shapes])
    call = custom_partitioning(of_whole)
    call.def_partition(
        _partition(_in_this_context(of_part), described, results),
        decode_shardings=False,
        **_sharding_rule(described, results),
    )
    return result_structure.unflatten(call(*flat))


def _names_of(dims: Any, tree: Any) -> list[Names]:
    """Of every array of the pytree, of which `dims` is a prefix."""
    labels, structure = jax.tree.flatten(dims)
    parts = structure.flatten_up_to(tree)
    return [
        tuple(label.split()[: x.ndim])
        for label, part in zip(labels, parts, strict=True)
        for x in jax.tree.leaves(part)
    ]


def _in_this_context(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function traced with the settings of here and now, for when the compiler asks for a part.

    There is no mesh in a part, also where the compiler asks within `jax.set_mesh`.
    """
    precision = jax.config.jax_default_matmul_precision
    x64 = jax.config.jax_enable_x64

    @functools.wraps(function)
    def in_context(*operands: Any) -> Any:
        with (
            jax.default_matmul_precision(precision),
            jax.enable_x64(x64),
            jax.sharding.use_abstract_mesh(AbstractMesh((), ())),
        ):
            return function(*operands)

    return in_context


def _sharding_rule(operands: _Described, results: _Described) -> dict[str, Any]:
    """For `def_partition`: a factor for the batch, one for the heads, and whole ones for everything else."""
    heads = operands.size("H") or 1
    group = (operands.size("HV") or heads) // heads
    whole: list[str] = []  # in the order in which they occur

    def new_whole() -> str:
        whole.append(f"whole{len(whole)}")
        return whole[-1]

    def factor(name: str) -> str:
        if name == "B":
            return "batch"
        if name not in SPLIT or heads == 1:
            return new_whole()
        if name == "H" or group == 1:
            return "heads"
        if "group" not in whole:
            whole.append("group")
        return "(heads group)"

    def side(described: _Described) -> str:
        return ", ".join(
            " ".join(factor(name) for name in names) for names in described.names
        )

    rule = f"{side(operands)} -> {side(results)}"
    sizes = {"group": group} if "group" in whole else {}
    return {"sharding_rule": rule, "need_replication_factors": tuple(whole), **sizes}


def _partition(
    function: Callable[..., Any],
    operands: _Described,
    results: _Described,
) -> Callable[..., Any]:
    """The compiler's callback: how operands and results are laid out, and what each device runs."""

    def partition(mesh: Mesh, operand_parts: Any, result_parts: Any) -> tuple[Any, ...]:
        of_operands = [x.sharding for x in operand_parts]
        of_results = [x.sharding for x in result_parts]
        if mesh.empty:
            devices = sorted(of_operands[0].device_set, key=_device_id)
            mesh = Mesh(np.array(devices), ("device",))
        names = [*operands.names, *results.names]
        shapes = [*operands.shapes, *results.shapes]
        if not _aligned(names, shapes, [*of_operands, *of_results]):
            everywhere = NamedSharding(mesh, PartitionSpec())
            of_operands = [everywhere] * len(of_operands)
            of_results = [everywhere] * len(of_results)
        return mesh, function, of_results, tuple(of_operands)

    return partition


def _device_id(device: Any) -> int:
    return device.id


def _aligned(
    names: list[Names], shapes: list[tuple[int, ...]], shardings: list[Sharding]
) -> bool:
    """Whether each device has the same rows and the same heads of everything, and the whole of the rest.

    Where a dimension is not split evenly it does not.
    """
    found: dict[str, set[Any]] = {"batch": set(), "heads": set(), "whole": set()}
    for labels, shape, sharding in zip(names, shapes, shardings, strict=True):
        try:
            parts = sharding.devices_indices_map(shape)
        except ValueError:
            return False
        in_order = [parts[device] for device in sorted(parts, key=_device_id)]
        for axis, (label, size) in enumerate(zip(labels, shape, strict=True)):
            kind = "batch" if label == "B" else "heads" if label in SPLIT else "whole"
            found[kind].add(tuple(_part(indices[axis], size) for indices in in_order))
    whole = all(set(parts) == {(0, 1)} for parts in found["whole"])
    return whole and len(found["batch"]) <= 1 and len(found["heads"]) <= 1


def _part(indices: slice, size: int) -> tuple[Fraction, Fraction]:
    """Where a device's part of a dimension begins and ends, in fractions of the dimension."""
    if size == 0:
        return Fraction(0), Fraction(1)
    start, stop, _ = indices.indices(size)
    return Fraction(start, size), Fraction(stop, size)
