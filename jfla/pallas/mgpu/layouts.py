"""How values lie over the threads of a warpgroup: as accumulators of the tensor cores, and their rows and columns."""

from jax.experimental.pallas import mosaic_gpu as plgpu

from jfla.pallas.mgpu.types import Layout

WGMMA: Layout = plgpu.Layout.WGMMA
ROWS: Layout = WGMMA.reduce(1)  # a vector with a value per row
COLS: Layout = WGMMA.reduce(0)  # a vector with a value per column
# Four neighbours of a row to a thread, for loads of 16 bytes.
WIDE: Layout = plgpu.Layout.WGMMA_UPCAST_2X
TILE_ROWS = 64  # of a tile in that layout, or a multiple
