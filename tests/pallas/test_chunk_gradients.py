"""The gradients of chunks alone, in parts of K and V, in interpret mode: against the same stage in plain JAX."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jfla
from jfla import gradients
from jfla._types import Inputs, Options
from jfla._validate import DEFAULTS, validate
from jfla.pallas import _arrays
from jfla.pallas._chunk import Ends
from jfla.pallas.chunk_gradients import chunk_gradients
from jfla.prepare import ChunkInputs, prepare_chunks
from pallas.kernels import TOLERANCE, Call, inputs

CALLS = [
    Call("gdn", "raw", time=64, key_dim=256, value_dim=256),
    Call("kda", "raw", time=64, group=1, key_dim=128, value_dim=256),
]


def described(call: Call) -> tuple[Inputs, Options, Ends]:
    """The op's inputs and options, and what the scans might have left."""
    arrays, rest = inputs(call)
    arrays.pop("initial_state")
    gate: dict[str, Any] = (
        {"gate": jfla.SoftplusGate(arrays.pop("a_log"), arrays.pop("dt_bias"))} if "a_log" in arrays else {}
    )
    given, options = validate(call.op, **arrays, **(DEFAULTS | rest | gate))
    keys = iter(jax.random.split(jax.random.key(1), 5))
    normal = lambda *shape: jax.random.normal(next(keys), shape).astype(jnp.bfloat16)
    batch, time, heads, value_dim = given.v.shape
    states = [normal(batch, heads, time // 64, value_dim, call.key_dim) for _ in range(2)]
    return given, options, Ends(*states, *(normal(*given.v.shape) for _ in range(3)))


def by_kernel(given: Inputs, options: Options, ends: Ends) -> Inputs:
    x = _arrays.kernel_arrays(given, options)
    before = jnp.cumsum(_arrays.log2_decays(x, given), axis=-1) if x.g.shape[-1] == 1 else None
    keys, static = _arrays.key_arrays(x, given), _arrays.key_options(given, options)
    with jfla.pallas.interpret():
        grads = chunk_gradients(
            keys, before, ends, static, jnp.bfloat16 if x.q.shape[2] == x.v.shape[2] else jnp.float32
        )
    return _arrays.cotangents(given, options, grads, ends.dv, jnp.zeros_like(x.initial))


def in_plain_jax(given: Inputs, options: Options, ends: Ends) -> Inputs:
    x, adjoint = jax.vjp(lambda given: prepare_chunks(given, options), given)
    values = lambda a: jnp.moveaxis(a.astype(jnp.float32).reshape(*x.v.shape[:1], -1, 64, *a.shape[2:]), 3, 1)
    v_new, do, dv = map(values, ends[2:])
    states, dends = (a.astype(jnp.float32).mT for a in ends[:2])
    beta = x.beta[..., None]
    dq, dk, _, dg, _ = gradients.chunk_gradients(
        x, gradients.operands(x), states, v_new, do, jnp.tril(do @ v_new.mT), dends, dv / beta
    )
    dbeta = jnp.sum(dv * v_new, axis=-1) / x.beta**2  # holds for the v_new of a forward alone
    return adjoint(ChunkInputs(dq, dk, dv, dg, dbeta, jnp.zeros_like(x.state), None))[0]


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_parts_of_keys_and_values_add_up(call):
    arguments = described(call)
    got, want = by_kernel(*arguments), in_plain_jax(*arguments)
    named = lambda x: (
        {name: getattr(x, name) for name in ("q", "k", "g", "beta")}
        | ({} if x.gate is None else {"a_log": x.gate.a_log, "dt_bias": x.gate.dt_bias})
    )
    for name, x in named(got).items():
        x, y = (np.asarray(z, np.float64) for z in (x, named(want)[name]))
        assert np.linalg.norm(x - y) <= TOLERANCE[name] * np.linalg.norm(y), name
