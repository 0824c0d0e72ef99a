"""Inside shard_map: arrays made to vary over the mesh axes over which others do."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array


def vary_with(tree: Any, *arrays: Array) -> Any:
    """The same pytree, each of whose arrays varies over every mesh axis over which one of `arrays` does.

    The carry of a scan must vary as what it meets does, also when it begins as zeros; a kernel's result is not marked
    as varying, though its operands are. The gradient of an array that did not vary over an axis is then summed over it.
    Outside of shard_map nothing happens.
    """
    varying = [x for x in arrays if jax.typeof(x).manual_axis_type.varying]
    if not varying:
        return tree
    # What an array is selected with, it varies with.
    firsts = [lax.stop_gradient(jnp.ravel(x)[0]).astype(jnp.float32) for x in varying]
    other = jnp.stack(firsts).sum()
    return jax.tree.map(lambda x: jnp.where(True, x, other.astype(x.dtype)), tree)
