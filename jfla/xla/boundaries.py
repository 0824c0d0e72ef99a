"""The boundaries inside a chunk at which its pairs of tokens meet, as tables: from a chunk's length to token numbers.

A block of 4s tokens has three boundaries between its quarters, for s = 16, 4 and 1. A pair of tokens j < i meets at one
of them: in the smallest block that has both, the boundary before the quarter of i. A decay between the two is that from
j to the boundary times that from there to i.

A "kind" is one of the three boundaries of all blocks of one size, so that a chunk of 64 has nine kinds of 16 rows and
48 columns each. Pairs of a row and a column in different blocks, or with the column's quarter behind the boundary,
meet elsewhere.
"""

import functools
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int

QUARTERS = 4
INNER = QUARTERS - 1  # boundaries of a block


class Boundaries(NamedTuple):
    """Tokens, by kind of boundary: larger blocks first, of one size the earlier boundary first."""

    rows: Int[np.ndarray, "kinds I"]  # of the quarter behind the boundary
    row_boundary: Int[np.ndarray, "kinds I"]  # the last token before it
    columns: Int[np.ndarray, "kinds J"]  # of a block's first three quarters
    # The last token before the boundary, or the column itself where it is behind that.
    column_boundary: Int[np.ndarray, "kinds J"]
    meet: Bool[np.ndarray, "kinds I J"]


@functools.cache
def boundaries(chunk: int) -> Boundaries:
    """Of a chunk, which is quartered down to single tokens.

    >>> tables = boundaries(4)
    >>> tables.rows.tolist(), tables.columns.tolist()
    ([[1], [2], [3]], [[0, 1, 2], [0, 1, 2], [0, 1, 2]])
    >>> tables.meet[:, 0].tolist()
    [[True, False, False], [True, True, False], [True, True, True]]
    """
    sizes = [
        QUARTERS**level
        for level in range(chunk.bit_length())
        if QUARTERS**level < chunk
    ]
    if QUARTERS ** len(sizes) != chunk:
        raise ValueError(
            f"{chunk=} must be a power of four: it is quartered down to single tokens"
        )
    kinds = [
        _kind(chunk, size, quarter)
        for size in reversed(sizes)
        for quarter in range(1, QUARTERS)
    ]
    return Boundaries(*(np.stack(tables) for tables in zip(*kinds)))


def _kind(chunk: int, size: int, quarter: int) -> Boundaries:
    """The boundary before this quarter in all blocks of four quarters of `size` tokens."""
    tokens = np.arange(chunk)
    block, quarter_of = np.divmod(tokens // size, QUARTERS)
    last_before = (block * QUARTERS + quarter) * size - 1
    rows = tokens[quarter_of == quarter]
    columns = tokens[quarter_of < INNER]
    before = columns <= last_before[columns]
    return Boundaries(
        rows=rows,
        row_boundary=last_before[rows],
        columns=columns,
        column_boundary=np.where(before, last_before[columns], columns),
        meet=(block[rows][:, None] == block[columns]) & before,
    )


@functools.cache
def places_of_pairs(chunk: int, num_sets: int) -> Int[np.ndarray, "R C C"]:
    """Where a pair is among [kinds, R, I, J], for R sets of rows; -1 on the diagonal and above."""
    tables = boundaries(chunk)
    num_kinds, num_rows, num_columns = tables.meet.shape
    kinds, i, j = np.nonzero(tables.meet)
    shape = (num_kinds, num_sets, num_rows, num_columns)
    sets = np.arange(num_sets)[:, None]
    places = np.full((num_sets, chunk, chunk), -1)
    places[:, tables.rows[kinds, i], tables.columns[kinds, j]] = np.ravel_multi_index(
        (kinds, sets, i, j), shape
    )
    return places


@functools.cache
def places_of_rows(chunk: int, num_sets: int) -> Int[np.ndarray, "R sizes C"]:
    """Where a token is among [sizes, 3, R, I], for R sets of rows; -1 in first quarters, which have no row."""
    rows = boundaries(chunk).rows
    of_sets = rows[:, None] + np.arange(num_sets)[:, None] * chunk
    places = _places(of_sets.reshape(len(rows) // INNER, -1), num_sets * chunk)
    return np.moveaxis(places.reshape(-1, num_sets, chunk), 1, 0)


@functools.cache
def places_of_columns(chunk: int) -> Int[np.ndarray, "sizes C"]:
    """Where a token is among [sizes, J]; -1 in last quarters, which have no column."""
    return _places(boundaries(chunk).columns[::INNER], chunk)


def _places(
    tokens: Int[np.ndarray, "sizes N"], num_tokens: int
) -> Int[np.ndarray, "sizes tokens"]:
    """Where every token is in the flat array; -1 where it is not."""
    places = np.full((len(tokens), num_tokens), -1)
    flat = np.arange(tokens.size).reshape(tokens.shape)
    np.put_along_axis(places, tokens, flat, axis=-1)
    return places


@functools.cache
def later_rows(chunk: int) -> Bool[np.ndarray, "kinds I I"]:
    """[token, row]: whether the decay from the boundary to the row has the token in it."""
    tables = boundaries(chunk)
    same_block = tables.row_boundary[:, :, None] == tables.row_boundary[:, None]
    return same_block & (tables.rows[:, :, None] <= tables.rows[:, None])


@functools.cache
def earlier_columns(chunk: int) -> Bool[np.ndarray, "sizes J kinds_J"]:
    """[token, column of a kind]: whether the decay from the column to the boundary has the token in it."""
    tables = boundaries(chunk)
    token = tables.columns[:, :, None]
    behind_column = token > tables.columns[:, None]
    before_boundary = token <= tables.column_boundary[:, None]
    spanned = behind_column & before_boundary
    by_size = spanned.reshape(-1, INNER, *spanned.shape[1:])
    return np.moveaxis(by_size, 1, 2).reshape(len(by_size), spanned.shape[1], -1)
