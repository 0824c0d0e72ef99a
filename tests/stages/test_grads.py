"""The gradients of a chunk in every backend, and the oracle itself against the definition's gradients."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import stage_oracle as oracle
from support.kernel_cases import Call
from support.stage_backends import BACKENDS, cases, chunked, cotangents, hold

from jfla.reference import recurrent

SMALL = [Call(op, "weak", time=100, group=1) for op in ("kda", "gdn")]
OTHERS = [
    Call("kda", "weak", key_dim=128, value_dim=128, group=1),
    Call("kda", "mixed", segments=3, betas="edge"),
    Call("kda", "raw", key_dim=128, group=1),
    Call("gdn", "weak", key_dim=128, value_dim=128, group=1),
    Call("gdn", "mixed", segments=3, betas="edge"),
    Call("gdn", "raw", group=1),
]

NAMES = ("dq", "dk", "dg", "v_new_dot_dv")
# Of an element, beside the largest one of its chunk.
BOUNDS = {
    "bfloat16": dict(zip(NAMES, (6e-3, 4e-3, 4e-3, 1e-6))),
    "float32": dict.fromkeys(NAMES, 1e-5),
    "float64": dict.fromkeys(NAMES, 1e-10),
}


@pytest.mark.parametrize(
    ("backend", "call"), cases(SMALL, OTHERS), indirect=["backend"]
)
def test_chunk_grads(backend, call):
    inputs, options, x = backend.inputs(call)
    scans, _ = oracle.backward_scans(x, *oracle.intra(x), *cotangents(call, x))
    kept, exact = backend.scans(scans)
    got = backend.run("chunk_grads", inputs, options, kept)
    want = oracle.chunk_grads(x, exact)
    hold(
        BOUNDS[backend.dtype],
        **{name: (chunked(getattr(got, name)), getattr(want, name)) for name in NAMES},
    )


@pytest.mark.parametrize(
    "call", [c for c in SMALL + OTHERS if c.gates != "raw"], ids=str
)
def test_the_oracle_chains_to_the_gradients_of_the_definition(call):
    """Output, final state and every gradient; dbeta as `ChunkGrads` has it."""
    backend = BACKENDS["xla-float64"]
    inputs, options, x = backend.inputs(call)
    do, d_final = cotangents(call, x)
    with backend.context():
        options = dataclasses.replace(options, return_final_state=not call.segments)
        without_ids = inputs._replace(segment_ids=None)

        def definition(some):
            return recurrent.run(some._replace(segment_ids=inputs.segment_ids), options)

        out, adjoint = jax.vjp(definition, without_ids)
        d_output = oracle.to_tokens(do)[:, : call.time]
        d_last = None if call.segments else jnp.asarray(d_final)
        (want,) = adjoint(type(out)(jnp.asarray(d_output), d_last))
    if call.segments:
        d_final = np.zeros_like(d_final)

    intra = oracle.intra(x)
    output, final = oracle.output_scan(x, *intra)
    scans, d_initial = oracle.backward_scans(x, *intra, do, d_final)
    grads = oracle.chunk_grads(x, scans)

    def same(got, want, by_token=True):
        got = oracle.to_tokens(got)[:, : call.time] if by_token else got
        if by_token and got.shape[2] != want.shape[2]:
            got = got.reshape(*want.shape[:3], call.group, -1).sum(axis=3)
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-9)

    same(output, out.output)
    same(scans.dv, want.v)
    same(grads.dq, want.q)
    same(grads.dk, want.k)
    beta = oracle.to_tokens(x.beta)[:, : call.time]
    same(grads.v_new_dot_dv, beta**2 * np.asarray(want.beta))
    same(np.where(x.keep[..., None], grads.dg, 0), want.g)
    if not call.segments:
        same(final, out.final_state, by_token=False)
        same(d_initial, want.initial_state, by_token=False)
