"""Decoding in every backend: the recurrence over a few tokens, with the state after each of them."""

import dataclasses

import jax
import numpy as np
import pytest
from support import kernel_cases
from support import stage_oracle as oracle
from support.kernel_cases import Call, error
from support.stage_backends import cases

SMALL = [
    Call("kda", "raw", time=2, dtype="float32"),
    Call("gdn", "mixed", time=3, betas="edge", dtype="float32"),
]
OTHERS = [
    Call(
        "kda",
        "mixed",
        batch=2,
        time=8,
        group=1,
        key_dim=128,
        betas="edge",
        dtype="float32",
    ),
    Call("gdn", "weak", time=8, value_dim=128, dtype="float32"),
]
# ||got - want|| / ||want||. The kernel's state is float32 throughout.
BOUNDS = {"bfloat16": 1e-6, "float32": 1e-6, "float64": 1e-12}


def run(backend, inputs, options):
    from jfla.reference import recurrent

    if "pallas" not in backend.module:
        return recurrent.run(inputs, options)
    from jfla.pallas.common import decode

    plan = decode.DecodePlan(
        32, interpret=kernel_cases.INTERPRET, machine=backend.machine
    )
    return decode.decode(inputs, options, recurrent.run, plan)


@pytest.mark.parametrize("every", [False, True], ids=["last state", "every state"])
@pytest.mark.parametrize(
    ("backend", "call"), cases(SMALL, OTHERS), indirect=["backend"]
)
def test_decode(backend, call, every):
    inputs, options, x = backend.inputs(call)
    options = dataclasses.replace(options, return_states=every)
    with backend.context():
        got = jax.tree.map(np.asarray, run(backend, inputs, options))
    output, states = oracle.decode(x, call.time)
    assert error(got.output, output) < BOUNDS[backend.dtype]
    want = states if every else states[:, -1]
    assert got.final_state.shape == want.shape
    assert error(got.final_state, want) < BOUNDS[backend.dtype]
