"""The kernels on the CPU, in interpret mode with race detection: values and gradients against the recurrence."""

from typing import Any

import jax
import numpy as np
import pytest
from support.flags import record_flags
from support.kernel_cases import (
    MAIN,
    TOLERANCE,
    Call,
    by_kernels,
    check,
    check_gradient_of_16_bits,
    error,
    inputs,
    results,
    scheduled,
)

import jfla
from jfla.pallas.mgpu.launch import launch

CALLS = [
    pytest.param(Call("kda", "strong", key_dim=128), marks=pytest.mark.slow),
    Call("kda", "raw", time=64, key_dim=128),
    Call("kda", "mixed", time=70, segments=4, betas="edge", group=1),
    Call("gdn", "strong", time=70, key_dim=128, dtype="float16", group=1),
    pytest.param(Call("gdn", "raw", segments=4, value_dim=128), marks=pytest.mark.slow),
    Call("gdn", "mixed", time=65, betas="edge", repeated_keys=True),
    Call("gdn", "raw", time=70, key_dim=256, value_dim=256),  # in blocks of K and of V
    pytest.param(Call("kda", "raw", time=64, value_dim=256), marks=pytest.mark.slow),
    Call("kda", "raw", time=70, key_dim=256),  # in blocks of K
    pytest.param(
        Call("kda", "mixed", time=70, key_dim=256, dtype="float16"),
        marks=pytest.mark.slow,
    ),
    pytest.param(
        Call("kda", "raw", time=64, key_dim=128, dtype="float16"),
        marks=pytest.mark.slow,
    ),
    # The gradient of a beta of 0, of which little is left in float16.
    pytest.param(
        Call("kda", "strong", time=63, key_dim=128, betas="edge", dtype="float16"),
        marks=pytest.mark.slow,
    ),
    # Tiles of channels that take unlike numbers of passes over their pairs.
    pytest.param(Call("kda", "mixed", time=70, key_dim=128), marks=pytest.mark.slow),
    pytest.param(Call("kda", "mixed", time=70, key_dim=256), marks=pytest.mark.slow),
]


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_values_and_gradients(call):
    if call.op == "kda" or call.value_dim == 64:
        # one CTA takes several chunks, and all of V
        check(call, scheduled(call.op, num_sms=1))
        return
    with jfla.pallas.interpret():
        check(call, by_kernels(call.op))


def test_a_gradient_of_16_bits_is_that_of_32_rounded():
    check_gradient_of_16_bits(Call("kda", time=64, group=1), scheduled("kda"))


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(
            Call("kda", "raw", time=64, group=1, key_dim=48, value_dim=40),
            marks=pytest.mark.slow,
        ),
        Call("gdn", "mixed", time=65, key_dim=24, value_dim=56, betas="edge"),
        pytest.param(
            Call("gdn", "raw", time=64, key_dim=96, value_dim=192),
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_sizes_between_those_of_the_kernels_are_padded(call):
    with jfla.pallas.interpret():
        check(call, by_kernels(call.op))


@pytest.mark.parametrize(
    ("op", "scale"),
    [
        ("gdn", -0.3),
        ("kda", 0.0),
        pytest.param("gdn", 0.0, marks=pytest.mark.slow),
        pytest.param("kda", -0.3, marks=pytest.mark.slow),
    ],
)
def test_a_scale_may_be_negative_or_zero(op, scale):
    call = Call(op, "weak", time=64, group=1)
    check(call, scheduled(op, num_sms=1), scale=scale, qk_norm=True)


@pytest.mark.interpreted  # compiled, a buffer of shared memory holds a multiple of 128 numbers
def test_an_array_that_a_kernel_is_given_twice_goes_in_once():
    def kernel(inputs: Any, out: Any, _smem: Any, _barriers: Any) -> None:
        a, b, c = inputs
        out[...] = a[...] + 2 * b[...] + 4 * c[...]

    x, y = (jax.random.normal(jax.random.key(seed), (64,)) for seed in range(2))
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)

    def run(x: jax.Array, y: jax.Array) -> jax.Array:
        grid = {"n": 1}
        return launch(
            kernel, (x, y, x), shape, grid=grid, num_warpgroups=1, name="sum_of_three"
        )

    with jfla.pallas.interpret():
        (call,) = jax.make_jaxpr(run)(x, y).eqns
        assert len(call.invars) == 2
        np.testing.assert_allclose(run(x, y), 5 * x + 2 * y, rtol=1e-6)


