"""What a warp does with its 16 rows of a tile: products of blocks, sums in two parts, loads of some columns."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

import jfla
from jfla.pallas.mgpu.columns import widened
from jfla.pallas.mgpu.copies import (
    commit_smem,
    load_with_layout,
    store_from_layout,
    write,
)
from jfla.pallas.mgpu.diagonal import below_diagonal, diagonal
from jfla.pallas.mgpu.folded_sums import fold, fold_selector, unfold
from jfla.pallas.mgpu.iota import per_row
from jfla.pallas.mgpu.launch import launch
from jfla.pallas.mgpu.layouts import WGMMA, WIDE, WIDER
from jfla.pallas.mgpu.mma import dot, zeros
from jfla.pallas.mgpu.moves import (
    load_rows,
    load_rows_wide,
    load_scratch,
    store_scratch,
)
from jfla.pallas.mgpu.opaque import opaque_zero
from jfla.pallas.mgpu.row_dots import add_row_dots, no_blocks, row_dots, row_squares
from jfla.pallas.mgpu.smem import BF16, F16, F32, tile_smem
from jfla.pallas.mgpu.tile_moves import load_matrix, load_matrix_transposed
from jfla.pallas.mgpu.warp_blocks import only_block
from jfla.pallas.mgpu.warp_matmul import add_block_products
from jfla.pallas.sm90.intra_kda.smem import in_two_parts, of_two_parts

SIZE = 64
BLOCK = 16


def run_kernel(
    body: Callable[..., None],
    inputs: Any,
    columns: int,
    name: str,
    smem: Any = None,
) -> np.ndarray:
    """[64, columns] float32 that `body(inputs_gmem, out_gmem, tile_smem, _)` stores."""
    out = jax.ShapeDtypeStruct((SIZE, columns), F32)

    def run(inputs: Any) -> jax.Array:
        return launch(
            body,
            inputs,
            out,
            grid={"cta": 1},
            num_warpgroups=1,
            smem=tile_smem(SIZE, SIZE) if smem is None else smem,
            name=name,
        )

    with jfla.pallas.interpret():
        return np.asarray(jax.jit(run)(inputs))


def draw(*shapes: tuple[int, int], dtype: Any = BF16) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return [
        jax.random.normal(key, shape).astype(dtype) for key, shape in zip(keys, shapes)
    ]


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("num_tiles", [1, 2])
def test_squares_of_rows_are_summed_over_all_tiles(num_tiles: int, dtype: Any):
    x = draw((SIZE, num_tiles * SIZE), dtype=dtype)[0]
    # A row of zeros, and one that is much larger than the others.
    x = x.at[5].set(0).at[20].multiply(100)

    def body(x_gmem: Any, out: Any, tiles_smem: Any, _barriers: Any) -> None:
        for n in range(num_tiles):
            columns = pl.ds(n * SIZE, SIZE)
            write(tiles_smem.at[n], load_rows(x_gmem.at[:, columns]))
        commit_smem()
        tiles = [tiles_smem.at[n] for n in range(num_tiles)]
        squares, of_first = row_squares(tiles, [tiles[0]] * num_tiles)
        store_from_layout(out.at[:, :SIZE], per_row(squares, SIZE))
        store_from_layout(out.at[:, SIZE:], per_row(of_first, SIZE))

    smem = tile_smem(num_tiles, SIZE, SIZE, dtype=dtype)
    found = run_kernel(body, x, 2 * SIZE, "row_squares", smem)
    squares = np.square(np.asarray(x, np.float64))
    want = [squares.sum(axis=1), num_tiles * squares[:, :SIZE].sum(axis=1)]
    np.testing.assert_allclose(found, np.repeat(want, SIZE, axis=0).T, rtol=1e-5)


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_rows_of_two_arrays_are_multiplied_row_by_row(dtype: Any):
    x, y = draw(*[(SIZE, SIZE)] * 2, dtype=dtype)

    def body(inputs: Any, out: Any, _smem: Any, _barriers: Any) -> None:
        rows = [load_rows(ref) for ref in inputs]
        blocks = add_row_dots(no_blocks(), *rows)
        blocks = add_row_dots(blocks, *rows)
        store_from_layout(out, per_row(row_dots(blocks), SIZE))

    found = run_kernel(body, (x, y), SIZE, "row_dots")
    dots = np.sum(np.asarray(x, np.float64) * np.asarray(y, np.float64), axis=1)
    want = np.repeat(2 * dots[:, None], SIZE, axis=1)
    np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("with_diagonal", [False, True])
def test_what_is_below_the_diagonal_is_told_from_the_rest(with_diagonal: bool):
    x, other = draw(*[(SIZE, SIZE)] * 2, dtype=F32)
    # Not below the diagonal x may be infinite.
    x = jnp.where(jnp.triu(jnp.ones_like(x), k=int(with_diagonal)) == 1, jnp.inf, x)

    def body(inputs: Any, out: Any, _smem: Any, _barriers: Any) -> None:
        x, other = (load_with_layout(ref, WGMMA) for ref in inputs)
        for n, rest in enumerate((other, None)):
            kept = below_diagonal(x, rest, with_diagonal=with_diagonal)
            store_from_layout(out.at[:, n * SIZE : (n + 1) * SIZE], kept)

    found = run_kernel(body, (x, other), 2 * SIZE, "below_diagonal")
    below = np.tri(SIZE, k=0 if with_diagonal else -1) == 1
    want = [np.where(below, x, rest) for rest in (other, 0)]
    np.testing.assert_array_equal(found, np.concatenate(want, axis=1))


def test_the_diagonal_of_a_tile_is_a_line():
    (x,) = draw((SIZE, SIZE), dtype=F32)

    def body(x_gmem: Any, out: Any, _smem: Any, _barriers: Any) -> None:
        line = diagonal(load_with_layout(x_gmem, WGMMA))
        store_from_layout(out, per_row(line, SIZE))

    found = run_kernel(body, x, SIZE, "diagonal")
    want = np.repeat(np.diagonal(x)[:, None], SIZE, axis=1)
    np.testing.assert_array_equal(found, want)


def test_blocks_of_rows_are_multiplied_each_with_its_own():
    left, first, second = draw(*[(SIZE, SIZE)] * 3)

    def body(inputs: Any, out: Any, _smem: Any, _barriers: Any) -> None:
        x, *rights = (load_rows(ref) for ref in inputs)
        acc = add_block_products(zeros(SIZE, 2 * BLOCK), x, tuple(rights))
        store_from_layout(out, add_block_products(acc, x, tuple(rights)))

    found = run_kernel(body, (left, first, second), 2 * BLOCK, "block_products")
    rows = [np.asarray(x, np.float64).reshape(4, BLOCK, SIZE) for x in (left, first)]
    of_first = np.einsum("wik,wjk->wij", *rows).reshape(SIZE, BLOCK)
    rows[1] = np.asarray(second, np.float64).reshape(4, BLOCK, SIZE)
    of_second = np.einsum("wik,wjk->wij", *rows).reshape(SIZE, BLOCK)
    want = 2 * np.concatenate([of_first, of_second], axis=1)
    np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-4)


def test_sums_in_two_parts_keep_sixteen_bits_through_a_tile():
    (x,) = draw((SIZE, 2 * BLOCK), dtype=F32)

    def body(x_gmem: Any, out: Any, tile: Any, _barriers: Any) -> None:
        write(tile, in_two_parts(load_rows(x_gmem)))
        commit_smem()
        whole = of_two_parts(load_matrix(tile))
        blocks = [only_block(whole, block) for block in range(4)]
        store_from_layout(out, blocks[0] + blocks[1] + blocks[2] + blocks[3])

    found = run_kernel(body, x, 2 * BLOCK, "two_parts")
    np.testing.assert_allclose(found, x, rtol=2.0**-16)
    assert np.any(found != np.asarray(x.astype(BF16), np.float32))


def test_some_columns_of_a_tile_are_loaded():
    (x,) = draw((SIZE, SIZE))

    def body(x_gmem: Any, out: Any, tile: Any, _barriers: Any) -> None:
        write(tile, load_rows(x_gmem))
        commit_smem()
        columns = load_matrix(tile, first=2 * BLOCK, columns=BLOCK)
        store_from_layout(out, columns.astype(F32))

    found = run_kernel(body, x, BLOCK, "columns_of_a_tile")
    np.testing.assert_array_equal(found, x[:, 2 * BLOCK : 3 * BLOCK].astype(F32))


@pytest.mark.parametrize(("name", "layout"), [("wide", WIDE), ("wider", WIDER)])
def test_wide_loads_are_of_the_same_rows(name, layout):
    (x,) = draw((SIZE, SIZE), dtype=F32)

    def body(x_gmem: Any, out: Any, _smem: Any, _barriers: Any) -> None:
        store_from_layout(out, jnp.abs(load_rows_wide(x_gmem, layout)))

    found = run_kernel(body, x, SIZE, f"{name}_rows")
    np.testing.assert_array_equal(found, np.abs(x))


@pytest.mark.parametrize(("name", "layout"), [("wide", WIDE), ("wider", WIDER)])
def test_wide_stores_are_to_the_same_rows(name, layout):
    """Of bfloat16, widened before, with a sign that float32 keeps."""
    (x,) = draw((SIZE, SIZE))

    def body(x_gmem: Any, out: Any, tile: Any, _barriers: Any) -> None:
        rows = widened(load_rows_wide(x_gmem, layout), layout)
        write(tile, (-2 * rows).astype(BF16), layout)
        commit_smem()
        store_from_layout(out, widened(load_matrix(tile)))

    found = run_kernel(body, x, SIZE, f"{name}_tile")
    np.testing.assert_array_equal(found, -2 * x.astype(F32))


def test_threads_find_again_what_they_have_left():
    """In a part of longer rows, over which they may then store in order."""
    (x,) = draw((SIZE, SIZE), dtype=F32)

    def body(x_gmem: Any, out: Any, _smem: Any, _barriers: Any) -> None:
        before, own = (out.at[:, pl.ds(first, SIZE)] for first in (0, SIZE))
        store_scratch(load_rows(x_gmem), own)
        found = load_scratch(own)
        store_from_layout(before, found)
        commit_smem()
        store_from_layout(own, 2 * found)

    found = run_kernel(body, x, 2 * SIZE, "own_elements")
    np.testing.assert_array_equal(found, np.concatenate([x, 2 * x], axis=1))


@pytest.mark.parametrize("which", [0, 1])
def test_rows_of_two_arrays_are_summed_by_one_matmul(which):
    x, y = draw(*[(SIZE, SIZE)] * 2)

    def body(inputs: Any, out: Any, tile: Any, _barriers: Any) -> None:
        folded = fold(*[load_rows(ref).astype(F32) for ref in inputs])
        write(tile, folded.astype(BF16))
        commit_smem()
        left = fold_selector(opaque_zero() + 1)
        sums = dot(zeros(SIZE, SIZE), (left, tile))
        store_from_layout(out, unfold(sums)[which])

    found = run_kernel(body, (x, y), SIZE, f"folded_sums_{which}")
    want = np.asarray((x, y)[which], np.float64).sum(axis=0)
    np.testing.assert_allclose(found, np.broadcast_to(want, found.shape), atol=0.1)
    assert np.abs(want).max() > 10


def test_rows_of_a_tile_are_loaded_transposed():
    (x,) = draw((SIZE, SIZE))

    def body(x_gmem: Any, out: Any, tile: Any, _barriers: Any) -> None:
        write(tile, load_rows(x_gmem))
        commit_smem()
        for first in range(0, SIZE, BLOCK):
            block = load_matrix_transposed(tile.at[pl.ds(first, BLOCK)])
            store_from_layout(out.at[:, pl.ds(first, BLOCK)], block.astype(F32))

    found = run_kernel(body, x, SIZE, "rows_transposed")
    np.testing.assert_array_equal(found, np.asarray(x, np.float32).T)
