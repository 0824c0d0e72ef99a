"""Packed calls under JAX's run-time checks, which have rules for fewer operations than JAX."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify
from support.cases import Config, Style, call, compiled, draw, error

CONFIG = Config(time=6, segments=3, state=True, final=True, dtype="float32")


@pytest.mark.parametrize("op", ["kda", "gdn"])
@pytest.mark.parametrize("errors", ["index_checks", "all_checks"])
@pytest.mark.parametrize("shape", [{}, {"batch": 1, "segments": 12, "time": 14}])
def test_a_packed_recurrent_call_and_its_gradients(op, errors, shape):
    config = dataclasses.replace(CONFIG, op=op, **shape)
    x, ids, cotangents = draw(config, Style())
    x, cotangents = (jax.tree.map(jnp.float32, tree) for tree in (x, cotangents))

    def run(x):
        forward = lambda x: call(config, "recurrent", x, ids)._asdict()
        out, adjoint = jax.vjp(forward, x)
        return out | {f"d{name}": a for name, a in adjoint(cotangents)[0].items()}

    found, got = jax.jit(checkify.checkify(run, errors=getattr(checkify, errors)))(x)
    found.throw()
    want = compiled(config, "recurrent")(x, ids, cotangents)
    assert got.keys() == want.keys()
    for name in want:
        assert np.linalg.norm(want[name]) > 0
        assert error(got[name], want[name]) < 1e-6
