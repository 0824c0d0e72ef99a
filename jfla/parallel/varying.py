"""Inside shard_map: arrays made to vary over the mesh axes over which others do."""

from collections.abc import Iterable
from typing import Any

import jax
from jax import lax
from jaxtyping import Array


def vary_with(tree: Any, *arrays: Array) -> Any:
    """The same pytree, each of whose arrays varies over every mesh axis over which one of `arrays` does.

    The carry of a scan must vary as what it meets does, also when it begins as zeros; a kernel's result is not marked
    as varying, though its operands are. The gradient of an array that did not vary over an axis is then summed over it.
    Outside of shard_map nothing happens.
    """
    axes = frozenset().union(*(_varying_axes(x) for x in arrays))
    return vary_over(tree, axes)


def vary_over(tree: Any, axes: Iterable[str]) -> Any:
    """The same pytree, each of whose arrays varies over these mesh axes."""
    axes = frozenset(axes)

    def varying(x: Array) -> Array:
        missing = tuple(sorted(axes - _varying_axes(x)))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(varying, tree)


def _varying_axes(x: Array) -> frozenset[str]:
    return jax.typeof(x).manual_axis_type.varying
