"""The kernels on a Hopper GPU: the matrix of calls against the recurrence in float64, and the same bits twice."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.kernel_cases import (
    MAIN,
    Call,
    by_kernels,
    check,
    check_gradient_of_16_bits,
    inputs,
    main_and_rest,
    results,
    scheduled,
)

import jfla
from jfla.pallas.backward_overlap import BackwardOverlap

CALLS = [
    Call(op, gates, batch=2, time=time, key_dim=key_dim, value_dim=value_dim)
    for op in ("kda", "gdn")
    for gates, time in (("strong", 257), ("weak", 1000), ("mixed", 130), ("raw", 520))
    for key_dim, value_dim in ((64, 64), (128, 128), (128, 64), (64, 128))
] + [
    Call(op, gates, segments=5, time=time, betas="edge", dtype=dtype)
    for op in ("kda", "gdn")
    for gates, time, dtype in (
        ("mixed", 300, "bfloat16"),
        ("raw", 64, "float16"),
        ("strong", 1, "bfloat16"),
    )
]
# float16, whose pairs of KDA are bfloat16.
CALLS += [
    Call(
        "kda",
        gates,
        batch=2,
        time=300,
        key_dim=key_dim,
        value_dim=128,
        dtype="float16",
    )
    for gates in ("weak", "mixed", "raw")
    for key_dim in (64, 128, 256)
]
CALLS += [
    Call(
        "kda",
        "strong",
        time=1000,
        heads=16,
        key_dim=128,
        value_dim=128,
        dtype="float16",
    )
]
EDGE = {"key_dim": 256, "betas": "edge", "dtype": "float16"}
CALLS += [Call("kda", gates, time=63, **EDGE) for gates in ("strong", "weak")]
CALLS += [Call("gdn", "strong", time=200, value_dim=256, **EDGE)]
# In one launch.
CALLS += [
    Call(op, "raw", time=1000, heads=16, key_dim=128, value_dim=128)
    for op in ("kda", "gdn")
]
# The same, with two consumers of a CTA beside four warpgroups of the other kernel.
CALLS += [
    Call("gdn", "raw", batch=2, time=1000, heads=17, group=1, key_dim=64, value_dim=128)
]
# dq takes the memory of v_new.
CALLS += [Call("kda", "mixed", time=1000, heads=8, group=1, key_dim=128, value_dim=128)]
CALLS += [
    Call(op, gates, time=200, key_dim=key_dim, value_dim=256)
    for op, key_dim in (("gdn", 256), ("gdn", 64), ("kda", 128), ("kda", 256))
    for gates in ("strong", "raw")
]
CALLS += [Call("gdn", "mixed", time=200, key_dim=256, value_dim=64)]
# Chunks of packed segments in place, from any row on.
CALLS += [
    Call(
        op,
        gates,
        2,
        time,
        key_dim=dim,
        value_dim=dim,
        segments=segments,
        segment_states=True,
    )
    for op in ("kda", "gdn")
    for gates, time, dim, segments in (
        ("raw", 1003, 128, 3),
        ("mixed", 777, 64, 20),
        ("strong", 300, 256, 3),
    )
]


@pytest.mark.gpu
@pytest.mark.parametrize("call", CALLS, ids=str)
def test_values_and_gradients(call):
    check(call, by_kernels(call.op))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "call", [x for x in CALLS if max(x.key_dim, x.value_dim) <= 128], ids=str
)
def test_values_and_gradients_by_mma_sync(call):
    with jfla.pallas.mma_kernels():
        check(call, by_kernels(call.op))


@pytest.mark.gpu
@pytest.mark.parametrize("op", ["kda", "gdn"])
def test_the_same_bits_twice(op):
    arrays, rest = inputs(
        Call(op, batch=4, time=2048, heads=8, key_dim=128, value_dim=128)
    )
    chunk = getattr(jfla, f"chunk_{op}")
    run = jax.jit(lambda x: chunk(**x, **rest, implementation="pallas"))
    first, second = (jax.tree.map(np.asarray, run(arrays)) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first, second)


@pytest.mark.gpu
@pytest.mark.parametrize("op", ["kda", "gdn"])
@pytest.mark.parametrize("dim", [64, 128])
def test_gradients_by_mma_sync_have_the_same_bits_every_time(op, dim):
    """What a kernel reads before it has arrived differs from time to time."""
    call = Call(op, batch=2, time=3712, heads=3, key_dim=dim, value_dim=128)
    arrays, rest = inputs(call)
    with jfla.pallas.mma_kernels():
        run = jax.jit(lambda arrays: results(by_kernels(op), arrays, rest))
        first, *others = (jax.tree.map(np.asarray, run(arrays)) for _ in range(9))
    for other in others:
        jax.tree.map(np.testing.assert_array_equal, first, other)


@pytest.mark.gpu
@pytest.mark.parametrize("segments", [0, 3])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_a_gradient_of_16_bits_is_that_of_32_rounded(segments, dim):
    call = Call(
        "kda",
        batch=2,
        time=300,
        key_dim=dim,
        value_dim=dim,
        segments=segments,
        segment_states=bool(segments),
    )
    check_gradient_of_16_bits(call, by_kernels("kda"))


# As on a GPU of less bandwidth: groups of sequences beside their intra-chunk kernel, one after the other.
IN_GROUPS = {
    "kda": {"overlap_ctas": 100, "sequences_per_group": 32, "ring_chunks": 8},
    "gdn": {"overlap_ctas": 68, "sequences_per_group": 64, "ring_chunks": 4},
}


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("op", "batch", "heads", "key_dim", "value_dim"),
    [
        ("kda", 1, 16, 128, 128),
        ("kda", 1, 32, 128, 128),
        ("kda", 1, 32, 64, 128),
        ("kda", 1, 16, 128, 256),
        ("kda", 4, 32, 128, 128),
        ("gdn", 1, 16, 128, 128),
        ("gdn", 1, 32, 128, 128),
        ("gdn", 4, 32, 128, 128),
    ],
)
def test_kernels_side_by_side_give_the_same_bits(op, batch, heads, key_dim, value_dim):
    """Of output and state, without the backward and with it, which reads the A matrices again."""
    sizes = {"batch": batch, "time": 4000, "heads": heads, "group": 1}
    arrays, rest = inputs(
        Call(op, "raw", key_dim=key_dim, value_dim=value_dim, **sizes)
    )
    main, more = main_and_rest(arrays)
    schedules = [{"overlap_ctas": 0}, {"ring_chunks": 0}, {}]
    if batch * heads == 128:
        schedules.append({"overlap_v_block": 128} | IN_GROUPS[op])
    found = []
    for different in schedules:
        chunk = scheduled(op, interpret=False, **different)
        forward = jax.jit(lambda main, more, chunk=chunk: chunk(*main, **more, **rest))
        out = forward(main, more)
        found.append(((out.output, out.final_state), results(chunk, arrays, rest)))
    one_by_one, *side_by_side = jax.tree.map(np.asarray, found)
    for other in side_by_side:
        jax.tree.map(np.testing.assert_array_equal, one_by_one, other)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "call",
    [
        Call("kda", "raw", batch=2, time=1000, key_dim=128, value_dim=128),
        Call("gdn", "raw", batch=2, time=1000, key_dim=128, value_dim=128),
        Call("kda", "mixed", time=1999, segments=9, key_dim=128, value_dim=128),
        Call("gdn", batch=2, time=1984, segments=9, key_dim=64, value_dim=128),
        Call("gdn", "raw", time=700, segments=5, key_dim=256, value_dim=256),
    ],
    ids=str,
)
def test_rows_are_one_packed_segment_where_copies_take_long(call):
    check(call, scheduled(call.op, interpret=False, in_place=True))


@pytest.mark.gpu
@pytest.mark.parametrize("op", ["kda", "gdn"])
@pytest.mark.parametrize(("batch", "segments"), [(1, 0), (2, 0), (1, 5)])
def test_a_ring_gives_rows_in_place_the_same_bits(op, batch, segments):
    """Also of a row of segments that ends in much padding, which is scanned by CTAs of its own."""
    sizes = {"time": 4000, "heads": 32 // batch, "key_dim": 128, "value_dim": 128}
    call = Call(op, "raw", batch=batch, segments=segments, group=1, **sizes)
    arrays, rest = inputs(call)
    if segments:
        rest["segment_ids"] = rest["segment_ids"].at[:, 2500:].set(0)
    main, more = main_and_rest(arrays)
    found = []
    for different in ({"overlap_ctas": 0}, {"ring_chunks": 0}, {}):
        chunk = scheduled(op, interpret=False, in_place=True, **different)
        forward = jax.jit(lambda main, more, chunk=chunk: chunk(*main, **more, **rest))
        found.append((forward(main, more).output, results(chunk, arrays, rest)))
    one_by_one, *side_by_side = jax.tree.map(np.asarray, found)
    for other in side_by_side:
        jax.tree.map(np.testing.assert_array_equal, one_by_one, other)


@pytest.mark.gpu
@pytest.mark.parametrize("padding", [0, 1500])
@pytest.mark.parametrize("v_block", [64, 128])
def test_a_ring_gives_segments_in_turn_the_same_bits(v_block, padding):
    """One chain of many lengths, some 0, and the padding behind it, which is scanned by CTAs of its own."""
    sizes = {"time": 4000, "heads": 32, "key_dim": 128, "value_dim": 128}
    arrays, rest = inputs(Call("kda", "raw", segments=20, group=1, **sizes))
    ids = rest["segment_ids"]
    ids = jnp.where((ids == 4) | (ids == 20), ids - 1, ids)  # two of no token
    rest["segment_ids"] = ids.at[:, sizes["time"] - padding :].set(0)
    rest["num_segments"] = 20
    beside = {"overlap_v_block": v_block, "overlap_ctas": 132 - 4096 // v_block}
    in_turn = beside | {"segments_in_turn": True}
    found = []
    for different in (
        {"segments_in_turn": False, "overlap_ctas": 0},
        in_turn | {"overlap_ctas": 0},
        in_turn | {"ring_chunks": 0},
        in_turn | {"ring_chunks": 8},
    ):
        chunk = scheduled("kda", interpret=False, **different)
        found.append(jax.tree.map(np.asarray, results(chunk, arrays, rest)))
    side_by_side, *others = found
    for other in others:
        jax.tree.map(np.testing.assert_array_equal, side_by_side, other)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("op", "spans"), [("kda", {}), ("gdn", {}), ("gdn", {"num_spans": 4})]
)
def test_columns_of_a_backward_scan_change_no_bit(op, spans):
    sizes = {"time": 2048, "heads": 40, "key_dim": 128, "value_dim": 128, "group": 1}
    arrays, rest = inputs(Call(op, "raw", **sizes))
    form = {"backward_overlap": None} | spans
    found = [
        results(
            scheduled(op, interpret=False, backward_v_block=v_block, **form),
            arrays,
            rest,
        )
        for v_block in (64, 128)
    ]
    jax.tree.map(np.testing.assert_array_equal, *jax.tree.map(np.asarray, found))


@pytest.mark.gpu
@pytest.mark.parametrize("segments", [0, 20])
def test_spans_of_time_one_after_the_other_give_the_bits_of_the_whole(segments):
    sizes = {"batch": 2, "time": 2048, "heads": 8, "key_dim": 128, "value_dim": 128}
    arrays, rest = inputs(Call("gdn", "raw", segments=segments, **sizes))
    whole, by_span = (
        results(
            scheduled("gdn", interpret=False, num_spans=spans, backward_overlap=None),
            arrays,
            rest,
        )
        for spans in (0, 4)
    )
    jax.tree.map(
        np.testing.assert_array_equal, *jax.tree.map(np.asarray, (whole, by_span))
    )


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("op", "sizes", "dtype", "beside"),
    [
        ("gdn", {"heads": 32, "time": 8192}, "bfloat16", (68, 8, 0, 36, 7)),
        ("gdn", {"heads": 40, "time": 2500}, "bfloat16", (52, 3, 40, 30, 7)),
        ("gdn", {"heads": 24, "time": 2560}, "float16", (100, 5, 16, 20, 7)),
        ("gdn", {"heads": 16, "time": 2560}, "bfloat16", (68, 3, 8, 30, 5)),
        ("gdn", {"heads": 2, "time": 1000}, "bfloat16", (1, 2, 0, 0, 0)),
        # whose last group has fewer sequences
        ("gdn", {"heads": 40, "time": 2500}, "bfloat16", (58, 3, 37, 30, 6)),
    ],
)
def test_scans_beside_the_gradients_change_no_bit(op, sizes, dtype, beside):
    """With rings and without, groups of sequences, a first span that is shorter; twice, because a race may not show."""
    batch = 1 if sizes["time"] == 8192 else 2
    sizes = {"key_dim": 128, "value_dim": 128, "group": 1, "batch": batch} | sizes
    arrays, rest = inputs(Call(op, "raw", dtype=dtype, **sizes))
    alone, *side_by_side = (
        jax.tree.map(
            np.asarray,
            results(
                scheduled(op, interpret=False, num_spans=0, backward_overlap=form),
                arrays,
                rest,
            ),
        )
        for form in (None, BackwardOverlap(*beside), BackwardOverlap(*beside))
    )
    for found in side_by_side:
        jax.tree.map(np.testing.assert_array_equal, alone, found)


def _gradients(x: dict[str, jax.Array]) -> tuple[jax.Array, ...]:
    def output(*main: jax.Array) -> jax.Array:
        return jfla.chunk_kda(*main, qk_norm=True, implementation="pallas").output

    out, adjoint = jax.vjp(output, *(x[name] for name in MAIN))
    return adjoint(jnp.ones_like(out))


def _packed(x: dict[str, jax.Array]) -> tuple[jax.Array, ...]:
    ids = jnp.repeat(
        jnp.arange(1, 5), jnp.array([40, 1, 130, 29]), total_repeat_length=200
    )[None]
    call = {
        "segment_ids": ids,
        "num_segments": 4,
        "implementation": "pallas",
        "qk_norm": True,
    }
    out, adjoint = jax.vjp(
        lambda *main: jfla.chunk_kda(*main, **call).output, *(x[name] for name in MAIN)
    )
    return out, *adjoint(jnp.ones_like(out))


def _decoded(x: dict[str, jax.Array]) -> tuple[jax.Array, ...]:
    token = [x[name][:, :1] for name in MAIN]
    state = jnp.ones((1, 2, 128, 128)) * x["beta"][:, 0, :, None, None].astype(
        jnp.float32
    )
    call = {
        "initial_state": state,
        "return_final_state": True,
        "implementation": "pallas",
    }
    return tuple(jfla.recurrent_kda(*token, **call))


@pytest.mark.gpu
@pytest.mark.parametrize("in_turn", [jax.vmap, lambda f: lambda x: jax.lax.map(f, x)])
@pytest.mark.parametrize("call", [_gradients, _packed, _decoded])
def test_rows_of_a_loop_are_those_of_calls_on_each(call, in_turn):
    """Of kernels that write over an operand, where XLA would take slices into the launch."""
    drawn, _ = inputs(
        Call("kda", time=200, heads=2, group=1, key_dim=128, value_dim=128)
    )
    rows = [
        {name: jnp.roll(drawn[name], 17 * i, axis=1) for name in MAIN} for i in range(3)
    ]
    together = jax.jit(in_turn(call))(jax.tree.map(lambda *x: jnp.stack(x), *rows))
    alone = jax.jit(call)
    for i, row in enumerate(rows):
        for got, want in zip(together, alone(row), strict=True):
            np.testing.assert_array_equal(np.asarray(got[i]), np.asarray(want))
