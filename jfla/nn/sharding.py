"""Logical axes of parameters and activations, and the delta rule under a mesh.

Parameters carry the names below as Flax partitioning metadata; `flax.nnx.logical_axis_rules` says
which mesh axis, if any, each name stands for. Without a mesh (`jax.set_mesh`) none of this does
anything.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from flax.core.spmd import get_logical_axis_rules
from jax import Array
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from jfla.gates import Gate
from jfla.types import DeltaRuleOutput

BATCH = "batch"
TIME = "time"
EMBED = "embed"
HEADS = "heads"
MLP = "mlp"
VOCAB = "vocab"

Axes = tuple[str | None, ...]
MeshAxis = str | tuple[str, ...] | None
Initializer = Callable[[Array, tuple[int, ...], DTypeLike], Array]

_REMEDY = "make the mesh with jax.make_mesh(..., axis_types=(jax.sharding.AxisType.Auto, ...))"


def annotated(initializer: Initializer, axes: Axes) -> Initializer:
    """The initializer of a parameter with a logical name (or None) per axis, sharded by a mesh."""

    def sharded(key: Array, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        return constrain(initializer(key, shape, dtype), axes)

    # Flax's own eager sharding fails without a mesh or a rule, and whether it is on is part of a
    # parameter's type.
    return nnx.with_partitioning(sharded, axes, eager_sharding=False)


def partitioned(
    initializer: Initializer,
    axes: Axes,
    rngs: nnx.Rngs,
    shape: tuple[int, ...],
    dtype: DTypeLike,
) -> nnx.Param[Array]:
    """A parameter with a logical axis name (or None) per axis."""
    return nnx.Param(annotated(initializer, axes)(rngs.params(), shape, dtype))


def constrain(x: Array, axes: Axes) -> Array:
    """Shards an array along its logical axes.

    Axes without a name, and those whose length the mesh axis does not divide, are replicated.
    """
    if not any(_mesh_axis(axis) for axis in axes):
        return x
    return jax.lax.with_sharding_constraint(x, _spec(axes, x.shape))


def placement(axes: Axes, shape: tuple[int, ...]) -> NamedSharding | None:
    """Where the mesh puts an array with these logical axes; None without a mesh."""
    mesh = jax.sharding.get_mesh()
    return None if mesh.empty else NamedSharding(mesh, _spec(axes, shape))


def _spec(axes: Axes, shape: tuple[int, ...]) -> P:
    return P(
        *(_dividing(_mesh_axis(axis), length) for axis, length in zip(axes, shape))
    )


def refuse_explicit(name: str, x: Array) -> None:
    """Raises `ValueError` for an array sharded over explicit mesh axes.

    With those, every layer would have to name the sharding of what it computes.
    """
    spec = jax.typeof(x).sharding.spec
    if any(axis is not None for axis in spec):
        raise ValueError(
            f"the mesh axes of {name} must be AxisType.Auto, "
            f"got {spec} over Explicit ones: {_REMEDY}"
        )


def delta_rule(
    op: Callable[..., DeltaRuleOutput],
    arrays: tuple[Array, ...],
    gate: Gate | None,
    initial_state: Array | None,
    segment_ids: Array | None,
    *,
    split_time: bool,
) -> DeltaRuleOutput:
    """`op` on q, k, v, g, beta; under a mesh every device runs it on its own rows, heads and time.

    The compiler cannot partition a kernel by itself. Rows and heads are independent; from one
    stretch of time to the next goes the state, which an op that takes `sequence_axis` hands on
    (`split_time`).
    """

    def local(
        arrays: tuple[Array, ...],
        gate: Gate | None,
        initial_state: Array | None,
        segment_ids: Array | None,
    ) -> tuple[Array, Array | None]:
        stretch = {} if time is None else {"sequence_axis": time}
        states = {"initial_state": initial_state, "segment_ids": segment_ids}
        out = op(*arrays, gate=gate, **states, **stretch)
        return out.output, out.final_state

    q, _, v, *_ = arrays
    batch = _dividing(_mesh_axis(BATCH), q.shape[0])
    heads = _dividing(_mesh_axis(HEADS), q.shape[2], v.shape[2])
    time = time_axis(q.shape[1]) if split_time else None
    if batch is None and heads is None and time is None:
        return DeltaRuleOutput(*local(arrays, gate, initial_state, segment_ids))
    by_head = P(batch, time, heads)
    by_state = P(batch, heads)
    run = jax.shard_map(
        local,
        in_specs=(by_head, P(heads), by_state, P(batch, time)),
        out_specs=(by_head, by_state),
        check_vma=False,
    )
    return DeltaRuleOutput(*run(arrays, gate, initial_state, segment_ids))


def time_axis(length: int) -> MeshAxis:
    """The mesh axis over which an axis of time of that length is split, else None."""
    return _dividing(_mesh_axis(TIME), length)


def with_tokens_before(
    function: Callable[[Array, Array, Array | None], Array],
    x: Array,
    kernel: Array,
    segment_ids: Array | None,
    tail: Array,
) -> Array:
    """`function(x, kernel, ids)` of tokens, heads and channels, with the tokens of `tail` in front.

    x is `[B, T, H, K]`, kernel `[W, H, K]`, the result `[B, T, H, K]`. Where time is split over
    devices, what comes before a stretch is the end of the one before it, which its device sends.
    """
    past = tail.shape[1]

    def local(x: Array, kernel: Array, ids: Array | None, tail: Array) -> Array:
        padded = _after(tail.astype(x.dtype), x, time)
        if ids is not None:
            ids = _after(jnp.repeat(ids[:, :1], past, axis=1), ids, time)
        return function(padded, kernel, ids)

    length = x.shape[1]
    time = time_axis(length)
    if time is None or length // _size(time) < past:
        time = None
        return local(x, kernel, segment_ids, tail)
    batch = _dividing(_mesh_axis(BATCH), x.shape[0])
    heads = _dividing(_mesh_axis(HEADS), x.shape[2])
    tokens = P(batch, time, heads)
    run = jax.shard_map(
        local,
        in_specs=(tokens, P(None, heads), P(batch, time), P(batch, None, heads)),
        out_specs=tokens,
        check_vma=False,
    )
    return run(x, kernel, segment_ids, tail)


def _after(first: Array, x: Array, axis: MeshAxis) -> Array:
    """x behind `first`, or behind as many tokens from the end of x on the device before."""
    if axis is not None:
        pairs = [(i, i + 1) for i in range(jax.lax.axis_size(axis) - 1)]
        before = jax.lax.ppermute(x[:, x.shape[1] - first.shape[1] :], axis, pairs)
        first = jnp.where(jax.lax.axis_index(axis) == 0, first, before)
    return jnp.concatenate([first, x], axis=1)


def _dividing(mesh_axis: MeshAxis, *lengths: int) -> MeshAxis:
    """The mesh axis if its size divides every length, else None."""
    size = _size(mesh_axis)
    return None if any(length % size for length in lengths) else mesh_axis


def _mesh_axis(logical: str | None) -> MeshAxis:
    """The mesh axis (or axes) of a logical axis where the compiler partitions, else None."""
    mesh = jax.sharding.get_abstract_mesh()
    if logical is None or mesh.empty:
        return None
    name = dict(get_logical_axis_rules()).get(logical, logical)
    axis_types = dict(zip(mesh.axis_names, mesh.axis_types))
    found = {axis_types.get(axis) for axis in _names(name)}
    if AxisType.Explicit in found:
        raise ValueError(
            f"mesh axis {name!r} for {logical!r} must be AxisType.Auto, got Explicit: {_REMEDY}"
        )
    return name if found == {AxisType.Auto} else None


def _size(mesh_axis: MeshAxis) -> int:
    """The number of devices along a mesh axis (or axes); 1 for one that the mesh does not have."""
    shape = jax.sharding.get_abstract_mesh().shape
    return math.prod(shape.get(axis, 1) for axis in _names(mesh_axis))


def _names(mesh_axis: MeshAxis) -> tuple[str | None, ...]:
    return mesh_axis if isinstance(mesh_axis, tuple) else (mesh_axis,)
