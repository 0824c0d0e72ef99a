"""Every op where JAX is told to refuse to broadcast arrays of different ranks silently."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from support.cases import FORMS, Config, Style, call, draw

import jfla

CONFIG = Config(
    time=70,
    heads=2,
    group=2,
    key_dim=64,
    value_dim=64,
    gate="softplus",
    beta_max=1.0,
    qk_norm=True,
)
CALLS = [
    dataclasses.replace(CONFIG, state=True, final=True),
    dataclasses.replace(CONFIG, gate="sigmoid", segments=3, state=True, final=True),
    dataclasses.replace(CONFIG, gate=None, segments=3),
]


@pytest.mark.parametrize("call_of_op", CALLS, ids=str)
@pytest.mark.parametrize(("form", "op"), FORMS)
def test_values_and_gradients_are_traced_without_rank_promotion(form, op, call_of_op):
    config = dataclasses.replace(call_of_op, op=op)
    x, ids, _ = draw(config, Style())
    x = jax.tree.map(jnp.float32, x)

    def loss(x):
        return sum(jnp.sum(a) for a in jax.tree.leaves(call(config, form, x, ids)))

    jax.clear_caches()
    with jax.numpy_rank_promotion("raise"):
        jax.eval_shape(jax.value_and_grad(loss), x)


@pytest.mark.parametrize("op", ["kda", "gdn"])
@pytest.mark.parametrize("form", ["chunk", "recurrent"])
def test_kernels_are_traced_without_rank_promotion(form, op):
    config = Config(
        op,
        time=64 if form == "chunk" else 2,
        key_dim=64,
        value_dim=64,
        gate="softplus",
        qk_norm=True,
    )
    x, _, _ = draw(config, Style())
    x = {
        name: jnp.asarray(a, "float32" if name == "a_log" else "bfloat16")
        for name, a in x.items()
    }

    def loss(x):
        gate = jfla.SoftplusGate(x["a_log"], x["dt_bias"])
        arrays = [x[name] for name in ("q", "k", "v", "g", "beta")]
        run = FORMS[form, op]
        out = run(
            *arrays, gate=gate, beta_max=1.0, qk_norm=True, implementation="pallas"
        )
        return jnp.sum(out.output, dtype="float32")

    jax.clear_caches()
    with jfla.pallas.interpret(), jax.numpy_rank_promotion("raise"):
        jax.eval_shape(jax.value_and_grad(loss), x)


def test_segment_ids_of_cumulative_lengths():
    with jax.numpy_rank_promotion("raise"):
        ids = jfla.segment_ids_from_cu_seqlens(jnp.array([0, 2, 2, 3]), 5)
    assert ids.tolist() == [[1, 1, 3, 0, 0]]
