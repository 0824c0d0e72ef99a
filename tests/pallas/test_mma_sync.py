"""Products by mma.sync, lowered for a GPU: interpret mode takes `jnp.dot` in their place."""

from typing import Any

import jax
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

import jfla
from jfla.pallas.mgpu.copies import store_from_layout
from jfla.pallas.mgpu.launch import launch
from jfla.pallas.mgpu.layouts import WGMMA
from jfla.pallas.mgpu.mma import zeros
from jfla.pallas.mgpu.mma_sync import mma_sync
from jfla.pallas.mgpu.smem import F32, tile_smem, transposed

SIZE = 64
Registers = list[Any]


def _registers(x: jax.Array) -> Registers:
    """In a kernel: the registers of x, filled while the kernel is lowered."""
    found: Registers = []

    @plgpu.inline_mgpu(arg_types=(WGMMA,))
    def note(_: Any, x: Any) -> None:
        found.extend(x.registers.flat)

    note(x)  # pyright: ignore[reportCallIssue]: the first argument is Mosaic's
    return found


@pytest.mark.parametrize(
    "view", [lambda tile: tile, transposed], ids=["as it is", "transposed"]
)
def test_a_product_leaves_the_accumulator_that_it_begins_from(view):
    """Two products may begin from one value: a kernel of one step has the same zeros for all of its sums."""
    found: list[Registers] = []

    def body(_: None, out_gmem: Any, tiles: Any, barriers: tuple) -> None:
        begin = zeros(SIZE, SIZE)
        before = _registers(begin)
        product = mma_sync(begin, tiles.at[0], view(tiles.at[1]))
        found.extend((before, _registers(begin), _registers(product)))
        store_from_layout(out_gmem, product)

    def run() -> jax.Array:
        out = jax.ShapeDtypeStruct((SIZE, SIZE), F32)
        tiles = tile_smem(2, SIZE, SIZE)
        return launch(
            body,
            None,
            out,
            grid={"cta": 1},
            num_warpgroups=1,
            smem=tiles,
            name="product",
        )

    with jfla.pallas.compiling_for("8.0"):
        jax.jit(run).trace().lower(lowering_platforms=("cuda",))
    before, after, product = found
    # Each of a warpgroup's 128 threads holds its elements in pairs.
    assert len(before) == SIZE * SIZE // 128 // 2
    assert after == before
    assert not any(register in before for register in product)
