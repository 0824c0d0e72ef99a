"""The backward's scans beside the gradient kernel: when they are, that they can always go on, bits."""

import collections
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.flags import record_flags
from support.kernel_cases import Call, inputs, results, scheduled

import jfla
from jfla.pallas import scans_and_grads
from jfla.pallas.backward_overlap import SPAN_CHUNKS, BackwardOverlap
from jfla.pallas.common.chunk_index import ChunkGrid, EqualSpans
from jfla.pallas.common.scan.spec import ScanConfig
from jfla.pallas.common.scan.steps import backward_scans_kernel
from jfla.pallas.dims import Dims
from jfla.pallas.heuristics import HOPPER_SMS, Schedule, schedule, schedule_of_part
from jfla.pallas.kernel_times import BYTES_PER_US, H200_BYTES_PER_US
from jfla.pallas.mgpu import overlap
from jfla.types import OPS

H100_BYTES_PER_US = BYTES_PER_US["NVIDIA H100 80GB HBM3"]


@pytest.mark.parametrize(
    ("op", "batch", "heads", "time", "bytes_per_us", "group"),
    [
        ("gdn", 1, 32, 8192, H100_BYTES_PER_US, 0),
        ("gdn", 8, 32, 4096, H100_BYTES_PER_US, 32),
        ("gdn", 1, 32, 65536, H100_BYTES_PER_US, 0),
        ("gdn", 1, 32, 8192, H200_BYTES_PER_US, 0),
        ("gdn", 8, 32, 4096, H200_BYTES_PER_US, 32),
        ("gdn", 1, 32, 65536, H200_BYTES_PER_US, 0),
        ("gdn", 1, 16, 8192, H200_BYTES_PER_US, None),
        ("gdn", 1, 16, 8192, H100_BYTES_PER_US, None),  # a chain takes longer
        ("gdn", 1, 32, 1024, H100_BYTES_PER_US, None),  # few chunks
        ("gdn", 1, 4, 65536, H100_BYTES_PER_US, None),  # time is split
        # Its forward would have to keep states beside A_qk and A_inv.
        ("kda", 1, 32, 8192, H100_BYTES_PER_US, None),
        ("kda", 1, 32, 8192, H200_BYTES_PER_US, None),
        ("kda", 8, 32, 4096, H100_BYTES_PER_US, None),
        ("kda", 8, 32, 4096, H200_BYTES_PER_US, None),
        ("kda", 2, 32, 8192, H200_BYTES_PER_US, None),
        ("kda", 4, 32, 4096, H200_BYTES_PER_US, None),
    ],
)
def test_scans_are_beside_the_gradients_where_that_is_shorter(
    op, batch, heads, time, bytes_per_us, group
):
    dims = Dims(batch, heads, time // 64, 128, 128)
    found = schedule(OPS[op], dims, bytes_per_us=bytes_per_us)
    beside = found.backward_overlap
    assert (None if beside is None else beside.sequences_per_group) == group
    if beside is None:
        assert found.num_checkpoints == found.num_spans
        return
    sequences = group or batch * heads
    assert beside.grads_ctas == HOPPER_SMS - 2 * sequences
    assert found.num_checkpoints == beside.num_spans
    shared = schedule(OPS[op], dims, bytes_per_us=bytes_per_us, exclusive=False)
    assert shared.backward_overlap is None


@pytest.mark.parametrize(
    ("time", "long_spans"), [(8192, 4), (8448, 4), (9472, 0), (23552, 4)]
)
def test_a_part_keeps_the_states_of_the_whole(time, long_spans):
    """Its own kernels go one after the other. 148 chunks are four long spans, but no short ones make up 37."""
    op = OPS["gdn"]
    dims = Dims(1, 64, time // 64, 128, 128)
    whole = schedule(op, dims, bytes_per_us=H100_BYTES_PER_US)
    part = schedule_of_part(op, dims._replace(heads=32), whole)
    assert whole.backward_overlap is not None
    assert part.backward_overlap is None
    assert part.num_checkpoints == whole.num_checkpoints
    assert part.num_spans == long_spans
    assert dims.n_chunks // whole.num_checkpoints >= SPAN_CHUNKS[0] - 1
    assert whole.num_checkpoints % (long_spans or 1) == 0


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize(("batch", "time"), [(1, 8192), (8, 4096), (1, 65536)])
def test_a_gate_per_channel_keeps_two_matrices_of_a_chunk(batch, time, qk_norm):
    """Beside its inputs: no state, at any size."""
    rows = jax.ShapeDtypeStruct((batch, time, 32, 128), jnp.bfloat16)
    numbers = jax.ShapeDtypeStruct((batch, time, 32), jnp.float32)
    arrays = (rows, rows, rows, rows, numbers)

    def kept(*arrays: jax.Array) -> list[jax.Array]:
        call = functools.partial(
            jfla.chunk_kda, qk_norm=qk_norm, implementation="pallas"
        )
        _, adjoint = jax.vjp(lambda *x: call(*x).output, *arrays)
        return jax.tree.leaves(adjoint)

    with jfla.pallas.compiling_for("9.0"):
        found = jax.make_jaxpr(kept)(*arrays)
    inputs = set(found.jaxpr.invars)
    shapes = [x.aval.str_short() for x in found.jaxpr.outvars if x not in inputs]
    matrices = f"bfloat16[{batch},32,{time // 64},64,64]"
    assert shapes == [matrices, matrices]


@pytest.mark.parametrize(("n_chunks", "num_spans"), [(12, 3), (7, 3), (9, 9), (5, 1)])
def test_spans_are_counted_from_the_end_of_time(n_chunks, num_spans):
    spans = EqualSpans(n_chunks, num_spans)
    order = [int(spans.last_span_first(jnp.int32(i))) for i in range(n_chunks)]
    chunks = np.arange(n_chunks)
    of_spans = np.array_split(chunks[::-1], range(spans.length, n_chunks, spans.length))
    assert len(of_spans) == num_spans
    assert order == [int(chunk) for span in of_spans for chunk in span[::-1]]
    bounds = [
        [int(x) for x in spans.span_after(jnp.int32(i))] for i in range(num_spans)
    ]
    assert bounds == [[span[-1], span[0] + 1] for span in of_spans]


@settings(deadline=None, max_examples=25)
@given(
    batch=st.integers(1, 4),
    heads=st.sampled_from([16, 24, 32, 40, 64]),
    n_chunks=st.integers(16, 100),
    bytes_per_us=st.sampled_from([H200_BYTES_PER_US, H100_BYTES_PER_US, 2e6, 1e6]),
    num_sms=st.sampled_from([78, 114, 132]),
)
def test_scans_always_get_room(batch, heads, n_chunks, bytes_per_us, num_sms):
    dims = Dims(batch, heads, n_chunks, 128, 128)
    found = schedule(OPS["gdn"], dims, num_sms, bytes_per_us=bytes_per_us)
    if found.backward_overlap is not None:
        assert chunks_read(dims, found) == dims.num_chunks


def test_a_ring_as_long_as_the_pipeline_would_never_get_room():
    """What the simulation is for."""
    dims = Dims(1, 32, 128, 128, 128)
    found = schedule(OPS["gdn"], dims, bytes_per_us=H100_BYTES_PER_US)
    assert found.backward_overlap is not None
    assert chunks_read(dims, found) == dims.num_chunks
    short = found.backward_overlap._replace(dstate_ring=ScanConfig().stages)
    assert chunks_read(dims, found, short) < dims.num_chunks


def chunks_read(
    dims: Dims, found: Schedule, beside: BackwardOverlap | None = None
) -> int:
    """Chunks whose gradients are made, when no CTA can go on.

    A scan goes through its sequence of every group; it signals a chunk when the next one is consumed and one as many
    stages ahead is copied, for which the ring of its results must have room.
    """
    beside = beside or found.backward_overlap
    assert beside is not None
    n_chunks = dims.n_chunks
    stages = ScanConfig().stages
    grid = ChunkGrid(
        dims.batch,
        dims.heads,
        n_chunks,
        beside.sequences_per_group,
        descending=True,
    )
    index = grid(jnp.arange(dims.num_chunks))
    tiles = list(
        zip(
            np.asarray(index.batch * dims.heads + index.head).tolist(),
            np.asarray(index.chunk).tolist(),
        )
    )
    in_reverse = list(range(n_chunks))[::-1]
    spans = EqualSpans(n_chunks, beside.num_spans)
    by_spans = np.asarray(spans.last_span_first(jnp.arange(n_chunks))).tolist()
    scans = (in_reverse, beside.dstate_ring), (by_spans, beside.state_ring)
    group = beside.sequences_per_group or dims.sequences
    assert len(scans) * group + beside.grads_ctas <= found.num_sms
    num_steps = [
        n_chunks * len(range(place, dims.sequences, group)) for place in range(group)
    ]
    resident = [[place, *scan, 0] for place in range(group) for scan in scans]

    def chunk_of(place: int, order: list[int], step: int) -> tuple[int, int]:
        return place + step // n_chunks * group, order[step % n_chunks]

    signalled: collections.Counter = collections.Counter()
    read = set()
    next_tile = list(range(beside.grads_ctas))
    going = True
    while going:
        going = False
        for scan in resident:
            place, order, ring, step = scan
            while step < num_steps[place]:
                ahead = step + 1 + stages
                if ahead < num_steps[place]:
                    sequence, chunk = chunk_of(place, order, ahead)
                    earlier = chunk + (ring or n_chunks)
                    if earlier < n_chunks and (sequence, earlier) not in read:
                        break
                signalled[chunk_of(place, order, step)] += 1
                step += 1
                going = True
            scan[-1] = step
        for cta, tile in enumerate(next_tile):
            while tile < len(tiles) and signalled[tiles[tile]] == 2:
                read.add(tiles[tile])
                tile += beside.grads_ctas
                going = True
            next_tile[cta] = tile
    return len(read)


@pytest.mark.interpreted  # one CTA runs after the other: the scans first
@pytest.mark.parametrize(
    ("heads", "time", "value_dim", "num_spans", "group"),
    [
        (1, 190, 64, 2, 0),  # the first span is shorter
        pytest.param(1, 256, 128, 4, 0, marks=pytest.mark.slow),
        pytest.param(2, 250, 64, 2, 1, marks=pytest.mark.slow),
        pytest.param(3, 100, 64, 2, 2),  # the last group is smaller
    ],
)
def test_scans_beside_the_gradients_give_the_same_bits(
    heads, time, value_dim, num_spans, group, monkeypatch
):
    """One long span does, too, as on several GPUs, for whose backward the forward keeps more states than it takes."""
    signals, waits = record_flags(monkeypatch)
    scanned_spans = []

    def spy(*args: Any, **kwargs: Any) -> overlap.PendingResults:
        checkpoints, _ = args[4]
        scanned_spans.append(checkpoints.shape[2])
        return backward_scans_kernel(*args, **kwargs)

    monkeypatch.setattr(scans_and_grads, "backward_scans_kernel", spy)
    sizes = {"time": time, "heads": heads, "value_dim": value_dim, "group": 1}
    arrays, rest = inputs(Call("gdn", "raw", **sizes))
    alone = results(scheduled("gdn"), arrays, rest)
    flags_shape = (arrays["v"].shape[0], heads, -(-time // 64))
    assert flags_shape not in signals
    kept = BackwardOverlap(3, num_spans, group, state_ring=0, dstate_ring=0)
    beside = results(scheduled("gdn", backward_overlap=kept), arrays, rest)
    assert flags_shape in signals
    assert (flags_shape, 2) in waits
    assert scanned_spans[0] == num_spans
    part = scheduled("gdn", num_spans=1, checkpoints_of_whole=flags_shape[-1])
    by_span = results(part, arrays, rest)
    assert scanned_spans[-1] == 1  # of as many states as there are chunks
    for other in (beside, by_span):
        jax.tree.map(
            np.testing.assert_array_equal, *jax.tree.map(np.asarray, (alone, other))
        )
