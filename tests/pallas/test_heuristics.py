"""The schedule of a call: when time is split, taken span by span, and when two kernels run side by side."""

import types

import jax
import jax.numpy as jnp
import pytest
from support.kernel_cases import validated

import jfla
from jfla import chunk_op
from jfla.pallas import support
from jfla.pallas.dims import Dims
from jfla.pallas.dims import dims_of as dims_of_call
from jfla.pallas.forward_overlap import Overlap, overlap_schedule
from jfla.pallas.heuristics import (
    HOPPER_SMS,
    decode_v_block,
    schedule,
    schedule_of_part,
)
from jfla.pallas.kernel_times import H200_BYTES_PER_US
from jfla.pallas.splits import num_spans, time_splits
from jfla.types import OPS, Inputs


def dims_of(heads: int, time: int, key_dim: int = 128, value_dim: int = 128) -> Dims:
    return Dims(1, heads, time // 64, value_dim, key_dim)


@pytest.mark.parametrize(
    ("heads", "time", "splits"),
    [
        (32, 65536, 1),
        (8, 65536, 4),
        (1, 65536, 16),
        (8, 3072, 3),
        (8, 2048, 1),
        (22, 9999, 1),
    ],
)
def test_time_is_split_where_most_of_the_gpu_would_be_idle(heads, time, splits):
    assert time_splits(dims_of(heads, time), HOPPER_SMS) == splits


@pytest.mark.parametrize(
    ("op", "key_dim", "heads", "time", "spans"),
    [
        ("gdn", 128, 32, 8192, 4),
        ("gdn", 128, 32, 65536, 4),
        ("kda", 128, 32, 8192, 0),
        ("gdn", 256, 32, 8192, 0),
        ("gdn", 128, 16, 8192, 0),  # few states
        ("gdn", 128, 256, 4096, 0),  # short spans
        ("gdn", 128, 32, 8256, 0),
    ],
)
def test_spans_of_time_are_for_many_states(op, key_dim, heads, time, spans):
    assert num_spans(OPS[op], dims_of(heads, time, key_dim), HOPPER_SMS) == spans


@pytest.mark.parametrize(
    ("op", "batch", "heads", "time", "v_block"),
    [
        ("kda", 1, 32, 8192, 64),  # one wave of 128 CTAs
        ("gdn", 1, 36, 8192, 128),  # instead of 12 CTAs in a second wave
        ("kda", 1, 48, 8192, 128),
        ("gdn", 2, 32, 8192, 64),  # waves are bound by bytes
        ("gdn", 3, 32, 4096, 64),  # three short waves instead of a long and a short one
        ("kda", 1, 80, 8192, 64),
        ("kda", 8, 32, 4096, 128),  # full waves, as those of one scan
        ("gdn", 1, 8, 65536, 64),  # time is split
    ],
)
def test_scans_of_the_backward_take_the_columns_whose_waves_are_shorter(
    op, batch, heads, time, v_block
):
    found = schedule(OPS[op], Dims(batch, heads, time // 64, 128, 128))
    assert found.backward_v_block == v_block


@pytest.mark.parametrize(
    ("op", "heads", "time", "v_block", "ctas"),
    [
        ("gdn", 32, 8192, 64, 68),
        ("kda", 32, 8192, 128, 100),
        ("kda", 24, 8192, 64, 84),  # two warpgroups take longer for 128 columns
        ("gdn", 40, 8192, 64, 52),  # 52 multiprocessors prepare as fast as 80 scan
        ("gdn", 48, 8192, 128, 84),
        ("gdn", 56, 8192, 128, 76),
        ("gdn", 64, 8192, 128, 68),
        ("gdn", 80, 8192, 128, 52),
        ("kda", 8, 8192, 64, 0),
    ],
)
def test_kernels_overlap_in_calls_that_leave_much_of_the_gpu_idle(
    op, heads, time, v_block, ctas
):
    found = overlap_schedule(OPS[op], dims_of(heads, time), HOPPER_SMS)
    assert found == Overlap(v_block, ctas)
    short = overlap_schedule(OPS["gdn"], dims_of(64, 1024, 64, 64), HOPPER_SMS)
    assert short.num_ctas == 0


@pytest.mark.parametrize(
    ("op", "heads", "time", "ring"),
    [
        ("kda", 32, 8192, 8),
        ("gdn", 32, 8192, 8),
        ("gdn", 16, 8192, 16),
        ("gdn", 32, 512, 0),  # no longer than a ring
        ("kda", 64, 8192, 8),  # two groups of sequences
        ("gdn", 64, 8192, 4),
        ("gdn", 96, 8192, 0),  # one kernel after the other
    ],
)
def test_results_for_a_scan_alone_lie_in_a_ring(op, heads, time, ring):
    found = schedule(OPS[op], dims_of(heads, time))
    assert found.ring_chunks == ring
    part = schedule_of_part(OPS[op], dims_of(heads, time), found)
    assert part.ring_chunks == 0


@pytest.mark.parametrize(
    ("op", "batch", "time", "bytes_per_us", "overlap"),
    [
        ("kda", 8, 4096, H200_BYTES_PER_US, Overlap(128, 100, sequences_per_group=32)),
        ("kda", 16, 512, H200_BYTES_PER_US, Overlap(128, 0)),  # no room for a ring
        ("kda", 2, 8192, H200_BYTES_PER_US, Overlap(128, 100, sequences_per_group=32)),
        ("kda", 8, 4096, 3.03e6, Overlap(128, 100, sequences_per_group=32)),
        ("kda", 8, 1024, 3.03e6, Overlap(128, 100, sequences_per_group=32)),
        # whose scan alone would have a second wave of few CTAs
        ("kda", 5, 4096, H200_BYTES_PER_US, Overlap(128, 100, sequences_per_group=32)),
        ("gdn", 5, 4096, H200_BYTES_PER_US, Overlap(128, 52, sequences_per_group=80)),
        ("gdn", 9, 4096, H200_BYTES_PER_US, Overlap(128, 60, sequences_per_group=72)),
        ("gdn", 3, 4096, H200_BYTES_PER_US, Overlap(128, 0)),
        ("gdn", 8, 4096, H200_BYTES_PER_US, Overlap(128, 68, sequences_per_group=64)),
        ("gdn", 6, 4096, 3.03e6, Overlap(128, 68, sequences_per_group=64)),
        ("gdn", 8, 4096, 3.03e6, Overlap(128, 68, sequences_per_group=64)),
        ("gdn", 2, 8192, 3.03e6, Overlap(128, 68)),
    ],
)
def test_sequences_go_in_groups_where_bytes_bound_a_full_gpu(
    op, batch, time, bytes_per_us, overlap
):
    dims = Dims(batch, 32, time // 64, 128, 128)
    assert overlap_schedule(OPS[op], dims, HOPPER_SMS, bytes_per_us) == overlap
    shared = overlap_schedule(OPS[op], dims, HOPPER_SMS, bytes_per_us, exclusive=False)
    assert shared.sequences_per_group == 0


def inputs_of_one_chunk() -> Inputs:
    x = jnp.zeros((1, 64, 1, 64))
    return validated("gdn", x, x, x, x[..., 0], x[..., 0])[0]


# Of two lengths, because what was traced is kept.
@pytest.mark.parametrize(("shared", "time", "ring"), [("0", 8192, 8), ("1", 4096, 0)])
def test_a_shared_gpu_has_no_ring(shared, time, ring, monkeypatch):
    plans = []

    def run(inputs, options, plan):
        plans.append(plan)
        return jfla.DeltaRuleOutput(inputs.v, None)

    monkeypatch.setattr(chunk_op, "run", run)
    monkeypatch.setenv("JFLA_SHARED_GPU", shared)
    rows = jax.ShapeDtypeStruct((1, time, 32, 128), jnp.bfloat16)
    numbers = jax.ShapeDtypeStruct((1, time, 32), jnp.float32)
    with jfla.pallas.compiling_for("9.0"):
        jax.eval_shape(jfla.chunk_gdn, rows, rows, rows, numbers, numbers)
    assert [plan.schedule.ring_chunks for plan in plans] == [ring]


@pytest.mark.parametrize(
    ("kind", "bytes_per_us"),
    [("NVIDIA H100 80GB HBM3", 3.03e6), ("NVIDIA H200", H200_BYTES_PER_US)],
)
def test_the_copy_rate_is_that_of_the_device(kind, bytes_per_us, monkeypatch):
    device = types.SimpleNamespace(device_kind=kind)
    monkeypatch.setattr(support, "target_of", lambda _: device)
    assert support.bytes_per_us(inputs_of_one_chunk()) == bytes_per_us


@pytest.mark.parametrize("check_vma", [True, False])
def test_no_launch_inside_shard_map_counts_on_all_multiprocessors(check_vma):
    inputs = inputs_of_one_chunk()
    found = []

    def on_device(x):
        found.append(support.exclusive(inputs))
        return x

    auto = (jax.sharding.AxisType.Auto,)
    rows = jax.sharding.PartitionSpec("data")
    with jfla.pallas.compiling_for("9.0"):
        assert support.exclusive(inputs)
        jax.shard_map(
            on_device,
            mesh=jax.make_mesh((2,), ("data",), axis_types=auto),
            in_specs=rows,
            out_specs=rows,
            check_vma=check_vma,
        )(jnp.ones(2))
    assert set(found) == {False}


def test_a_number_of_multiprocessors_that_is_a_guess_is_not_counted_on():
    inputs = inputs_of_one_chunk()
    assert not support.exclusive(inputs)
    with jfla.pallas.compiling_for("9.0", num_sms=114):
        assert support.exclusive(inputs)
        assert support.num_sms(inputs) == 114


@pytest.mark.parametrize("op", ["kda", "gdn"])
def test_one_multiprocessor_overlaps_and_splits_nothing(op):
    found = schedule(OPS[op], dims_of(8, 8192), num_sms=1)
    assert (found.overlap_ctas, found.time_splits, found.scan_v_block) == (0, 1, 128)


@pytest.mark.parametrize(("heads", "part_heads", "spans"), [(64, 8, 4), (16, 2, 0)])
def test_a_part_keeps_what_the_backward_finds(heads, part_heads, spans):
    """The states where spans of time begin are results of the forward, whose shapes the whole call has settled."""
    op = OPS["gdn"]
    whole = schedule(op, dims_of(heads, 8192), 100)
    alone = schedule(op, dims_of(part_heads, 8192), 100)
    part = schedule_of_part(op, dims_of(part_heads, 8192), whole)
    assert whole.num_spans == part.num_spans == spans
    assert alone.num_spans == 0
    assert alone.time_splits > 1
    assert part.time_splits == (1 if spans else alone.time_splits)
    assert part.num_sms == 100


@pytest.mark.parametrize(
    ("states", "key_dim", "value_dim", "v_block"),
    [
        (1, 128, 128, 32),
        (256, 128, 128, 64),
        (8192, 128, 128, 128),
        (8192, 256, 128, 64),
        (8192, 64, 192, 64),
    ],
)
def test_a_decoding_cta_has_more_columns_the_more_states_there_are(
    states, key_dim, value_dim, v_block
):
    assert decode_v_block(Dims(states, 1, 1, value_dim, key_dim), HOPPER_SMS) == v_block


@pytest.mark.parametrize(("segments", "v_block"), [(20, 64), (64, 128)])
def test_scans_of_long_segments_split_v(segments, v_block):
    """The longest one ends last."""
    dims = Dims(1, 32, 256 + segments, 128, 128, segments)
    assert schedule(OPS["kda"], dims).scan_v_block == v_block


@pytest.mark.parametrize(
    ("op", "v_block", "ctas"), [("kda", 128, 103), ("gdn", 128, 76)]
)
def test_kernels_overlap_where_segments_are_packed(op, v_block, ctas):
    dims = Dims(1, 32, 300, 128, 128, 20, has_segment_states=True)
    assert overlap_schedule(OPS[op], dims, HOPPER_SMS) == Overlap(v_block, ctas)
    assert overlap_schedule(OPS[op], dims, 1).num_ctas == 0
    few = dims._replace(heads=1, n_chunks=30)
    assert overlap_schedule(OPS[op], few, HOPPER_SMS).num_ctas == 0


@pytest.mark.parametrize(
    ("op", "heads", "bytes_per_us", "in_turn"),
    [
        ("kda", 32, H200_BYTES_PER_US, True),
        ("kda", 32, 3.03e6, True),
        ("kda", 8, H200_BYTES_PER_US, False),  # a chain of all chunks takes longer
        ("kda", 128, H200_BYTES_PER_US, False),  # no multiprocessor is left beside it
        ("gdn", 32, 3.03e6, False),  # it would not have the bits of calls on each
    ],
)
def test_segments_go_in_turn_where_a_ring_makes_that_shorter(
    op, heads, bytes_per_us, in_turn
):
    dims = Dims(1, heads, 276, 128, 128, 20, may_be_padded=True)
    found = schedule(OPS[op], dims, bytes_per_us=bytes_per_us)
    assert found.segments_in_turn == in_turn
    assert (found.ring_chunks > 0) == in_turn
    # What the backward has is that of segments that are side by side.
    with_states = dims._replace(has_segment_states=True)
    by_themselves = schedule(OPS[op], with_states, bytes_per_us=bytes_per_us)
    assert found.scan_v_block == by_themselves.scan_v_block
    assert found.num_spans == by_themselves.num_spans
    for other in (
        by_themselves,
        schedule(OPS[op], dims._replace(batch=2), bytes_per_us=bytes_per_us),
        schedule_of_part(OPS[op], dims, found),
        schedule(OPS[op], dims, bytes_per_us=bytes_per_us, exclusive=False),
    ):
        assert not other.segments_in_turn
        assert other.ring_chunks == 0


@pytest.mark.parametrize(
    ("more", "one_chain"),
    [
        ({}, False),
        ({"num_segments": 2}, True),
        ({"num_segments": 2, "return_final_state": True}, False),
        ({"initial_state": jnp.zeros((1, 2, 1, 64, 64))}, False),
    ],
)
def test_which_calls_may_be_one_chain(more: dict, one_chain: bool):
    x = jnp.zeros((1, 64, 1, 64), jnp.bfloat16)
    ids = jnp.ones((1, 64), jnp.int32)
    call = validated("kda", x, x, x, x, x[..., 0], segment_ids=ids, **more)
    assert dims_of_call(*call).may_be_one_chain == one_chain
