"""The kernels on packed calls in which every segment has a state of its own, in interpret mode."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support.kernel_cases import (
    MAIN,
    TOLERANCE,
    Call,
    by_kernels,
    check,
    error,
    inputs,
    packed,
    scheduled,
)

import jfla
from jfla.pallas.common.end_copies import return_ends
from jfla.pallas.common.packed_rows import PackedRows
from jfla.pallas.segments import in_place, segment_chunks

SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "call",
    [
        Call("kda", "raw", time=90, segments=3, group=1, segment_states=True),
        Call(
            "gdn",
            "mixed",
            time=70,
            segments=4,
            group=1,
            betas="edge",
            segment_states=True,
        ),
        pytest.param(
            Call(
                "kda",
                "mixed",
                batch=2,
                time=150,
                segments=5,
                key_dim=128,
                segment_states=True,
            ),
            marks=SLOW,
        ),
        pytest.param(
            Call(
                "gdn",
                "raw",
                batch=2,
                time=200,
                segments=3,
                value_dim=128,
                segment_states=True,
            ),
            marks=SLOW,
        ),
        pytest.param(
            Call("gdn", "raw", time=70, segments=2, key_dim=256, segment_states=True),
            marks=SLOW,
        ),
    ],
    ids=str,
)
def test_values_and_gradients(call):
    check(call, scheduled(call.op))


@pytest.mark.parametrize("op", ["kda", "gdn"])
def test_the_intra_chunk_kernel_runs_beside_the_scans_of_segments(op):
    call = Call(op, "mixed", batch=2, time=90, segments=3, group=1, segment_states=True)
    check(call, scheduled(op, overlap_ctas=2, overlap_v_block=64))


@pytest.mark.parametrize("op", ["gdn", pytest.param("kda", marks=SLOW)])
def test_a_segment_has_the_bits_of_a_call_on_it_alone(op):
    """Wherever it is packed and whatever lies beside it: not a number in the padding, nothing, one token."""
    lengths = [0, 1, 64, 0, 39]
    total = sum(lengths) + 5
    arrays, _ = inputs(Call(op, "mixed", time=total, group=1))
    states = jax.random.normal(jax.random.key(7), (1, len(lengths), 1, 64, 64))
    with_padding = {name: arrays[name].at[:, -5:].set(jnp.nan) for name in MAIN}
    given = {"segment_ids": packed(lengths, total), "initial_state": states}
    reference = getattr(jfla.reference, f"recurrent_{op}")
    with jfla.pallas.interpret():
        chunk = by_kernels(op)
        out = chunk(*with_padding.values(), **given, return_final_state=True)
        np.testing.assert_array_equal(out.output[:, -5:], 0)
        first = 0
        for segment, length in enumerate(lengths):
            last = slice(first, first + length)
            first += length
            if not length:
                np.testing.assert_array_equal(
                    out.final_state[:, segment], states[:, segment]
                )
                continue
            main = [arrays[name][:, last] for name in MAIN]
            state = states[:, segment]
            alone = chunk(*main, initial_state=state, return_final_state=True)
            np.testing.assert_array_equal(
                *(x.astype("float32") for x in (alone.output, out.output[:, last]))
            )
            np.testing.assert_array_equal(
                alone.final_state, out.final_state[:, segment]
            )
            want = reference(*main, initial_state=state, return_final_state=True)
            assert error(alone.output, want.output) < TOLERANCE["output"]
            assert error(alone.final_state, want.final_state) < TOLERANCE["final_state"]


def test_segments_are_scanned_by_themselves_where_their_number_is_known(monkeypatch):
    """Also without states; without `num_segments` the packed grid stays, with decays that empty the state."""
    grids = []

    def spy(segment_ids: jax.Array, num_segments: int, *, in_turn: bool) -> object:
        grids.append(num_segments)
        return segment_chunks(segment_ids, num_segments, in_turn=in_turn)

    monkeypatch.setattr("jfla.pallas.arrays.segment_chunks", spy)
    arrays, rest = inputs(Call("gdn", "weak", time=70, segments=2, group=1))
    main = [arrays[name] for name in MAIN]
    with jfla.pallas.interpret():
        one_chain = by_kernels("gdn")(*main, **rest)
        assert not grids
        by_segment = by_kernels("gdn")(*main, **rest, num_segments=2)
    assert grids == [2]
    assert by_segment.final_state is None
    assert (
        error(by_segment.output, one_chain.output.astype("float32"))
        < TOLERANCE["output"]
    )


def test_the_longest_segments_start_first():
    """Padding is a segment behind the others, of two tokens here."""
    ids = packed([3, 130, 0, 65], 200)
    table = segment_chunks(ids, 4).table
    of_segments = [[1, 0, 3], [3, 3, 5], [0, 5, 6], [2, 6, 6], [4, 6, 7]]
    np.testing.assert_array_equal(table.segments[..., :3], [of_segments])
    np.testing.assert_array_equal(
        table.segments[..., 3:], [[[1, -1], [2, 0], [3, 1], [4, 2], [-1, 3]]]
    )
    np.testing.assert_array_equal(table.ctas, [[[0, 4, 0, 7]]])


@pytest.mark.parametrize("x64", [False, True])
def test_tables_that_kernels_read_are_int32(x64):
    with jax.enable_x64(x64):
        chunks = segment_chunks(packed([3, 130, 0, 65], 200), 4)
    read = (chunks.places, chunks.bounds, *chunks.table, chunks.most_chunks)
    assert [x.dtype for x in read] == [jnp.int32] * 5


@pytest.mark.parametrize(
    "lengths", [[64] * 40, [0] * 40, [2000, 1000, 1, 64] + [128] * 16]
)
def test_every_segment_is_scanned_by_one_cta(lengths):
    """A CTA has neighbours, some 16 chunks of them or a longer one alone, and all chunks from the first to the last."""
    chunks = segment_chunks(packed(lengths, sum(lengths) + 70), len(lengths))
    segments = np.asarray(chunks.table.segments)[0]
    np.testing.assert_array_equal(segments[1:, 1], segments[:-1, 2])
    scanned = []
    for first, last, first_chunk, end_chunk in np.asarray(chunks.table.ctas)[0]:
        own = []
        rank = first
        while rank >= 0:
            own.append(rank)
            rank = segments[rank, 3]
        backwards = []
        rank = last
        while rank >= 0:
            backwards.append(rank)
            rank = segments[rank, 4]
        assert backwards == own[::-1]
        scanned += own
        assert len(own) <= 16
        if own:
            assert (first_chunk, end_chunk) == (segments[first, 1], segments[last, 2])
            assert segments[last, 1] - first_chunk < 16
        else:
            assert first_chunk == end_chunk
    assert scanned == list(range(len(lengths) + 1))


@pytest.mark.parametrize("machine", ["hopper", "ampere"])
@pytest.mark.parametrize("op", ["kda", "gdn"])
def test_gradients_on_padding_of_whole_chunks_are_0(op, machine):
    """Kernels read again there what others wrote: it lies elsewhere than inputs, of which padding reads zeros."""
    ids = packed([20], 20 + 2 * 64)
    arrays, _ = inputs(Call(op, time=ids.shape[1], group=1))
    main = [
        jnp.where(jnp.expand_dims(ids > 0, tuple(range(2, x.ndim))), x, jnp.nan)
        for x in (arrays[name] for name in MAIN)
    ]

    def output(*main: jax.Array) -> jax.Array:
        call = {"num_segments": 1, "implementation": "pallas"}
        return getattr(jfla, f"chunk_{op}")(*main, segment_ids=ids, **call).output

    kernels = (
        jfla.pallas.mma_kernels() if machine == "ampere" else contextlib.nullcontext()
    )
    with jfla.pallas.interpret(), kernels:
        out, adjoint = jax.vjp(output, *main)
        grads = adjoint(jnp.ones_like(out))
    for name, dx in zip(MAIN, grads):
        assert jnp.isfinite(dx).all(), name
        np.testing.assert_array_equal(dx[:, 20:], 0, err_msg=name)
        assert jnp.any(dx[:, :20] != 0), name


@pytest.mark.parametrize(
    "lengths",
    [
        [[70, 0, 64, 1, 130], [0, 0, 0, 0, 0]],
        [[64, 64, 64, 64, 64], [1, 1, 1, 1, 1]],
        [[0, 0, 335, 0, 0], [128, 0, 3, 0, 204]],
    ],
)
def test_chunks_are_read_and_written_in_place(lengths: list[list[int]]):
    """Each in its row, tokens in their order, from a segment's first one; what padding writes lies on padding."""
    time = 335
    num_segments = len(lengths[0])
    ids = jnp.concatenate([packed(row, time) for row in lengths])
    chunks = segment_chunks(ids, num_segments)
    tokens = jnp.arange(1, 2 * time + 1, dtype=jnp.float32).reshape(2, time, 1, 1)
    # Columns that fill a warpgroup, that do not, and that are more than it takes at a time.
    rows = [
        jnp.broadcast_to(tokens, (2, time, heads, columns))
        for heads, columns in ((2, 128), (1, 64), (9, 256))
    ]
    with jfla.pallas.interpret():
        copied = in_place(
            [jnp.where(ids[:, :, None, None] > 0, x, jnp.nan) for x in rows], chunks
        )
    written = []
    for x in copied:
        x = jax.tree.map(np.asarray, x)
        output = PackedRows(
            *(np.full(a.shape, -1.0, np.float32) for a in (x.tokens, x.ends))
        )
        for row in range(2):
            source = np.asarray(chunks.source[row])
            source = source[source < time]
            np.testing.assert_array_equal(np.sort(source), np.flatnonzero(ids[row]))
            read = read_and_write(x, output, row, np.asarray(chunks.places[row]))
            np.testing.assert_array_equal(read, row * time + source + 1)
        written.append(PackedRows(*map(jnp.asarray, output[:2])))
    with jfla.pallas.interpret():
        returned = return_ends(written, chunks.bounds)
    for x, got in zip(rows, returned):
        np.testing.assert_array_equal(got, jnp.where(ids[:, :, None, None] > 0, x, 0.0))


