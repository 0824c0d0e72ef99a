"""TMA copies of tiles whose first row is any row of an array in global memory.

Mosaic describes rows to TMA as tiles of eight, of which a copy takes whole ones: from another row on than a multiple of
eight, it would read zeros behind each tile. Here the tiles of a description overlap, so that eight rows from any one on
are within a tile. For copies that begin with a tile nothing changes, also in kernels that are not jfla's: Mosaic's
function is replaced for the whole process.
"""

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any

from jax.experimental.mosaic.gpu.launch_context import TileTransform
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import memref

ROWS_OF_TILE = 8


@dataclasses.dataclass(frozen=True)
class RowTileTransform(TileTransform):
    """Of [.., rows, columns] in global memory: [.., row tiles, column tiles, 2 ROWS_OF_TILE - 1, tile columns].

    Rows of a copy must be in the array: those behind its last whole tile are of none.
    """

    def transform_gmem_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        *lead, rows, columns = shape
        width = min(columns, self.tiling[1])
        return (
            *lead,
            max(rows // ROWS_OF_TILE, 1),
            columns // width,
            2 * ROWS_OF_TILE - 1,
            width,
        )

    def apply(self, ref: Any) -> Any:
        of_array = ir.MemRefType(ref.type)
        strides, offset = of_array.get_strides_and_offset()
        *lead, row_stride, column_stride = strides
        shape = list(self.transform_gmem_shape(of_array.shape))
        tile_strides = [
            ROWS_OF_TILE * row_stride,
            shape[-1] * column_stride,
            row_stride,
            column_stride,
        ]
        strides = [*lead, *tile_strides]
        layout = ir.StridedLayoutAttr.get(offset, strides)
        tiled = ir.MemRefType.get(
            shape, of_array.element_type, layout, of_array.memory_space
        )
        return memref.reinterpret_cast(
            tiled, ref, [], [], [],
            static_offsets=[offset],
            static_sizes=shape,
            static_strides=strides,
        )  # fmt: skip


_CORE: Any = sys.modules[plgpu.TilingTransform.__module__]
_of_transform: Callable[[Any], Any] = _CORE.to_gpu_transform


def row_tiles(transform: Any) -> Any:
    """Mosaic's transform of a reference, with tiles that overlap in global memory."""
    found = _of_transform(transform)
    if not isinstance(found, TileTransform):
        return found
    of_rows = len(found.tiling) == 2 and found.tiling[0] == ROWS_OF_TILE
    return RowTileTransform(found.tiling) if of_rows else found


_CORE.to_gpu_transform = row_tiles
