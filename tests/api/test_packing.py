"""Segment ids from cumulative lengths, and the grid that lays segments on chunk boundaries."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.cases import Config, Style, draw

from jfla import segment_ids_from_cu_seqlens
from jfla.packing import align, starts, take_rows


@pytest.mark.parametrize(
    ("cu_seqlens", "total", "want"),
    [
        ([0, 2, 5], 5, [1, 1, 2, 2, 2]),
        ([0, 2, 5], 7, [1, 1, 2, 2, 2, 0, 0]),
        ([0, 0, 2, 2, 2, 3, 3], 4, [2, 2, 5, 0]),
        ([0, 0], 2, [0, 0]),
        ([0], 2, [0, 0]),
        ([0, 1], 1, [1]),
        ([0], 0, []),
    ],
)
def test_segment_ids_from_cu_seqlens(cu_seqlens, total, want):
    for given in (cu_seqlens, np.array(cu_seqlens), jnp.array(cu_seqlens, jnp.uint8)):
        with_jit = jax.jit(segment_ids_from_cu_seqlens, static_argnums=1)
        for ids in (
            segment_ids_from_cu_seqlens(jnp.asarray(given), total),
            with_jit(jnp.asarray(given), total),
        ):
            assert ids.dtype == jnp.int32
            np.testing.assert_array_equal(ids, [want])


def test_narrow_cu_seqlens_may_be_followed_by_any_padding():
    for dtype, end in ((jnp.int8, 100), (jnp.uint8, 200), (jnp.int16, 500)):
        ids = segment_ids_from_cu_seqlens(jnp.array([0, end], dtype), 1000)[0]
        np.testing.assert_array_equal(ids, np.arange(1000) < end)


# The type checks of the test run would answer before these errors do.
_from_cu_seqlens = getattr(
    segment_ids_from_cu_seqlens, "__wrapped__", segment_ids_from_cu_seqlens
)


@pytest.mark.parametrize(
    ("cu_seqlens", "total", "message"),
    [
        ([], 3, r"cu_seqlens must be integers \[S\+1\], got float32\[0\]"),
        (
            np.zeros(0, np.int32),
            3,
            r"cu_seqlens must be integers \[S\+1\], got int32\[0\]",
        ),
        ([[0, 1]], 3, r"cu_seqlens must be integers \[S\+1\], got int32\[1, 2\]"),
        ([0.0, 1.0], 3, r"cu_seqlens must be integers \[S\+1\], got float32\[2\]"),
        ([1, 2], 3, "cu_seqlens must start at 0, got 1"),
        ([0, 3, 2], 3, "cu_seqlens must not decrease, got 3 before 2"),
        ([0, 3], 2, "cu_seqlens must end at total=2 at most, got 3"),
        ([0], -1, "total must be a static int >= 0, got -1"),
        ([0], 2.0, "total must be a static int >= 0, got 2.0"),
        ([0], None, "total must be a static int >= 0, got None"),
    ],
)
def test_bad_cu_seqlens(cu_seqlens, total, message):
    with pytest.raises(ValueError, match=message):
        _from_cu_seqlens(jnp.asarray(cu_seqlens), total)


def test_values_of_cu_seqlens_are_not_looked_at_under_jit():
    ids = jax.jit(segment_ids_from_cu_seqlens, static_argnums=1)(jnp.array([1, 0]), 2)
    assert ids.shape == (1, 2)


def test_starts():
    ids = jnp.array([[1, 1, 2, 2, 0, 0], [3, 4, 4, 4, 4, 6], [0, 0, 0, 0, 0, 0]])
    want = [[0, 0, 1, 0, 0, 0], [0, 1, 0, 0, 0, 1], [0, 0, 0, 0, 0, 0]]
    np.testing.assert_array_equal(starts(ids), want)


def test_take_rows_reads_zero_out_of_range():
    x = jnp.arange(1.0, 7.0).reshape(1, 3, 2)
    np.testing.assert_array_equal(
        take_rows(x, jnp.array([[2, 3, 0, 7]])), [[[5, 6], [0, 0], [1, 2], [0, 0]]]
    )


@pytest.mark.parametrize(
    ("time", "segments", "chunk"),
    [(130, 4, 64), (130, 4, 16), (7, 3, 4), (1, 1, 64), (64, 5, 64)],
)
def test_align_puts_every_segment_on_chunks_of_its_own(time, segments, chunk):
    aligned = jax.jit(functools.partial(align, num_segments=segments, chunk=chunk))
    config = Config(batch=3, time=time, segments=segments)
    for seed in range(20):
        ids = draw(config, Style(seed))[1]
        source, target, segment = map(np.asarray, aligned(jnp.asarray(ids)))
        assert source.shape[1] == segment.shape[1] * chunk
        for row in range(len(ids)):
            real = source[row] < time
            # Every token is there once, in order, in a chunk of its own segment, and finds its way back.
            np.testing.assert_array_equal(source[row][real], np.flatnonzero(ids[row]))
            np.testing.assert_array_equal(
                ids[row][source[row][real]], segment[row].repeat(chunk)[real] + 1
            )
            np.testing.assert_array_equal(
                target[row][ids[row] > 0], np.flatnonzero(real)
            )
            assert (target[row][ids[row] == 0] >= len(source[row])).all()
            # A segment begins on the boundary behind the one before, and only its last chunk is not full.
            lengths = np.bincount(ids[row], minlength=segments + 1)[1:]
            end_chunk = np.cumsum(-(-lengths // chunk))
            first_chunk = end_chunk + lengths // -chunk
            for number in np.unique(ids[row][ids[row] > 0]):
                first = target[row][ids[row] == number][0]
                assert first == first_chunk[number - 1] * chunk
                assert real[first : first + np.sum(ids[row] == number)].all()
            # Chunks of a segment lie together, so that its state goes from one to the next.
            assert (np.diff(segment[row]) >= 0).all()
