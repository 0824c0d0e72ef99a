"""Affine maps of spans of time: chained as they are applied one after the other, and true of the recurrence."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jfla import affine, reference

BATCH, HEADS, K, V, SPAN, SPANS = 1, 2, 8, 4, 7, 3


@pytest.fixture
def maps():
    """(R, C) of five spans, and a state."""
    rng = np.random.default_rng(0)
    r = rng.standard_normal((BATCH, HEADS, 5, K, K)) / K**0.5
    c = rng.standard_normal((BATCH, HEADS, 5, K, V))
    return r, c, rng.standard_normal((BATCH, HEADS, K, V))


def one_by_one(first, r, c, order):
    """The state that every span begins from, by applying one map after the other."""
    states = np.empty_like(c)
    state = first
    for span in order:
        states[:, :, span] = state
        state = np.einsum("bhij,bhjv->bhiv", r[:, :, span], state) + c[:, :, span]
    return states


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("given", [False, True], ids=["from zeros", "from a state"])
def test_chain_is_the_maps_one_after_the_other(maps, given, reverse):
    r, c, first = maps
    order = range(5)[::-1] if reverse else range(5)
    with jax.enable_x64(True):
        got = affine.chain(
            jnp.asarray(first) if given else None,
            jnp.asarray(r),
            jnp.asarray(c),
            reverse=reverse,
        )
        want = one_by_one(first if given else 0 * first, r, c, order)
        np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)


def draw(op):
    """q, k, v, g, beta of three spans, in float64."""
    rng = np.random.default_rng(1)
    tokens = (BATCH, SPAN * SPANS, HEADS)
    k = rng.standard_normal((*tokens, K))
    g = -rng.random((*tokens, K) if op == "kda" else tokens)
    arrays = (
        rng.standard_normal((*tokens, K)),
        k / np.linalg.norm(k, axis=-1, keepdims=True),
        rng.standard_normal((*tokens, V)),
        g,
        rng.uniform(0, 2, tokens),
    )
    return [jnp.asarray(a) for a in arrays]


def span_of(arrays, span):
    return [a[:, span * SPAN : (span + 1) * SPAN] for a in arrays]


def span_maps(recurrent, arrays):
    """R and C of every span: where it leads from the identity without values, and from zero with them."""
    identity = jnp.broadcast_to(jnp.eye(K), (BATCH, HEADS, K, K))
    linear = []
    constant = []
    for span in range(SPANS):
        q, k, v, g, beta = span_of(arrays, span)
        silent = jnp.zeros((*v.shape[:3], K))
        state = {"initial_state": identity, "return_final_state": True}
        linear.append(recurrent(q, k, silent, g, beta, **state).final_state)
        constant.append(
            recurrent(q, k, v, g, beta, return_final_state=True).final_state
        )
    return jnp.stack(linear, axis=2), jnp.stack(constant, axis=2)


@pytest.mark.parametrize("op", ["kda", "gdn"])
def test_a_span_of_the_recurrence_is_an_affine_map_of_its_state(op):
    recurrent = getattr(reference, f"recurrent_{op}")
    with jax.enable_x64(True):
        arrays = draw(op)
        first = jax.random.normal(jax.random.key(2), (BATCH, HEADS, K, V), jnp.float64)
        r, c = span_maps(recurrent, arrays)
        states = affine.chain(first, r, c)
        end = r[:, :, -1] @ states[:, :, -1] + c[:, :, -1]
        every = recurrent(*arrays, initial_state=first, return_states=True).final_state
        want = [first, *(every[:, span * SPAN - 1] for span in range(1, SPANS + 1))]
        for span in range(SPANS):
            np.testing.assert_allclose(
                states[:, :, span], want[span], rtol=1e-11, atol=1e-11
            )
        np.testing.assert_allclose(end, want[-1], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("op", ["kda", "gdn"])
def test_cotangents_go_through_the_transposed_maps(op):
    """D is what a span's own outputs send to its start: the cotangent there with none at its end."""
    recurrent = getattr(reference, f"recurrent_{op}")
    with jax.enable_x64(True):
        arrays = draw(op)
        keys = jax.random.split(jax.random.key(3), 3)
        state = (BATCH, HEADS, K, V)
        first = jax.random.normal(keys[0], state, jnp.float64)
        do = jax.random.normal(keys[1], arrays[2].shape, jnp.float64)
        d_last = jax.random.normal(keys[2], state, jnp.float64)

        def d_initial(arrays, do, d_end):
            """Of the state before these tokens, whose value does not matter: the map is affine."""

            def run(initial):
                out = recurrent(*arrays, initial_state=initial, return_final_state=True)
                return jnp.sum(out.output * do) + jnp.sum(out.final_state * d_end)

            return jax.grad(run)(first)

        r, _ = span_maps(recurrent, arrays)
        no_cotangent = jnp.zeros(state)
        d = [
            d_initial(span_of(arrays, span), span_of([do], span)[0], no_cotangent)
            for span in range(SPANS)
        ]
        d = jnp.stack(d, axis=2)
        dstates = affine.chain(d_last, r.mT, d, reverse=True)
        start = r[:, :, 0].mT @ dstates[:, :, 0] + d[:, :, 0]
        np.testing.assert_allclose(
            start, d_initial(arrays, do, d_last), rtol=1e-11, atol=1e-11
        )
