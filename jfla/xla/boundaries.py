"""The boundaries inside a chunk at which its pairs of tokens meet, as tables: from a chunk's length to token numbers.

A block of 4s tokens has three boundaries between its quarters, for s = 16, 4 and 1. A pair of tokens j < i meets at one
of them: in the smallest block that has both, the boundary before the quarter of i. A decay between the two is that from
j to the boundary times that from there to i.

    rows of    columns of quarter 0 1 2 3
    quarter 0                     .
            1                     1 .          1, 2, 3: meet at that boundary of the block
            2                     2 2 .        .: meet in a smaller block, of this quarter alone
            3                     3 3 3 .

All blocks of one size go together: at the n-th of their boundaries meet the rows of their quarters n and the columns of
their n quarters before it. A row and a column of different blocks meet elsewhere.
"""

import functools
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int

QUARTERS = 4
INNER = QUARTERS - 1  # boundaries of a block


class Boundaries(NamedTuple):
    """Tokens by the size of blocks, large ones first; columns by boundary, the first one first."""

    rows: Int[np.ndarray, "sizes 3 I"]
    row_boundary: Int[np.ndarray, "sizes 3 I"]  # the last token before the boundary
    columns: Int[np.ndarray, "sizes J"]
    column_boundary: Int[np.ndarray, "sizes J"]
    meet: Bool[np.ndarray, "sizes I J"]  # with the rows of the column's boundary


@functools.cache
def boundaries(chunk: int) -> Boundaries:
    """Of a chunk, which is quartered down to single tokens.

    >>> tables = boundaries(4)
    >>> tables.rows.tolist(), tables.columns.tolist()
    ([[[1], [2], [3]]], [[0, 0, 1, 0, 1, 2]])
    """
    sizes = []
    while QUARTERS ** len(sizes) < chunk:
        sizes.append(QUARTERS ** len(sizes))
    if QUARTERS ** len(sizes) != chunk:
        raise ValueError(
            f"{chunk=} must be a power of four: it is quartered down to single tokens"
        )
    of_sizes = [_of_size(chunk, size) for size in reversed(sizes)]
    return Boundaries(*(np.stack(tables) for tables in zip(*of_sizes)))


def _of_size(chunk: int, size: int) -> Boundaries:
    """Of all blocks of four quarters of `size` tokens."""
    tokens = np.arange(chunk)
    quarter_of = tokens // size % QUARTERS
    quarters = np.stack([tokens[quarter_of == n] for n in range(QUARTERS)])
    first = tokens // size * size
    rows = quarters[1:]
    row_boundary = first[rows] - 1
    columns = np.concatenate([quarters[:n].ravel() for n in range(1, QUARTERS)])
    # A quarter's blocks are in order, so that a column's boundary is that of the row in the same place.
    column_boundary = np.concatenate(
        [np.tile(row_boundary[n - 1], n) for n in range(1, QUARTERS)]
    )
    meet = row_boundary[0][:, None] // (QUARTERS * size) == columns // (QUARTERS * size)
    return Boundaries(rows, row_boundary, columns, column_boundary, meet)


@functools.cache
def places_of_pairs(chunk: int, num_sets: int) -> Int[np.ndarray, "R C C"]:
    """Where a pair is among [sizes, R, I, J], for R sets of rows; -1 on the diagonal and above."""
    tables = boundaries(chunk)
    num_sizes, num_rows, num_columns = tables.meet.shape
    sets = np.arange(num_sets)[:, None]
    places = np.full((num_sets, chunk, chunk), -1)
    sizes, i, j = np.nonzero(tables.meet)
    shape = (num_sizes, num_sets, num_rows, num_columns)
    row = tables.rows[sizes, boundary_of_columns(chunk)[j], i]
    column = tables.columns[sizes, j]
    places[:, row, column] = np.ravel_multi_index((sizes, sets, i, j), shape)
    return places


@functools.cache
def boundary_of_columns(chunk: int) -> Int[np.ndarray, " J"]:
    """Whether a column is one of the first boundary (0), the second or the third."""
    quarter = chunk // QUARTERS
    return np.repeat(np.arange(INNER), quarter * np.arange(1, QUARTERS))


@functools.cache
def places_of_rows(chunk: int, num_sets: int) -> Int[np.ndarray, "R sizes C"]:
    """Where a token is among [sizes, 3, R, I], for R sets of rows; -1 in first quarters, which have no row."""
    rows = boundaries(chunk).rows
    of_sets = rows[:, :, None] + np.arange(num_sets)[:, None] * chunk
    places = _places(of_sets.reshape(len(rows), -1), num_sets * chunk)
    return np.moveaxis(places.reshape(-1, num_sets, chunk), 1, 0)


@functools.cache
def places_of_columns(chunk: int) -> Int[np.ndarray, "boundaries C"]:
    """Where a token is among [sizes, J], for each boundary of each size; -1 behind the boundary."""
    tables = boundaries(chunk)
    num_sizes, num_columns = tables.columns.shape
    of_columns = boundary_of_columns(chunk)
    places = np.full((num_sizes, INNER, chunk), -1)
    flat = np.arange(num_sizes * num_columns).reshape(num_sizes, num_columns)
    sizes = np.arange(num_sizes)[:, None]
    places[sizes, of_columns, tables.columns] = flat
    return places.reshape(-1, chunk)


def _places(
    tokens: Int[np.ndarray, "sizes N"], num_tokens: int
) -> Int[np.ndarray, "sizes tokens"]:
    """Where every token is in the flat array; -1 where it is not."""
    places = np.full((len(tokens), num_tokens), -1)
    flat = np.arange(tokens.size).reshape(tokens.shape)
    np.put_along_axis(places, tokens, flat, axis=-1)
    return places


@functools.cache
def spans_of_rows(chunk: int) -> Bool[np.ndarray, "C rows"]:
    """[token, row of sizes and boundaries]: whether the decay from the boundary to the row has the token in it."""
    tables = boundaries(chunk)
    token = np.arange(chunk)[:, None]
    return (token > tables.row_boundary.ravel()) & (token <= tables.rows.ravel())


@functools.cache
def spans_of_columns(chunk: int) -> Bool[np.ndarray, "C columns"]:
    """[token, column of sizes]: whether the decay from the column to the boundary has the token in it."""
    tables = boundaries(chunk)
    token = np.arange(chunk)[:, None]
    return (token > tables.columns.ravel()) & (token <= tables.column_boundary.ravel())
