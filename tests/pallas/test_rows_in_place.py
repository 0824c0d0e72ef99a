"""Rows with chunks that are not whole, read in place as one packed segment each, in interpret mode."""

import jax
import jax.numpy as jnp
import pytest
from support.kernel_cases import (
    MAIN,
    TOLERANCE,
    Call,
    check,
    error,
    inputs,
    results,
    scheduled,
    validated,
)

import jfla
from jfla.pallas.dims import Dims, dims_of
from jfla.pallas.heuristics import row_is_segment, schedule, schedule_of_part
from jfla.types import OPS

SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "call",
    [
        Call("kda", "raw", time=100, group=1),
        Call("gdn", time=150, segments=3, group=1),
        pytest.param(Call("gdn", "raw", batch=2, time=130), marks=SLOW),
        pytest.param(Call("gdn", "mixed", batch=2, time=70, segments=4), marks=SLOW),
        pytest.param(Call("kda", "mixed", time=192, segments=3), marks=SLOW),
        pytest.param(
            Call("kda", batch=2, time=90, key_dim=128, value_dim=128), marks=SLOW
        ),
    ],
    ids=str,
)
def test_values_and_gradients_in_place(call: Call):
    """Of rows with a state, and of rows in which segments begin where decays are reset."""
    check(call, scheduled(call.op, num_sms=1, in_place=True))


def test_padding_may_hold_anything_in_place():
    call = Call("kda", time=100, segments=2, group=1)
    arrays, rest = inputs(call)
    padding = rest["segment_ids"][0] == 0
    assert padding.sum() == 7
    poisoned = arrays | {name: arrays[name].at[:, -7:].set(jnp.nan) for name in MAIN}
    in_place = scheduled(call.op, num_sms=1, in_place=True)
    got = results(in_place, poisoned, rest)
    want = results(jfla.reference.recurrent_kda, arrays, rest)
    for name, x in want.items():
        assert error(got[name], x) < TOLERANCE[name], name
        assert not jnp.any(got[name][:, -7:]), name


@pytest.mark.parametrize(
    ("op", "time", "heads", "in_place"),
    [
        ("kda", 8192, 32, True),
        ("gdn", 8192, 32, True),
        ("gdn", 4096, 32, False),  # 47 us of copies
        ("gdn", 8192, 4, False),  # eight spans of time side by side
    ],
)
def test_rows_are_read_in_place_where_copies_take_long(
    op: str, time: int, heads: int, in_place: bool
):
    whole = Dims(1, heads, time // 64, 128, 128)
    assert not schedule(OPS[op], whole).row_is_segment
    partial = whole._replace(has_partial_chunks=True)
    found = schedule(OPS[op], partial)
    assert found.row_is_segment == in_place
    assert bool(found.ring_chunks) == (found.time_splits == 1)
    # A scan of one row is as long as that of a call of whole chunks, and has as much of V.
    assert found.overlap_v_block == schedule(OPS[op], whole).overlap_v_block
    assert found.ring_chunks == schedule(OPS[op], whole).ring_chunks
    assert not row_is_segment(OPS[op], whole, 132, 4.3e6)


@pytest.mark.parametrize(
    ("time", "rest", "partial"),
    [
        (128, {}, False),
        (100, {}, True),
        (128, {"segment_ids": jnp.ones((1, 128), jnp.int32)}, True),
        (128, {"segment_ids": jnp.ones((1, 128), jnp.int32), "num_segments": 2}, False),
        (100, {"return_final_state": True, "return_states_every": 64}, False),
    ],
)
def test_which_calls_have_partial_chunks(time: int, rest: dict, partial: bool):
    arrays, _ = inputs(Call("gdn", time=time))
    arrays = {name: arrays[name] for name in MAIN}
    dims = dims_of(*validated("gdn", **arrays, **rest))
    assert dims.has_partial_chunks == partial
    slow_copies = {"num_sms": 1, "bytes_per_us": 1e-3}
    assert schedule(OPS["gdn"], dims, **slow_copies).row_is_segment == partial
    mma = schedule(OPS["gdn"], dims, **slow_copies, machine="ampere")
    assert not mma.row_is_segment


@pytest.mark.parametrize("in_place", [False, True])
def test_a_part_reads_rows_as_the_whole_call_does(in_place: bool):
    """Its residuals have the shapes of the whole's, however long its own copies take."""
    long = Dims(8, 32, 128, 128, 128, has_partial_chunks=True)
    short = Dims(1, 4, 128, 128, 128, has_partial_chunks=True)
    assert schedule(OPS["gdn"], long).row_is_segment
    assert not schedule(OPS["gdn"], short).row_is_segment
    whole, part = (long, short) if in_place else (short, long)
    found = schedule_of_part(OPS["gdn"], part, schedule(OPS["gdn"], whole))
    assert found.row_is_segment == in_place
    assert found.time_splits == 1
    assert found.num_spans == 0


@pytest.mark.parametrize(
    ("batch", "heads", "may_be_padded", "expected"),
    [
        (1, 32, True, (64, 68, 8)),
        (2, 16, False, (64, 68, 8)),
        (2, 16, True, (64, 68, 0)),  # one row may end in padding before the other
        (8, 32, False, (128, 76, 0)),
    ],
)
def test_few_rows_overlap_as_whole_chunks_do(batch, heads, may_be_padded, expected):
    """Many overlap as packed segments do."""
    dims = Dims(batch, heads, 65, 128, 128, 1, may_be_padded=may_be_padded)
    found = schedule(OPS["gdn"], dims)
    lead = (found.overlap_v_block, found.overlap_ctas, found.ring_chunks)
    assert lead == expected


def test_the_call_that_the_kernels_make_is_that_of_a_packed_row():
    """q, k and v are the caller's: of no array all rows are copied, and of ends there are three chunks at most."""
    arrays, _ = inputs(Call("gdn", time=100, group=1))
    main = [arrays[name] for name in MAIN]
    in_place = scheduled("gdn", num_sms=1, in_place=True)
    text = str(jax.make_jaxpr(in_place)(*main))
    assert "jfla_copy_ends" in text
    assert "jfla_return_ends" in text
    assert "bf16[1,3,64,64]" in text
    copied = "bf16[1,128,1,64]"
    assert copied not in text
    assert copied in str(jax.make_jaxpr(scheduled("gdn", num_sms=1))(*main))
