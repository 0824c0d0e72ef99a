"""The gates, beta and l2norm: right and finite over the whole range, in float32 whatever the inputs are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jfla
from jfla.gates import l2norm, log_decay, write_strength

KINDS = [jfla.SoftplusGate, jfla.SigmoidGate]
INPUTS = np.array(
    [-1e4, -100, -30, -16, -10, -1, -1e-3, 0, 1e-3, 1, 10, 16, 30, 100, 1e4]
)
RATES = np.array([-100, -20, -3, 0, 3, 20, 59, 61, 88, 89, 100.0])


def exact(kind, x, a_log, dt_bias=0.0):
    """The formula in extended precision."""
    x, a_log = np.longdouble(x) + np.longdouble(dt_bias), np.longdouble(a_log)
    with np.errstate(over="ignore"):
        if kind is jfla.SigmoidGate:
            return -5 / (1 + np.exp(-np.exp(a_log) * x))
        return -np.exp(a_log) * np.logaddexp(x, np.longdouble(0))


@pytest.mark.parametrize("kind", KINDS)
def test_values_follow_the_formula_over_the_whole_range(kind):
    a_log, x = (a.astype(np.float32) for a in np.meshgrid(RATES, INPUTS, indexing="ij"))
    g = np.asarray(kind(jnp.asarray(a_log[:, 0]))(jnp.asarray(x)))
    want = np.asarray(exact(kind, x, a_log), np.float64)
    assert np.isfinite(g).all()
    assert (g <= 0).all()
    # What matters is the decay; where that is exactly 0 the rate may stop growing.
    np.testing.assert_allclose(
        np.exp(g.astype(np.float64)), np.exp(want), rtol=2e-5, atol=1e-37
    )
    ordinary = (want > -100) & (want < -1e-37) & (np.abs(a_log) < 60)
    np.testing.assert_allclose(g[ordinary], want[ordinary], rtol=5e-6)
    assert ordinary.sum() > 40


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients_are_finite(kind, dtype):
    parameter_dtype, rates = dtype, RATES
    if dtype == "float16":  # larger gradients are no float16
        parameter_dtype, rates = "float32", RATES[RATES <= 3]

    @jax.jit
    def run(a_log, dt_bias, x):
        value, adjoint = jax.vjp(lambda *p: kind(p[0], p[1])(p[2]), a_log, dt_bias, x)
        return value, adjoint(jnp.ones_like(value)), adjoint(jnp.exp(value))

    with jax.enable_x64(dtype == "float64"):
        a_log, x = (
            jnp.asarray(a, dtype) for a in np.meshgrid(rates, INPUTS, indexing="ij")
        )
        for bias in (-1e4, 0.0, 1e4):
            results = run(
                a_log[:, 0].astype(parameter_dtype),
                jnp.full(len(rates), bias, parameter_dtype),
                x,
            )
            assert results[0].dtype == ("float64" if dtype == "float64" else "float32")
            assert all(
                np.isfinite(np.asarray(a, np.float64)).all()
                for a in jax.tree.leaves(results)
            ), bias


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_low_precision_inputs_are_computed_and_summed_in_float32(kind, bias):
    """a_log and dt_bias stay float32 next to bfloat16 inputs, and their gradients are float32 sums over all tokens."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(4 * rng.standard_normal((2, 512, 3, 8)), jnp.bfloat16)
    parameters = [jnp.asarray(rng.uniform(-2, 2, 3), jnp.float32)]
    parameters += (
        [jnp.asarray(rng.standard_normal((3, 8)), jnp.float32)] if bias else []
    )
    cotangent = rng.standard_normal(x.shape)

    @jax.jit
    def run(parameters, x, cotangent):
        value, adjoint = jax.vjp(lambda p: kind(*p)(x), parameters)
        return value, *adjoint(cotangent)[0]

    got = run(parameters, x, jnp.float32(cotangent))
    upcast = run(parameters, x.astype(jnp.float32), jnp.float32(cotangent))
    assert all(
        a.dtype == jnp.float32 and (np.asarray(a) == np.asarray(b)).all()
        for a, b in zip(got, upcast)
    )
    with jax.enable_x64(True):
        want = run(
            [p.astype(jnp.float64) for p in parameters],
            x.astype(jnp.float64),
            jnp.float64(cotangent),
        )
    for a, b in zip(got, want):
        assert np.linalg.norm(np.asarray(a) - np.asarray(b)) <= 2e-6 * np.linalg.norm(b)