@pytest.mark.interpreted  # the scan does not wait for its chunks here, and one CTA runs after the other
@pytest.mark.parametrize(
    ("op", "group_size"),
    [
        pytest.param("kda", 0, marks=pytest.mark.slow),
        pytest.param("kda", 1, marks=pytest.mark.slow),
        ("gdn", 0),
        ("gdn", 1),
    ],
)
def test_intra_beside_the_scan_gives_the_same_bits(op, group_size, monkeypatch):
    """Without races, which interpret mode sees between CTAs; and what waits for stores before it signals them."""
    recorded = record_flags(monkeypatch)
    arrays, _ = inputs(Call(op, time=300, key_dim=128, value_dim=128))

    def run(num_ctas: int) -> jfla.DeltaRuleOutput:
        call = scheduled(
            op,
            overlap_v_block=64,
            overlap_ctas=num_ctas,
            sequences_per_group=group_size,
        )
        return call(*(arrays[name] for name in MAIN), return_final_state=True)

    flags = (1, 1, 10) if group_size else (1, 2, 5)
    alone = run(0)
    assert flags not in recorded.signals
    beside = run(2)
    assert flags in recorded.signals
    assert (flags, 1) in recorded.waits
    np.testing.assert_array_equal(
        alone.output.astype("float32"), beside.output.astype("float32")
    )
    np.testing.assert_array_equal(alone.final_state, beside.final_state)


# With segments no state is given.
@pytest.mark.parametrize("segments", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_splits_of_time_side_by_side_give_the_same(segments):
    check(
        Call("gdn", "weak", time=300, segments=segments),
        scheduled("gdn", time_splits=3),
    )


@pytest.mark.parametrize("segments", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_spans_of_time_one_after_the_other_give_the_same(segments):
    call = Call("gdn", "weak", time=250, group=1, segments=segments)
    check(call, scheduled("gdn", num_spans=2))


@pytest.mark.parametrize("op", ["gdn", pytest.param("kda", marks=pytest.mark.slow)])
def test_columns_of_a_backward_scan_change_no_bit(op):
    arrays, rest = inputs(Call(op, "raw", time=130, value_dim=128, group=1))
    found = [
        results(scheduled(op, backward_v_block=v_block), arrays, rest)
        for v_block in (64, 128)
    ]
    jax.tree.map(np.testing.assert_array_equal, *jax.tree.map(np.asarray, found))


@pytest.mark.parametrize("factor", [1e3, pytest.param(0.5, marks=pytest.mark.slow)])
def test_causal_to_the_bit(factor):
    """Also where a later token's gate is so strong that its rows, and only they, take the exact form."""
    arrays, _ = inputs(Call("kda", time=64))
    at = 21
    changed = {
        name: arrays[name].at[:, at:].set(arrays[name][:, :1] * 0.5) for name in MAIN
    }
    changed["g"] = changed["g"].at[:, at:].multiply(factor)
    with jfla.pallas.interpret():
        first, second = (
            by_kernels("kda")(*(x[name] for name in MAIN)).output
            for x in (arrays, changed)
        )
    first, second = (np.asarray(x.astype("float32")) for x in (first, second))
    np.testing.assert_array_equal(first[:, :at], second[:, :at])
    assert (first[:, at:] != second[:, at:]).any()


@pytest.mark.slow
def test_a_chunk_with_one_strong_gate_takes_the_exact_form_and_stays_right():
    call = Call("kda", "weak", time=64, group=1)
    arrays, rest = inputs(call)
    arrays["g"] = arrays["g"].at[:, 30, :, 5].set(-300.0)
    with jfla.pallas.interpret():
        got = results(by_kernels("kda"), arrays, rest)
    want = results(
        lambda *args, **more: jfla.chunk_kda(*args, **more, implementation="xla"),
        arrays,
        rest,
    )
    for name, x in want.items():
        assert error(got[name], x) <= TOLERANCE[name], name


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"key_dim": 264}, "K = 264"),
        ({"value_dim": 320}, "V = 320"),
        ({"dtype": "float32"}, "q is float32"),
    ],
)
def test_what_the_kernels_refuse_goes_to_xla_unless_named(change, reason):
    arrays, rest = inputs(Call("gdn", time=16, **change))
    rest["initial_state"] = arrays.pop("initial_state")
    with jfla.pallas.interpret():
        said = jfla.pallas.supported(*arrays.values(), **rest)
        assert said is not None
        assert said.startswith(reason)
        with pytest.raises(NotImplementedError, match=reason):
            jfla.chunk_gdn(*arrays.values(), **rest, implementation="pallas")
        out = jfla.chunk_gdn(*arrays.values(), **rest)
    assert out.output.shape == arrays["v"].shape


@pytest.mark.interpreted
def test_a_cpu_is_refused_outside_interpret_mode():
    x = jax.ShapeDtypeStruct((1, 64, 2, 64), "bfloat16")
    beta = jax.ShapeDtypeStruct((1, 64, 2), "float32")
    assert "CPU" in str(jfla.pallas.supported(x, x, x, x, beta))
    with jfla.pallas.interpret():
        assert jfla.pallas.supported(x, x, x, x, beta) is None
