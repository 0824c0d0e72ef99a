"""The mixture of experts against a loop over tokens, its two ways to run, its router, its gradients."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.goldens import rms_error

import jfla.nn

D = 12
OPTIONS = jfla.nn.MoEOptions(
    num_experts=8,
    experts_per_token=3,
    intermediate_size=10,
    shared_size=6,
    shared_gate=True,
)


def make(seed=0, **changes):
    options = dataclasses.replace(OPTIONS, **changes)
    return jfla.nn.MixtureOfExperts(D, options, rngs=nnx.Rngs(seed))


def by_loop(layer, rows):
    """In float64, token by token and expert by expert."""
    matrix = lambda module: np.asarray(module.kernel[...], np.float64)
    silu = lambda x: x / (1 + np.exp(-x))
    gate, up, down = (
        matrix(module) for module in (layer.gate_proj, layer.up_proj, layer.down_proj)
    )
    rows = np.asarray(rows, np.float64)
    logits = rows @ matrix(layer.router)
    outputs = []
    for x, score in zip(rows, np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)):
        chosen = np.argsort(-score)[: layer.options.experts_per_token]
        weights = score[chosen] / score[chosen].sum()
        y = sum(
            w * (silu(x @ gate[e]) * (x @ up[e])) @ down[e]
            for e, w in zip(chosen, weights)
        )
        shared = layer.shared
        inner = silu(x @ matrix(shared.gate_proj)) * (x @ matrix(shared.up_proj))
        share = 1 / (1 + np.exp(-x @ matrix(layer.shared_gate)))
        outputs.append(y + share * (inner @ matrix(shared.down_proj)))
    return np.stack(outputs)


@pytest.mark.parametrize("time", [1, 2, 3, 40])
def test_few_and_many_rows_are_the_loop(time):
    """Up to 8 choices read the chosen matrices, more are sorted by expert."""
    layer = make()
    x = jax.random.normal(jax.random.key(0), (1, time, D))
    # Far apart, so that every implementation chooses the same, and some experts have no row.
    x = x.at[..., 0].add(4.0)
    expected = by_loop(layer, x[0])
    assert rms_error(layer(x)[0], expected) < 1e-6


def test_every_parameter_learns_as_by_the_loop_of_few():
    layer = make()
    x = jax.random.normal(jax.random.key(1), (1, 16, D))
    loss = lambda layer, x: jnp.sum(jnp.sin(layer(x)))
    gradient = nnx.jit(nnx.grad(loss))
    many = gradient(layer, x)
    pairs = [gradient(layer, x[:, t : t + 2]) for t in range(0, 16, 2)]
    few = jax.tree.map(lambda *parts: sum(parts), *pairs)
    for (path, a), (_, b) in zip(
        nnx.to_flat_state(many), nnx.to_flat_state(few), strict=True
    ):
        assert jnp.any(a[...] != 0), path
        assert rms_error(a[...], np.asarray(b[...])) < 1e-5, path


def test_a_bias_decides_who_is_chosen_but_not_how_much():
    layer = make(
        score="sigmoid", correction_bias=True, renormalize=False, weight_scale=2.0
    )
    rows = jax.random.normal(jax.random.key(2), (30, D))
    layer.correction[...] = jnp.zeros(8).at[5].set(10.0)
    experts, weights = layer.route(rows)
    assert (np.asarray(experts) == 5).any(axis=1).all()
    scores = jax.nn.sigmoid(layer.router(rows))
    np.testing.assert_allclose(
        weights,
        2 * np.take_along_axis(np.asarray(scores), np.asarray(experts), axis=1),
        rtol=1e-6,
    )


def test_only_the_best_groups_are_chosen_from():
    layer = make(score="sigmoid", num_groups=4, groups_per_token=2)
    rows = jax.random.normal(jax.random.key(3), (50, D))
    experts, _ = layer.route(rows)
    scores = np.asarray(jax.nn.sigmoid(layer.router(rows)))
    best = np.argsort(-scores.reshape(50, 4, 2).sum(-1), axis=1)[:, :2]
    for chosen, groups, score in zip(np.asarray(experts), best, scores):
        allowed = [e for e in range(8) if e // 2 in groups]
        expected = sorted(allowed, key=lambda e: -score[e])[:3]
        assert chosen.tolist() == expected


def test_the_router_works_in_float32_beside_bfloat16():
    layer = jfla.nn.MixtureOfExperts(
        D, OPTIONS, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0)
    )
    x = jax.random.normal(jax.random.key(4), (1, 20, D), jnp.bfloat16)
    assert layer(x).dtype == jnp.bfloat16
    _, weights = layer.route(x[0])
    assert weights.dtype == jnp.float32
    np.testing.assert_allclose(jnp.sum(weights, axis=-1), 1, rtol=1e-6)
    assert rms_error(layer(x)[0].astype(jnp.float32), by_loop(layer, x[0])) < 2e-2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"score": "relu"}, 'score must be "softmax" or "sigmoid"'),
        ({"experts_per_token": 9}, r"experts_per_token must be in 1 \.\. 8, got 9"),
        ({"num_groups": 3}, "num_groups=3 must divide num_experts=8"),
        (
            {"num_groups": 2, "groups_per_token": 3},
            r"groups_per_token must be in 1 \.\. 2, got 3",
        ),
        (
            {"num_groups": 4, "groups_per_token": 1},
            r"experts_per_token must be in 1 \.\. 2, got 3",
        ),
    ],
)
def test_options_that_do_not_fit(changes, message):
    with pytest.raises(ValueError, match=message):
        make(**changes)
