"""Packed segments that the forward scans as one chain of chunks, in interpret mode."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.kernel_cases import (
    MAIN,
    TOLERANCE,
    Call,
    error,
    inputs,
    packed,
    results,
    scheduled,
)

import jfla
from jfla.pallas.segments import segment_chunks

SLOW = pytest.mark.slow
BESIDE = {"overlap_ctas": 2, "overlap_v_block": 64}
LENGTHS = [65, 0, 1, 128, 39]


@pytest.mark.parametrize(
    ("gates", "overlap"),
    [
        ("raw", BESIDE),
        pytest.param("mixed", {"overlap_ctas": 0}, marks=SLOW),
        pytest.param("weak", BESIDE, marks=SLOW),
    ],
)
def test_values_and_gradients(gates, overlap):
    """Of segments of no token, of one and of whole chunks; the padding behind them may hold anything."""
    total = sum(LENGTHS) + 5
    arrays, rest = inputs(Call("kda", gates, time=total, segments=5, group=1))
    rest["segment_ids"] = packed(LENGTHS, total)
    want = results(jfla.reference.recurrent_kda, arrays, rest)
    padded = arrays | {name: arrays[name].at[:, -5:].set(jnp.nan) for name in MAIN}
    in_turn = scheduled("kda", segments_in_turn=True, **overlap)
    got = results(in_turn, padded, rest | {"num_segments": 5})
    for name, x in want.items():
        assert error(got[name], x) < TOLERANCE[name], name
    for name in ("output", *MAIN):
        assert not jnp.any(got[name][:, -5:]), name


def test_a_segment_has_the_bits_of_a_call_on_it_alone():
    """In any place, whatever the other segments are, and those that it has where segments are side by side."""
    order = [3, 1, 4, 0, 2]
    total = sum(LENGTHS)
    arrays, _ = inputs(Call("kda", time=total, group=1))
    other, _ = inputs(Call("kda", "mixed", time=total, group=1, repeated_keys=True))
    first = np.cumsum([0, *LENGTHS])
    own = [np.arange(first[i], first[i + 1]) for i in range(5)]
    index = np.concatenate([own[i] for i in order])
    in_turn = scheduled("kda", segments_in_turn=True, **BESIDE)
    side_by_side = scheduled("kda", segments_in_turn=False, **BESIDE)

    def output(chunk, x: list[jax.Array], lengths: list[int]) -> np.ndarray:
        ids = packed(lengths, sum(lengths))
        found = chunk(*x, segment_ids=ids, num_segments=len(lengths))
        return np.asarray(found.output.astype(jnp.float32))

    main = [arrays[name] for name in MAIN]
    want = output(side_by_side, main, LENGTHS)
    np.testing.assert_array_equal(output(in_turn, main, LENGTHS), want)
    moved = [x[:, index] for x in main]
    got = output(in_turn, moved, [LENGTHS[i] for i in order])
    np.testing.assert_array_equal(got, want[:, index])
    changed = [other[name].at[:, own[3]].set(arrays[name][:, own[3]]) for name in MAIN]
    got = output(in_turn, changed, LENGTHS)
    np.testing.assert_array_equal(got[:, own[3]], want[:, own[3]])
    assert (got[:, own[0]] != want[:, own[0]]).any()
    alone = scheduled("kda")(*[x[:, own[3]] for x in main]).output
    np.testing.assert_array_equal(alone.astype(jnp.float32), want[:, own[3]])


def test_tables_say_one_segment_and_its_padding():
    ids = packed([3, 130, 0, 65], 250)
    side_by_side = segment_chunks(ids, 4)
    in_turn = segment_chunks(ids, 4, in_turn=True)
    assert side_by_side.is_first_chunk is None
    assert in_turn.is_first_chunk is not None
    np.testing.assert_array_equal(in_turn.is_first_chunk, [[1, 0, 0, 1, 0, 1, 0, 0]])
    one = [[0, 0, 6, 1, -1], [1, 6, 7, -1, 0]]
    np.testing.assert_array_equal(in_turn.table.segments, [one])
    np.testing.assert_array_equal(in_turn.table.ctas, [[[0, 1, 0, 7]]])
    for name in ("places", "source", "target", "bounds", "most_chunks"):
        np.testing.assert_array_equal(
            getattr(in_turn, name), getattr(side_by_side, name), err_msg=name
        )


def test_tables_of_many_chunks_give_padding_a_cta_of_its_own():
    in_turn = segment_chunks(packed([2000, 0, 1000], 5000), 3, in_turn=True)
    np.testing.assert_array_equal(
        in_turn.table.segments, [[[0, 0, 48, -1, -1], [1, 48, 80, -1, -1]]]
    )
    ctas = np.asarray(in_turn.table.ctas)[0]
    np.testing.assert_array_equal(ctas[[0, 3]], [[0, 0, 0, 48], [1, 1, 48, 80]])
    rest = np.delete(ctas, [0, 3], axis=0)
    np.testing.assert_array_equal(rest[:, 2], rest[:, 3])
    np.testing.assert_array_equal(rest[:, :2], -1)
