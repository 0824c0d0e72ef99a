"""The kernel behind raw gates: cotangents of the raw input and of the gate's parameters, for every gate and length."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jfla
from jfla.gates import log_decay
from jfla.pallas.common.gate_grads import TOKENS_PER_CTA, gate_grads

HEADS, CHANNELS = 2, 64
KINDS = [jfla.SoftplusGate, jfla.SigmoidGate]


def run(gate, g, dg):
    with jfla.pallas.interpret():
        return jax.jit(gate_grads)(g, gate, dg)


def drawn(
    kind, time, dtype="float32", a_log=(-3.0, 1.0), batch=2, seed=0, channels=CHANNELS
):
    rng = np.random.default_rng(seed)
    g = jnp.asarray(4 * rng.standard_normal((batch, time, HEADS, channels)), dtype)
    bias = jnp.asarray(rng.standard_normal((HEADS, channels)), jnp.float32)
    gate = kind(jnp.asarray(a_log, jnp.float32), bias)
    # As of a decay: what has lost all of its past has no gradient.
    dg = rng.standard_normal(g.shape) * np.exp(np.asarray(gate(g), np.float64))
    return gate, g, jnp.asarray(dg, jnp.float32)


def exact(gate, g, dg):
    """In float64."""
    with jax.enable_x64(True):
        gate, g, dg = jax.tree.map(lambda x: x.astype(jnp.float64), (gate, g, dg))
        return jax.jit(lambda g, gate, dg: jax.vjp(log_decay, g, gate)[1](dg))(
            g, gate, dg
        )


def hold(found, want, bound):
    found, want = (np.asarray(x, np.float64) for x in (found, want))
    assert np.linalg.norm(found - want) <= bound * np.linalg.norm(want)
    assert np.linalg.norm(want) > 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("time", "dtype"),
    [
        (64, "float32"),
        (100, "bfloat16"),
        (TOKENS_PER_CTA + 70, "float32"),
    ],
)
def test_cotangents_are_those_of_the_gate(kind, time, dtype):
    gate, g, dg = drawn(kind, time, dtype, batch=1 if time > 100 else 2)
    dx, dt_bias, da_log = run(gate, g, dg)
    want_dx, want_gate = exact(gate, g, dg)
    assert dx.dtype == g.dtype
    hold(dx, want_dx, 2e-3 if dtype == "bfloat16" else 2e-6)
    hold(dt_bias.sum(axis=0), want_gate.dt_bias, 1e-5)
    hold(da_log.sum(axis=(0, 2)), want_gate.a_log, 1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("channels", [128, 192, 256])
def test_every_block_of_channels_has_its_cotangents(kind, channels):
    gate, g, dg = drawn(kind, 100, batch=1, channels=channels)
    dx, dt_bias, da_log = run(gate, g, dg)
    want_dx, want_gate = exact(gate, g, dg)
    hold(dx, want_dx, 2e-6)
    hold(dt_bias.sum(axis=0), want_gate.dt_bias, 1e-5)
    hold(da_log.sum(axis=(0, 2)), want_gate.a_log, 1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_cotangent_of_zero_stays_zero_whatever_the_input_is(kind):
    gate, g, dg = drawn(kind, 64)
    dg = dg.at[:, 10:20].set(0.0)
    others = run(gate, g, dg)
    found = run(gate, g.at[:, 10:20].set(jnp.nan), dg)
    for x, y in zip(found, others):
        np.testing.assert_array_equal(x, y)
    assert not np.asarray(found[0][:, 10:20]).any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("a_log", [(-80.0, -20.0), (20.0, 59.0), (61.0, 100.0)])
def test_cotangents_are_finite_and_right_for_rates_of_any_size(kind, a_log):
    rate = np.exp(np.clip(a_log, -20, 60))[:, None]
    gate, g, _ = drawn(kind, 64, a_log=a_log)
    gate = dataclasses.replace(gate, dt_bias=None)
    # Inputs with which some decays are neither 0 nor 1.
    if kind is jfla.SoftplusGate:
        g = g - np.float32(a_log)[:, None]
    else:
        g = g / np.float32(rate)
    dg = jnp.exp(log_decay(g, gate))
    found = run(gate, g, dg)
    assert all(np.isfinite(np.asarray(x)).all() for x in found)
    want = np.asarray(exact(gate, g, dg)[0])
    for head in range(HEADS):
        scale = np.abs(want[:, :, head]).max()
        assert scale > 0
        error = np.abs(np.asarray(found[0]) - want)[:, :, head].max()
        assert error <= 2e-5 * scale, (head, error / scale)
