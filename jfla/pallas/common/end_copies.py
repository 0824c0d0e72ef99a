"""Kernels jfla_copy_ends and jfla_return_ends: packed rows to copies of the last chunks of segments, and back.

Only chunks that are not whole have a copy (`jfla.pallas.segments`). Of most packings they are few, and XLA, which does
not know that, would copy as many rows as there could be.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int, Shaped

from jfla.pallas.common.chunk_index import TILE_V
from jfla.pallas.common.packed_rows import PackedRows
from jfla.pallas.mgpu.branches import when
from jfla.pallas.mgpu.copies import load_with_layout, store_from_layout
from jfla.pallas.mgpu.cp_async import THREADS
from jfla.pallas.mgpu.in_place import write_in_place
from jfla.pallas.mgpu.launch import launch, untracked
from jfla.pallas.mgpu.layouts import ROWS
from jfla.pallas.mgpu.tile_moves import VECTOR_BYTES
from jfla.pallas.mgpu.types import Barrier, Gmem, Index, Layout, Reg, Smem, Tree
from jfla.types import CHUNK

CTA_ROWS = 4  # that a warpgroup has in flight
# Bytes of a row that a warpgroup has in registers at a time, 64 for each thread.
MAX_ROW_BYTES = 8192


class End(NamedTuple):
    """The copy of a segment's last chunk that is not whole, and the first of the rows of it that a CTA takes."""

    batch: Index
    slot: Index
    first_token: Index  # of the chunk
    num_tokens: Index  # 0: the chunk is whole, and there is no copy
    first_row: Index

    @classmethod
    def of_cta(cls, bounds_gmem: Gmem) -> "End":
        """`bounds_gmem` is `SegmentChunks.bounds`."""
        cta = lax.axis_index("cta")
        ctas_per_end = jnp.int32(CHUNK // CTA_ROWS)
        num_slots = jnp.int32(bounds_gmem.shape[1] - 1)
        end = lax.div(cta, ctas_per_end)
        batch = lax.div(end, num_slots)
        slot = lax.rem(end, num_slots)
        first_row = lax.rem(cta, ctas_per_end) * CTA_ROWS
        end_token = bounds_gmem[batch, slot + 1]
        num_tokens = lax.rem(end_token - bounds_gmem[batch, slot], jnp.int32(CHUNK))
        return cls(batch, slot, end_token - num_tokens, num_tokens, first_row)

    def copy(self, tokens_gmem: Gmem, copies_gmem: Gmem, columns: Index) -> None:
        """From the caller's rows to the copy, with zeros behind the tokens."""
        rows = []
        for i in range(CTA_ROWS):
            row = self.first_row + i
            # Rows behind the tokens are a neighbour's, or behind the array's last one: the last token is read instead.
            token = self.first_token + jnp.minimum(row, self.num_tokens - 1)
            x = _load_row(tokens_gmem.at[self.batch, token, columns])
            is_token = jnp.broadcast_to(row < self.num_tokens, x.shape)
            rows.append(jnp.where(is_token, x, jnp.zeros_like(x)))
        for i, x in enumerate(rows):
            store_from_layout(
                copies_gmem.at[self.batch, self.slot, self.first_row + i, columns], x
            )

    def clear(self, _tokens_gmem: Gmem, copies_gmem: Gmem, columns: Index) -> None:
        """Zeros to the copy; without a load, which it would wait for."""
        for i in range(CTA_ROWS):
            target = copies_gmem.at[self.batch, self.slot, self.first_row + i, columns]
            (count,) = target.shape
            layout = _row_layout(count, target.dtype)
            zeros = plgpu.layout_cast(jnp.zeros(count, target.dtype), layout)
            store_from_layout(target, zeros)

    def give_back(self, tokens_gmem: Gmem, copies_gmem: Gmem, columns: Index) -> None:
        """From the copy to the caller's rows."""
        rows = []
        for i in range(CTA_ROWS):
            x = _load_row(
                copies_gmem.at[self.batch, self.slot, self.first_row + i, columns]
            )
            rows.append(x)
        for i, x in enumerate(rows):
            row = self.first_row + i
            target = tokens_gmem.at[self.batch, self.first_token + row, columns]
            when(row < self.num_tokens)(functools.partial(store_from_layout, target, x))


def copy_ends(
    rows: list[Shaped[Array, "B T _ _"]], bounds: Int[Array, "B S_plus_2"]
) -> list[Shaped[Array, "B S_plus_2 C _ _"]]:
    """Of every array the copies of ends that there are, with zeros behind their tokens; all of slot S is zeros.

    `bounds` has the first token of slots 0 .. S, and T; the other slots are not written.
    """

    def body(
        inputs_gmem: Tree, copies_gmem: Tree, _smem: Smem, _barriers: Barrier
    ) -> None:
        tokens_gmem, bounds_gmem = inputs_gmem
        end = End.of_cta(bounds_gmem)
        of_padding = end.slot == bounds_gmem.shape[1] - 2

        def for_arrays(fill: Callable[[Gmem, Gmem, Index], None]) -> None:
            for of_array in zip(tokens_gmem, copies_gmem):
                _for_column_blocks(fill, *of_array)

        when(of_padding)(lambda: for_arrays(end.clear))
        has_copy = jnp.logical_not(of_padding) & (end.num_tokens > 0)
        when(has_copy)(lambda: for_arrays(end.copy))

    flat = [x.reshape(*x.shape[:2], -1) for x in rows]
    batch, num_bounds = bounds.shape
    shapes = [(batch, num_bounds, CHUNK, x.shape[2]) for x in flat]
    outputs = [jax.ShapeDtypeStruct(shape, x.dtype) for shape, x in zip(shapes, flat)]
    copies = _launch_on_segments(
        body, (flat, bounds), outputs, bounds, "jfla_copy_ends"
    )
    return [x.reshape(*x.shape[:3], *of.shape[2:]) for x, of in zip(copies, rows)]


def return_ends(
    rows: list[PackedRows], bounds: Int[Array, "B S_plus_2"]
) -> list[Shaped[Array, "B T _ _"]]:
    """The tokens of every array, with those that kernels have written to copies of ends."""

    def body(
        inputs_gmem: Tree, _outputs: Tree, _smem: Smem, _barriers: Barrier
    ) -> None:
        tokens_gmem, copies_gmem, bounds_gmem = inputs_gmem
        end = End.of_cta(bounds_gmem)

        @when(end.first_row < end.num_tokens)
        def _():
            for of_array in zip(tokens_gmem, copies_gmem):
                _for_column_blocks(end.give_back, *of_array)

    def write(tokens_gmem: list[Gmem], read: tuple[list[Array], Array]) -> None:
        copies, bounds = read
        operands = (tokens_gmem, copies, bounds)
        _launch_on_segments(body, operands, None, bounds, "jfla_return_ends")

    def returned(*arrays: Array) -> list[Array]:
        bounds, *rest = arrays
        return write_in_place(write, rest[: len(rows)], (rest[len(rows) :], bounds))

    tokens = [x.tokens.reshape(*x.tokens.shape[:2], -1) for x in rows]
    copies = [x.ends.reshape(*x.ends.shape[:3], -1) for x in rows]
    filled = untracked(returned, [bounds, *tokens, *copies])
    return [x.reshape(of.tokens.shape) for x, of in zip(filled, rows)]


def _launch_on_segments(
    body: Callable[..., None],
    inputs: Tree,
    outputs: Tree,
    bounds: Int[Array, "B S_plus_2"],
    name: str,
) -> Any:
    batch, num_bounds = bounds.shape
    grid = {"cta": batch * (num_bounds - 1) * (CHUNK // CTA_ROWS)}
    return launch(body, inputs, outputs, grid=grid, num_warpgroups=1, name=name)


def _for_column_blocks(
    copy: Callable[[Gmem, Gmem, Index], None], tokens_gmem: Gmem, copies_gmem: Gmem
) -> None:
    """Copies as many columns at a time as a warpgroup has registers for."""
    columns = tokens_gmem.shape[-1]
    block = columns
    itemsize = jnp.dtype(tokens_gmem.dtype).itemsize
    while block * itemsize > MAX_ROW_BYTES and block % (2 * TILE_V) == 0:
        block //= 2

    def of_block(i: Index, _: None) -> None:
        copy(tokens_gmem, copies_gmem, pl.ds(pl.multiple_of(i * block, block), block))

    lax.fori_loop(0, columns // block, of_block, None)


def _load_row(row_gmem: Gmem) -> Reg:
    (columns,) = row_gmem.shape
    return load_with_layout(row_gmem, _row_layout(columns, row_gmem.dtype))


def _row_layout(columns: int, dtype: Any) -> Layout:
    """Neighbours to a thread as far as a load goes; columns are a multiple of 64."""
    per_thread, rest = divmod(columns, THREADS)
    if rest:
        return ROWS
    vector = VECTOR_BYTES // jnp.dtype(dtype).itemsize
    while per_thread % vector:
        vector //= 2
    strided: Any = plgpu.Layout.WG_STRIDED  # to a type checker it takes nothing
    return strided((columns,), vector)