@pytest.mark.parametrize("kind", KINDS)
def test_low_precision_parameters_keep_their_dtype_and_a_float32_sum(kind):
    rng = np.random.default_rng(1)
    x, cotangent = (
        jnp.asarray(rng.standard_normal((2, 512, 3, 8)), jnp.float32) for _ in range(2)
    )
    parameters = (
        jnp.asarray(rng.uniform(-2, 2, 3), jnp.bfloat16),
        jnp.asarray(rng.standard_normal((3, 8)), jnp.bfloat16),
    )

    @jax.jit
    def gradient(*parameters):
        return jax.vjp(lambda *p: kind(*p)(x), *parameters)[1](cotangent)

    for a, b in zip(
        gradient(*parameters), gradient(*(p.astype(jnp.float32) for p in parameters))
    ):
        assert a.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.float32(a), b, rtol=2**-8, atol=1e-6)


def test_gradients_follow_the_formula_far_into_the_tail():
    """Below softplus's float32 range the gate is exp(a_log + x), and so are its gradients."""
    x = jnp.array([[-14.0], [-17.0], [-60.0]])
    value, adjoint = jax.vjp(lambda a, x: jfla.SoftplusGate(a)(x), jnp.full(3, 10.0), x)
    d_a_log, dx = adjoint(jnp.ones_like(value))
    want = -np.exp(10 + np.asarray(x, np.float64))
    for a in (value[:, 0], d_a_log, dx[:, 0]):
        np.testing.assert_allclose(a, want[:, 0], rtol=1e-5)


def test_sigmoid_gate_defaults():
    x = jnp.linspace(-3, 3, 7).reshape(1, 7, 1)
    np.testing.assert_allclose(jfla.SigmoidGate()(x), -5 * jax.nn.sigmoid(x), rtol=1e-6)
    np.testing.assert_allclose(
        jfla.SigmoidGate(lower_bound=-2.0)(x), -2 * jax.nn.sigmoid(x), rtol=1e-6
    )
    assert jax.tree.leaves(jfla.SigmoidGate(lower_bound=-2.0)) == []
    assert len(jax.tree.leaves(jfla.SoftplusGate(jnp.zeros(1), jnp.zeros(1)))) == 2


def test_log_decay_without_a_gate_is_the_input():
    g = jnp.array([[[[-1.5]]]], jnp.bfloat16)
    assert log_decay(g, None).dtype == jnp.float32
    assert log_decay(g, None).item() == -1.5


def test_write_strength_and_l2norm():
    logits = jnp.array([-40.0, 0.0, 40.0], jnp.float16)
    assert write_strength(logits, None).dtype == jnp.float32
    np.testing.assert_allclose(
        write_strength(logits, 2.0), [2 * np.exp(-40.0), 1, 2], rtol=1e-6
    )
    x = jnp.array([[0.0, 0.0], [3.0, 4.0], [1e-3, 0.0]], jnp.bfloat16)
    wide = np.asarray(x, np.float64)
    np.testing.assert_allclose(
        l2norm(x), wide / np.sqrt((wide**2).sum(-1, keepdims=True) + 1e-6), rtol=1e-6
    )
    assert l2norm(x).dtype == jnp.float32
    np.testing.assert_array_equal(
        jax.grad(lambda x: l2norm(x).sum())(jnp.zeros((1, 2))), 1e3
    )


def test_derivatives_of_the_softplus_gate_follow_the_formula():
    """First and second ones by x and a_log, in float64."""

    def gate(x, a_log):
        return jfla.SoftplusGate(a_log[None])(x[None, None])[0, 0]

    with jax.enable_x64(True):
        for a_log in (-20.0, -3.0, 0.0, 3.0, 20.0):
            for x in (-100.0, -40.0, -16.0, -1.0, 0.0, 1e-3, 4.0, 30.0, 1e3):
                at = (jnp.float64(x), jnp.float64(a_log))
                rate = np.exp(a_log)
                by_x = -rate / (1 + np.exp(-x))
                by_x_twice = by_x / (1 + np.exp(x)) if x < 700 else 0.0
                g = -rate * np.logaddexp(x, 0.0)
                for derive, want in (
                    (jax.grad, [by_x, g]),
                    (jax.hessian, [by_x_twice, by_x, by_x, g]),
                ):
                    got = derive(gate, argnums=(0, 1))(*at)
                    # 1 - sigmoid has no more digits than that
                    np.testing.assert_allclose(
                        jax.tree.leaves(got),
                        want,
                        rtol=1e-9,
                        atol=1e-15 * rate,
                        err_msg=f"{x=} {a_log=}",
                    )
