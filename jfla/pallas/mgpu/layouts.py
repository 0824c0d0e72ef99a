"""How values lie over the threads of a warpgroup: as accumulators of the tensor cores, and their rows and columns."""

from jax.experimental.mosaic.gpu.fragmented_array import Tiling
from jax.experimental.pallas import mosaic_gpu as plgpu

from jfla.pallas.mgpu.types import Layout

WGMMA: Layout = plgpu.Layout.WGMMA
ROWS: Layout = WGMMA.reduce(1)  # a vector with a value per row
COLS: Layout = WGMMA.reduce(0)  # a vector with a value per column
# Four neighbours of a row to a thread, for loads of 16 bytes.
WIDE: Layout = plgpu.Layout.WGMMA_UPCAST_2X
# Eight, for a tile of 16-bit elements in as few loads and stores as there can be. It takes more registers at a time.
WIDER: Layout = plgpu.Layout.WGMMA_UPCAST_4X
TILE_ROWS = 64  # of a tile in that layout, or a multiple


def whole_rows(columns: int) -> Layout:
    """Of an array of 64 or 128 columns: a warp has whole rows, a thread four neighbours of each.

    Loads and stores of a warp are contiguous, and a thread has the same columns of all of its rows.
    """
    if columns == 128:
        tiles = ((4, 128), (4,))
        warps = (-3,)
        lanes = (-2,)
    else:
        tiles = ((8, 64), (2, 64), (4,))
        warps = (-5,)
        lanes = (-3, -2)
    return plgpu.Layout.TILED(Tiling(tiles), warps, lanes, vector_dim=-1)
