"""From the affine map of every device's stretch of time to the state that each device begins from.

Two ways, by the number of devices. Up to `MAX_GATHERED` every device gets all maps and applies those before its own
one after the other: one collective. More compose their maps by doubling: of D devices each sends its map log2(D) times,
and has room for one other at any time.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jfla import affine
from jfla.types import AxisName

MAX_GATHERED = 8


def handed_over(
    r: Float[Array, "*batch K K"],
    c: Float[Array, "*batch K V"],
    axis: AxisName,
    *,
    reverse: bool = False,
) -> Float[Array, "*batch K V"]:
    """The state that the devices before this one leave, each by S -> R S + C; zeros on the first.

    In `reverse` the devices hand over from the last to the first.
    """
    if lax.axis_size(axis) <= MAX_GATHERED:
        return _gathered(r, c, axis, reverse)
    return _by_doubling(r, c, axis, reverse)


def _gathered(r: Array, c: Array, axis: AxisName, reverse: bool) -> Array:
    key_dim = r.shape[-1]
    maps = jnp.concatenate([r, c], axis=-1)
    of_all = lax.all_gather(maps, axis, axis=r.ndim - 2)
    states = affine.chain(
        None, of_all[..., :key_dim], of_all[..., key_dim:], reverse=reverse
    )
    return lax.dynamic_index_in_dim(states, lax.axis_index(axis), -3, keepdims=False)


def _by_doubling(r: Array, c: Array, axis: AxisName, reverse: bool) -> Array:
    """Prefixes of 1, 2, 4, .. maps; then each device hands over where its prefix leads to from zeros."""
    size = lax.axis_size(axis)
    key_dim = r.shape[-1]
    from_first = lax.axis_index(axis)
    if reverse:
        from_first = size - 1 - from_first
    distance = 1
    while distance < size:
        has_before = from_first >= distance
        # Of what is composed last only the constant part is needed.
        is_last = 2 * distance >= size
        sent = c if is_last else jnp.concatenate([r, c], axis=-1)
        before = _shifted(sent, distance, axis, reverse)
        composed = jnp.matmul(r, before, precision="highest")
        c_composed = composed if is_last else composed[..., key_dim:]
        c = jnp.where(has_before, c_composed + c, c)
        if not is_last:
            r = jnp.where(has_before, composed[..., :key_dim], r)
        distance *= 2
    return _shifted(c, 1, axis, reverse)


def _shifted(x: Array, distance: int, axis: AxisName, reverse: bool) -> Array:
    """What the device at that distance has; zeros where there is none."""
    size = lax.axis_size(axis)
    pairs = [(i, i + distance) for i in range(size - distance)]
    if reverse:
        pairs = [(to, origin) for origin, to in pairs]
    return lax.ppermute(x, axis, pairs)
