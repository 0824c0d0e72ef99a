"""The chunks of "xla": all at once by pairs or one after another, and the decays between their tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.kernel_cases import Call, inputs, main_and_rest, validated

from jfla._inputs.chunking import prepare_chunks
from jfla.xla import backward, forward
from jfla.xla.decay_sums import (
    decay_between,
    decay_from_start,
    decay_sums,
    decay_to_end,
)
from jfla.xla.forward import by_pairs

CALLS = [
    Call("kda", "mixed", time=300, betas="edge", key_dim=8, value_dim=4),
    Call("kda", "strong", time=450, segments=3, key_dim=8, value_dim=4),
    Call("gdn", "weak", time=200, key_dim=8, value_dim=4),
]


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_all_chunks_at_once_are_one_after_another(call):
    arrays, rest = inputs(call)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: x.astype(jnp.float64), arrays)
        main, more = main_and_rest(wide)
        x, initial = prepare_chunks(*validated(call.op, *main, **more, **rest))
        assert by_pairs(x)
        assert not by_pairs(jax.tree.map(lambda a: a[:1], x))
        rng = np.random.default_rng(0)
        do = jnp.asarray(rng.standard_normal(x.v.shape))
        d_final = jnp.asarray(rng.standard_normal(initial.shape))
        scalar_gate = call.op == "gdn"

        def run(one_at_a_time):
            pairs = forward.intra_over_chunks(x, scalar_gate, one_at_a_time)
            values = forward.output_scan(x, initial, pairs, one_at_a_time)
            ends = (initial, pairs, do, d_final)
            return values, backward.backward(x, *ends, scalar_gate, one_at_a_time)

        with jax.numpy_rank_promotion("raise"):
            jitted = jax.jit(run, static_argnums=0)
            at_once, one_after_another = (
                jitted(one_at_a_time) for one_at_a_time in (False, True)
            )
        for got, want in zip(
            jax.tree.leaves(at_once), jax.tree.leaves(one_after_another)
        ):
            np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-12)


def test_decays_behind_a_strong_gate_keep_their_digits():
    rng = np.random.default_rng(0)
    gates = [0.0, -1e-4, -0.02, -3.0, -150.0, -1e3, -np.inf]
    g = rng.choice(gates, size=(64, 500)).astype(np.float32)
    sums = decay_sums(jnp.asarray(g))
    for late, early in ((1, 0), (40, 39), (63, 50), (63, 0)):
        between = g[early + 1 : late + 1].astype(np.float64).sum(axis=0)
        late_sums, early_sums = (sums.at(slice(i, i + 1)) for i in (late, early))
        got = decay_between(late_sums, early_sums)[0]
        np.testing.assert_allclose(got, np.exp(between), rtol=1e-6, atol=1e-37)
    up_to = np.cumsum(g.astype(np.float64), axis=0)
    np.testing.assert_allclose(
        decay_from_start(sums), np.exp(up_to), rtol=1e-5, atol=1e-37
    )
    behind = np.flip(np.cumsum(np.flip(g[1:].astype(np.float64), 0), axis=0), 0)
    np.testing.assert_allclose(
        decay_to_end(sums)[:-1], np.exp(behind), rtol=1e-5, atol=1e-37
    )
    np.testing.assert_array_equal(decay_to_end(sums)[-1], 1.0)