def read_and_write(
    x: PackedRows, output: PackedRows, row: int, places: np.ndarray
) -> np.ndarray:
    """The tokens of a row of the batch, chunk by chunk, each of which is written to its place in the output."""
    tokens = []
    for read, place in places:
        chunk = x.ends[row, -1 - read] if read < 0 else x.tokens[row, read : read + 64]
        token = chunk[:, 0, 0]
        np.testing.assert_array_equal(
            chunk, np.broadcast_to(token[:, None, None], chunk.shape)
        )
        tokens.append(token[token > 0])
        target = (
            output.ends[row, -1 - place]
            if place < 0
            else output.tokens[row, place:][:64]
        )
        target[...] = chunk
    return np.concatenate(tokens)


def test_a_state_for_each_segment_is_refused_over_devices():
    if jax.device_count() < 2:
        pytest.skip("needs two devices")
    arrays, rest = inputs(Call("gdn", time=64, segments=2, group=1))
    call = {"num_segments": 2, "return_final_state": True, "sequence_axis": "x"}
    choices = []

    def explain(segment_ids: jax.Array, *main: jax.Array) -> None:
        choices.append(
            jfla.explain(jfla.chunk_gdn, *main, segment_ids=segment_ids, **call)
        )

    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    on_stretch = jax.shard_map(
        explain, mesh=mesh, in_specs=P(None, "x"), out_specs=None
    )
    with jfla.pallas.compiling_for("9.0"):
        jax.eval_shape(
            on_stretch, rest["segment_ids"], *(arrays[name] for name in MAIN)
        )
    (choice,) = choices
    assert choice.implementation == "xla"
    assert choice.reasons["pallas"].startswith("states per segment with sequence_axis")
