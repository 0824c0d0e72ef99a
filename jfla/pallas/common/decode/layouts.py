"""Register layouts of the decode kernel: shapes of a call -> layouts, and moves between them.

Four warps split the columns of a state [K, v_block]. In a warp, lanes form a grid, `lanes_down` by
`lanes_across`, in which a lane holds patches of (usually) 4 rows by 4 columns: 16 bytes of a row
are one access to global memory, and a sum over K takes log2(lanes_down) shuffles.
A state of bfloat16 has 8 columns in a patch for the same 16 bytes, if the columns of v are 16-bit, too.
"""

import math
from typing import NamedTuple

from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jfla.pallas.mgpu.thread import LANES
from jfla.pallas.mgpu.types import Layout, Reg

_WARPS = 4  # of a warpgroup
_ACCESS_BYTES = 16  # of one access to global memory
_KEYS = 4  # channels of q or k that a lane holds side by side
_PATCH_ROWS = 4


class DecodeLayouts(NamedTuple):
    """The layouts of a call, by the shape of what lies so."""

    state: Layout  # [K, v_block]
    row_vector: Layout  # [K]: a value for each row of the state
    # [v_block] or [T, v_block]: a value for each column of the state
    column_vector: Layout
    token_keys: Layout  # [T, K]
    token_scalars: Layout  # [T]
    key_vector: Layout  # [K]: a value for each column of [T, K]


def decode_layouts(
    time: int, key_dim: int, v_block: int, column_bytes: int
) -> DecodeLayouts:
    """On the host: the layouts for T tokens and a block [K, v_block], of so many bytes a column."""
    state = _state_layout(key_dim, v_block, _ACCESS_BYTES // column_bytes)
    token_keys = _token_keys_layout(time, key_dim)
    return DecodeLayouts(
        state=state,
        row_vector=state.reduce(1),
        column_vector=state.reduce(0),
        token_keys=token_keys,
        token_scalars=token_keys.reduce(1),
        key_vector=token_keys.reduce(0),
    )


def _state_layout(key_dim: int, v_block: int, vector: int) -> Layout:
    """[K, v_block]: warps side by side along the columns, lanes a grid of patches."""
    warp_columns = v_block // _WARPS
    vector = min(vector, warp_columns)
    lanes_across = warp_columns // vector
    lanes_down = LANES // lanes_across
    patch_rows = min(_PATCH_ROWS, key_dim // lanes_down)
    rows = lanes_down * patch_rows
    tiles = ((rows, v_block), (rows, warp_columns), (patch_rows, vector))
    return plgpu.Layout.TILED(
        plgpu.Tiling(tiles),
        warp_dims=(-5,),
        lane_dims=(-4, -3) if lanes_across > 1 else (-4,),
        vector_dim=-1,
    )


def _token_keys_layout(time: int, key_dim: int) -> Layout:
    """[T, K]: a warp has whole tokens, so that a sum over K stays in it.

    Warps split the tokens by gcd(T, 4); the warps that are left over repeat the work of the others.
    """
    split = math.gcd(time, _WARPS)
    split_dims = (-3,) if split > 1 else ()
    replicas = (plgpu.Replicated(_WARPS // split),) if split < _WARPS else ()
    channels = min(key_dim, LANES * _KEYS)
    return plgpu.Layout.TILED(
        plgpu.Tiling(((split, channels), (channels // LANES,))),
        warp_dims=split_dims + replicas,
        lane_dims=(-2,),
        vector_dim=-1,
    )


def broadcast_to_layout(
    x: Reg, shape: tuple[int, ...], axis: int, layout: Layout
) -> Reg:
    """A vector along `axis` of an array of this shape and layout, repeated along the other."""
    return plgpu.layout_cast(lax.broadcast_in_dim(x, shape, [axis]), layout)
