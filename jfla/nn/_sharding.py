"""Logical axes of parameters and activations, and the delta rule under a mesh: each device its own batch and heads.

Parameters carry the names below as Flax partitioning metadata; `flax.nnx.logical_axis_rules` says which mesh axis, if
any, each name stands for. Without a mesh (`jax.set_mesh`) none of this does anything.
"""

from collections.abc import Callable
from typing import Any, cast

import jax
from flax import nnx
from flax.core.spmd import get_logical_axis_rules
from jax import Array
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jfla._types import DeltaRuleOutput
from jfla.gates import Gate

BATCH, EMBED, HEADS, MLP, VOCAB = "batch", "embed", "heads", "mlp", "vocab"
Axes = tuple[str | None, ...]
_REMEDY = "make the mesh with jax.make_mesh(..., axis_types=(jax.sharding.AxisType.Auto, ...))"


def annotated(initializer: Callable, axes: Axes) -> Callable:
    """The initializer of a parameter with a logical axis name (or None) per axis, laid out along them under a mesh."""

    def laid_out(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
        return constrain(initializer(key, shape, dtype), axes)

    # Flax's own eager layout fails without a mesh or a rule, and whether it is on is part of a parameter's type.
    return nnx.with_partitioning(laid_out, axes, eager_sharding=False)


def partitioned(initializer: Callable, axes: Axes, rngs: nnx.Rngs, shape: tuple[int, ...], dtype: Any) -> nnx.Param:
    """A parameter with a logical axis name (or None) per axis."""
    return nnx.Param(annotated(initializer, axes)(rngs.params(), shape, dtype))


def constrain(x: Array, axes: Axes) -> Array:
    """Lays an array out along its logical axes; None, and what the mesh axis does not divide, is replicated."""
    names = [_mesh_axis(axis) for axis in axes]
    sizes = [_size(name) for name in names]
    if not any(names):
        return x
    spec = P(*(name if dim % size == 0 else None for name, dim, size in zip(names, x.shape, sizes)))
    return jax.lax.with_sharding_constraint(x, spec)


def refuse_explicit(name: str, x: Array) -> None:
    """Raises `ValueError` for an array spread over explicit mesh axes: with those, every layer would name layouts."""
    spec = jax.typeof(x).sharding.spec
    if any(axis is not None for axis in spec):
        raise ValueError(f"the mesh axes of {name} must be AxisType.Auto, got {spec} over Explicit ones: {_REMEDY}")


def delta_rule(
    op: Callable[..., DeltaRuleOutput],
    arrays: tuple[Array, ...],
    gate: Gate | None,
    initial_state: Array | None,
    segment_ids: Array | None,
    **options: Any,
) -> DeltaRuleOutput:
    """`op` on q, k, v, g, beta. Under a mesh every device runs it on its own rows and heads, with no communication.

    The compiler cannot split a kernel by itself, and need not: rows and heads do not see each other.
    """

    def local(arrays, gate, initial_state, segment_ids):
        return op(*arrays, gate=gate, initial_state=initial_state, segment_ids=segment_ids, **options)

    q, _, v, *_ = arrays
    batch, heads = _mesh_axis(BATCH), _mesh_axis(HEADS)
    batch = None if q.shape[0] % _size(batch) else batch
    heads = None if q.shape[2] % _size(heads) or v.shape[2] % _size(heads) else heads
    if batch is None and heads is None:
        return local(arrays, gate, initial_state, segment_ids)
    by_head = P(batch, None, heads)
    state = P(batch, heads)
    out_specs: Any = DeltaRuleOutput(cast(Any, by_head), cast(Any, state))
    return jax.shard_map(
        local,
        in_specs=(by_head, P(heads), state, P(batch)),
        out_specs=out_specs,
        check_vma=False,
    )(arrays, gate, initial_state, segment_ids)


def _mesh_axis(logical: str | None) -> Any:
    """The mesh axis (or axes) that a logical axis stands for where the compiler does the partitioning, else None."""
    mesh = jax.sharding.get_abstract_mesh()
    if logical is None or mesh.empty:
        return None
    name = dict(get_logical_axis_rules()).get(logical, logical)
    kinds = dict(zip(mesh.axis_names, mesh.axis_types))
    found = {kinds.get(axis) for axis in (name if isinstance(name, tuple) else (name,))}
    if AxisType.Explicit in found:
        raise ValueError(f"mesh axis {name!r} for {logical!r} must be AxisType.Auto, got Explicit: {_REMEDY}")
    return name if found == {AxisType.Auto} else None


def _size(name: Any) -> int:
    shape = jax.sharding.get_abstract_mesh().shape
    names = name if isinstance(name, tuple) else (name,)
    size = 1
    for axis in names:
        size *= shape.get(axis, 1)
    return size
