"""Cases and their inputs: what is combined with what, and that the numbers are of the kind that is asked for."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import gates, inputs
from benchmarks.cost import cost
from benchmarks.shapes import OPS, PASSES, SETS, Case, Shape, cases, chosen

TINY = Shape(2, 128, 1, 16, value_heads=2)


def test_every_shape_has_a_name_of_its_own():
    shapes = {shape for shapes in SETS.values() for shape in shapes}
    assert len({str(shape) for shape in shapes}) == len(shapes)


def test_the_named_sets_hold_what_they_are_named_for():
    assert SETS["fla823"] == tuple(
        Shape(16, time, 8, 256) for time in (256, 512, 1024, 2048, 4096, 8192, 16384)
    )
    assert Shape(1, 8192, 16, value_heads=32) in SETS["paper"]
    packed = {(shape.time, shape.segments, shape.packing) for shape in SETS["packed"]}
    kinds = ("uniform", "random", "skewed")
    assert packed == {(16384, 64, "uniform")} | {
        (time, s, kind)
        for time in (4096, 8192, 16384)
        for s in (10, 20)
        for kind in kinds
    }
    assert {(shape.batch, shape.heads, shape.dim) for shape in SETS["packed"]} == {
        (1, 32, 128)
    }


def test_backward_brings_what_it_is_the_difference_of():
    timed = [
        case.timed
        for case in cases(list(SETS["quick"]), ["kda"], ["backward"], ["strong"])
    ]
    assert timed == ["forward", "forward+backward"]


def test_decode_is_measured_once_for_shapes_that_differ_in_time():
    decode = cases(list(SETS["paper"]), ["gdn"], ["decode"], ["strong"])
    assert len(decode) == len(set(decode)) == 4
    assert all(case.shape.time == 1 for case in decode)
    assert cases(list(SETS["packed"]), ["gdn"], ["decode"], ["strong"]) == []


def test_decoding_is_all_that_one_token_is_measured_for():
    found = cases(list(SETS["decode"]), ["kda"], list(PASSES), ["strong"])
    assert [(case.timed, case.shape.batch) for case in found] == [
        ("decode", batch) for batch in (1, 8, 64, 256)
    ]
    assert {(case.shape.time, case.shape.heads, case.shape.dim) for case in found} == {
        (1, 32, 128)
    }


def test_shapes_are_chosen_by_name():
    assert chosen(["paper", "fla"], []) == list(
        dict.fromkeys([*SETS["paper"], *SETS["fla"]])
    )
    assert chosen(["paper", "packed"], ["B1 T8192 H32 D128 random S10"]) == [
        Shape(1, 8192, 32, packing="random", segments=10)
    ]
    names = ["B1 T2048 H32 D128", "B1 T8192 H32 D128"]
    assert [str(shape) for shape in chosen(["paper"], names)] == names
    with pytest.raises(
        ValueError, match=r"shapes must be among B1 T8192 H32 D128, .*, got 'B3'"
    ):
        chosen(["paper"], ["B3"])


@pytest.mark.parametrize(
    ("op", "gate"),
    [
        ("kda", "strong"),
        ("kda", "mixed"),
        ("gdn", "weak"),
        ("kda", "production"),
        ("kda", "recorded"),
        ("gdn", "recorded"),
    ],
)
def test_inputs_are_unit_keys_bounded_decays_and_never_zeros(op: str, gate: str):
    x = inputs.draw(Case(op, "forward+backward", TINY, gate), 0)
    for name in ("q", "k"):
        np.testing.assert_allclose(
            np.linalg.norm(x[name].astype(jnp.float32), axis=-1), 1, atol=1e-2
        )
    assert x["q"].shape == (2, 128, 1, 16)
    assert x["v"].shape == x["do"].shape == (2, 128, 2, 16)
    assert x["g"].shape == ((2, 128, 2, 16) if op == "kda" else (2, 128, 2))
    assert all(float(jnp.mean(a == 0)) < 0.01 for a in x.values())
    lowest = float(x["g"].min())
    assert (-200 if gate == "recorded" else -5) <= lowest < 0
    assert (lowest > -0.5) == (gate == "weak")


def test_one_channel_of_the_mixed_gate_is_slow():
    g = inputs.draw(Case("kda", "forward+backward", TINY, "mixed"), 0)["g"]
    assert float(-g[..., 0].mean()) < 1e-2 < 0.1 < float(-g[..., 1:].mean())


def test_the_production_gate_is_that_of_bounded_models():
    """-5 sigmoid(x): half of the decays are beyond -2.5."""
    g = inputs.draw(Case("kda", "forward", TINY, "production"), 0)["g"]
    assert float(jnp.mean(g < -2.5)) == pytest.approx(0.5, abs=0.05)
    assert float(g.min()) < -4


@pytest.mark.parametrize("op", ["kda", "gdn"])
def test_the_published_gate_is_that_of_a_new_layer(op: str):
    """-exp(a_log) softplus(x + dt_bias), with steps of 1e-3 to 0.1 and rates of 1 to 16 where x is 0."""
    heads = (64, 16) if op == "kda" else (64,)
    at_zero = gates.decay(jnp.zeros((1, 1, *heads)), "published", op)
    assert -1.6 <= float(at_zero.min()) < -0.5
    assert -0.01 < float(at_zero.max()) <= -1e-3
    g = inputs.draw(Case(op, "forward", TINY, "published"), 0)["g"]
    assert float(g.min()) < -0.1


def test_the_recorded_gate_has_the_quantiles_of_the_model():
    quantiles = gates.recorded("kda")
    g = inputs.draw(
        Case("kda", "forward", dataclasses.replace(TINY, time=4096), "recorded"), 0
    )["g"]
    for head in range(g.shape[2]):
        found = np.quantile(g[:, :, head], [0.25, 0.5, 0.75])
        np.testing.assert_allclose(found, quantiles[head, [16, 32, 48]], rtol=0.05)


def test_half_of_the_reset_gates_empty_the_state():
    g = inputs.draw(Case("gdn", "forward", TINY, "reset"), 0)["g"]
    assert set(np.unique(g)) == {-1000.0, 0.0}
    assert float(jnp.mean(g == 0)) == pytest.approx(0.5, abs=0.1)


def test_one_head_of_the_mixed_gate_is_slow_where_there_are_no_channels():
    g = inputs.draw(Case("gdn", "forward", TINY, "mixed"), 0)["g"]
    assert float(-g[..., 0].mean()) < 1e-2 < 0.1 < float(-g[..., 1].mean())


def test_all_passes_of_a_shape_have_the_same_inputs():
    forward, both = (
        inputs.draw(Case("kda", timed, TINY), 0)
        for timed in ("forward", "forward+backward")
    )
    assert all(jnp.array_equal(forward[name], both[name]) for name in both)


def test_seeds_give_other_numbers_and_the_same_seed_the_same():
    case = Case("gdn", "forward+backward", TINY, "weak")
    first, again, other = (inputs.draw(case, seed)["v"] for seed in (0, 0, 1))
    assert jnp.array_equal(first, again)
    assert not jnp.array_equal(first, other)


@pytest.mark.parametrize("packing", ["uniform", "random", "skewed"])
def test_packed_lengths_are_positive_and_fill_the_time(packing: str):
    for time, segments in ((4096, 10), (16384, 20), (20, 20)):
        lengths = np.diff(inputs.cu_seqlens(packing, time, segments))
        assert len(lengths) == segments
        assert lengths.sum() == time
        if time > segments:
            assert lengths.min() > 0


def test_packed_inputs_say_which_sequence_a_token_is_of():
    ids = inputs.draw(
        Case("gdn", "forward", Shape(1, 64, 1, 16, packing="random", segments=4)), 0
    )["segment_ids"]
    assert sorted(set(np.asarray(ids[0]))) == [1, 2, 3, 4]


@pytest.mark.parametrize("op", OPS)
def test_least_bytes_are_the_bytes_of_arguments_and_results(op: str):
    def drawn(case: Case) -> dict[str, int]:
        arrays = jax.eval_shape(lambda: inputs._draw(case, 0))
        return {name: x.size * x.dtype.itemsize for name, x in arrays.items()}

    x = drawn(Case(op, "forward+backward", TINY))
    do = x.pop("do")
    state = 2 * 2 * 16 * 16 * 4
    assert cost(op, "forward", TINY).bytes == sum(x.values()) + x["v"] + state
    assert cost(op, "backward", TINY).bytes == 2 * sum(x.values()) + do
    token = Shape(2, 1, 1, 16, value_heads=2)
    x = drawn(Case(op, "decode", token))
    assert cost(op, "decode", token).bytes == sum(x.values()) + x["v"] + state


def test_operations_are_those_of_a_count_by_hand():
    """One chunk of one head, C = 64, K = V = 128: see the list in cost.py."""
    c, d = 64, 128
    forward = 2 * (2 * c * c * d) + c**3 / 3 + 3 * (2 * c * d * d) + 2 * (2 * c * c * d)
    assert cost("kda", "forward", Shape(1, 64, 1, d)).flops == pytest.approx(forward)
    assert cost("gdn", "forward", Shape(2, 65, 3, d)).flops == pytest.approx(
        2 * 2 * 3 * forward
    )


@pytest.mark.parametrize("op", OPS)
def test_a_models_call_has_a_raw_gate_and_its_parameters(op: str):
    case = Case(op, "forward+backward", TINY, "model")
    x = inputs.draw(case, 0)
    assert x["g"].dtype == x["q"].dtype == jnp.bfloat16
    assert 0.4 < float(jnp.mean(x["g"] > 0)) < 0.6
    norms = np.linalg.norm(x["k"].astype(jnp.float32), axis=-1)
    assert np.median(norms) == pytest.approx(4, rel=0.1)
    options = inputs.call_options(x)
    assert options["qk_norm"]
    # The same normal numbers make the decays of "published".
    decays = inputs.draw(dataclasses.replace(case, gate="published"), 0)["g"]
    gated = gates.gated(x["g"], options["gate"])
    np.testing.assert_allclose(gated, decays, rtol=0.05, atol=1e-4)
    assert inputs.differentiated(x).keys() == {
        *inputs.MAIN,
        *inputs.GATE_PARAMETERS,
    }


@pytest.mark.parametrize("op", OPS)
def test_a_models_call_moves_the_bytes_of_its_arguments(op: str):
    case = Case(op, "forward", TINY, "model")
    arrays = jax.eval_shape(lambda: inputs._draw(case, 0))
    sizes = {name: x.size * x.dtype.itemsize for name, x in arrays.items()}
    read = sum(sizes[name] for name in inputs.MAIN)
    state = 2 * 2 * 16 * 16 * 4
    assert cost(op, "forward", TINY, 2).bytes == read + sizes["v"] + state
