"""The tables of boundaries inside a chunk, against what they are said to hold, pair by pair."""

import numpy as np
import pytest

from jfla.xla.boundaries import (
    INNER,
    boundaries,
    earlier_columns,
    later_rows,
    places_of_columns,
    places_of_pairs,
    places_of_rows,
)

CHUNKS = [4, 16, 64]


@pytest.mark.parametrize("chunk", CHUNKS)
def test_every_pair_of_two_tokens_meets_once(chunk):
    tables = boundaries(chunk)
    kinds, i, j = np.nonzero(tables.meet)
    times = np.zeros((chunk, chunk), int)
    np.add.at(times, (tables.rows[kinds, i], tables.columns[kinds, j]), 1)
    np.testing.assert_array_equal(times, np.tri(chunk, k=-1))


@pytest.mark.parametrize("chunk", CHUNKS)
def test_the_decays_of_a_pair_span_the_tokens_between(chunk):
    """Both its factors and the sums that give their cotangents to the gates."""
    tables = boundaries(chunk)
    behind = later_rows(chunk)
    before = earlier_columns(chunk)
    num_columns = tables.columns.shape[-1]
    for kind, i, j in zip(*np.nonzero(tables.meet)):
        row = tables.rows[kind, i]
        column = tables.columns[kind, j]
        boundary = tables.row_boundary[kind, i]
        assert boundary == tables.column_boundary[kind, j]
        assert column <= boundary < row
        size, of_size = divmod(kind, INNER)
        to_row = tables.rows[kind][behind[kind, :, i]]
        np.testing.assert_array_equal(to_row, np.arange(boundary + 1, row + 1))
        spanned = before[size, :, of_size * num_columns + j]
        to_boundary = tables.columns[kind][spanned]
        np.testing.assert_array_equal(to_boundary, np.arange(column + 1, boundary + 1))


@pytest.mark.parametrize("num_sets", [1, 2])
@pytest.mark.parametrize("chunk", CHUNKS)
def test_places_find_tokens_and_pairs(chunk, num_sets):
    tables = boundaries(chunk)
    of_set = np.arange(num_sets)[:, None, None]
    rows = tables.rows[:, None] + chunk * np.arange(num_sets)[:, None]
    places = places_of_rows(chunk, num_sets)
    found = np.where(places < 0, -1, rows.ravel()[places])
    tokens = np.arange(chunk)
    expected = np.broadcast_to(tokens + chunk * of_set, found.shape)
    np.testing.assert_array_equal(found[places >= 0], expected[places >= 0])
    assert (places >= 0).sum() == rows.size

    columns = tables.columns[::INNER]
    places = places_of_columns(chunk)
    found = columns.ravel()[places]
    expected = np.broadcast_to(tokens, found.shape)
    np.testing.assert_array_equal(found[places >= 0], expected[places >= 0])
    assert (places >= 0).sum() == columns.size

    places = places_of_pairs(chunk, num_sets)
    shape = (len(tables.rows), num_sets, *tables.meet.shape[1:])
    kinds, sets, i, j = np.unravel_index(places[places >= 0], shape)
    want_set, want_i, want_j = np.nonzero(places >= 0)
    np.testing.assert_array_equal(sets, want_set)
    np.testing.assert_array_equal(tables.rows[kinds, i], want_i)
    np.testing.assert_array_equal(tables.columns[kinds, j], want_j)
    assert (want_j < want_i).all()


def test_chunks_are_powers_of_four():
    with pytest.raises(ValueError, match="chunk=32 must be a power of four"):
        boundaries(32)
