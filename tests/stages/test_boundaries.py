"""The tables of boundaries inside a chunk, against what they are said to hold, pair by pair."""

import numpy as np
import pytest

from jfla.xla.boundaries import (
    boundaries,
    boundary_of_columns,
    places_of_columns,
    places_of_pairs,
    places_of_rows,
    spans_of_columns,
    spans_of_rows,
)

CHUNKS = [4, 16, 64]


def meetings(chunk):
    """The size, the boundary, the row and the column of every pair that meets."""
    sizes, rows, columns = np.nonzero(boundaries(chunk).meet)
    return zip(sizes, boundary_of_columns(chunk)[columns], rows, columns)


@pytest.mark.parametrize("chunk", CHUNKS)
def test_every_pair_of_two_tokens_meets_once(chunk):
    tables = boundaries(chunk)
    times = np.zeros((chunk, chunk), int)
    for size, boundary, i, j in meetings(chunk):
        times[tables.rows[size, boundary, i], tables.columns[size, j]] += 1
    np.testing.assert_array_equal(times, np.tri(chunk, k=-1))


@pytest.mark.parametrize("chunk", CHUNKS)
def test_the_decays_of_a_pair_span_the_tokens_between(chunk):
    """Both its factors and the sums that give their cotangents to the gates."""
    tables = boundaries(chunk)
    of_rows = spans_of_rows(chunk).reshape(chunk, *tables.rows.shape)
    of_columns = spans_of_columns(chunk).reshape(chunk, *tables.columns.shape)
    for size, boundary, i, j in meetings(chunk):
        row = tables.rows[size, boundary, i]
        column = tables.columns[size, j]
        border = tables.row_boundary[size, boundary, i]
        assert border == tables.column_boundary[size, j]
        assert column <= border < row
        to_row = np.flatnonzero(of_rows[:, size, boundary, i])
        np.testing.assert_array_equal(to_row, np.arange(border + 1, row + 1))
        from_column = np.flatnonzero(of_columns[:, size, j])
        np.testing.assert_array_equal(from_column, np.arange(column + 1, border + 1))


@pytest.mark.parametrize("num_sets", [1, 2])
@pytest.mark.parametrize("chunk", CHUNKS)
def test_places_find_tokens_and_pairs(chunk, num_sets):
    tables = boundaries(chunk)
    token_of_set = np.arange(num_sets * chunk).reshape(num_sets, 1, chunk)
    rows = tables.rows[:, :, None] + chunk * np.arange(num_sets)[:, None]
    assert_found(rows, places_of_rows(chunk, num_sets), token_of_set)
    assert_found(tables.columns, places_of_columns(chunk), np.arange(chunk))

    places = places_of_pairs(chunk, num_sets)
    want_set, want_i, want_j = np.nonzero(places >= 0)
    shape = (len(tables.rows), num_sets, *tables.meet.shape[1:])
    sizes, sets, i, j = np.unravel_index(places[places >= 0], shape)
    np.testing.assert_array_equal(sets, want_set)
    row = tables.rows[sizes, boundary_of_columns(chunk)[j], i]
    np.testing.assert_array_equal(row, want_i)
    np.testing.assert_array_equal(tables.columns[sizes, j], want_j)
    lower = np.broadcast_to(np.tri(chunk, k=-1, dtype=bool), places.shape)
    np.testing.assert_array_equal(places >= 0, lower)


def assert_found(tokens, places, expected):
    """Every token is found where the table says, and every place is in the table."""
    there = places >= 0
    found = tokens.ravel()[places]
    np.testing.assert_array_equal(
        found[there], np.broadcast_to(expected, found.shape)[there]
    )
    np.testing.assert_array_equal(np.sort(places[there]), np.arange(tokens.size))


def test_chunks_are_powers_of_four():
    with pytest.raises(ValueError, match="chunk=32 must be a power of four"):
        boundaries(32)
