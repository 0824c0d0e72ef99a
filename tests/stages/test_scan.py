"""The scans of every backend: output and final state; states, their cotangents, v_new and dv."""

import pytest
from support import stage_oracle as oracle
from support.kernel_cases import Call
from support.stage_backends import cases, chunked, cotangents, hold

SMALL = [Call(op, "weak", time=100, group=1) for op in ("kda", "gdn")]
OTHERS = [
    Call("kda", "weak", key_dim=128, value_dim=128, group=1),
    Call("kda", "mixed", segments=3, betas="edge"),
    Call("gdn", "weak", key_dim=128, value_dim=128, group=1),
    Call("gdn", "mixed", segments=3, betas="edge"),
]

# Of an element, beside the largest one of its chunk, or of the state.
OUTPUT_BOUNDS = {
    "bfloat16": {"output": 8e-3, "final": 5e-3},
    "float32": {"output": 1e-5, "final": 1e-5},
    "float64": {"output": 1e-10, "final": 1e-10},
}
NAMES = ("states", "v_new", "dstates", "dv", "d_initial")
BACKWARD_BOUNDS = {
    "bfloat16": dict(zip(NAMES, (8e-3, 8e-3, 8e-3, 8e-3, 5e-3))),
    "float32": dict.fromkeys(NAMES, 1e-5),
    "float64": dict.fromkeys(NAMES, 1e-10),
}


def read(backend, inputs, x):
    """What the scans read, as the backend keeps it; and those same numbers in float64."""
    qk, pairs = oracle.intra(x)
    kept_qk, exact_qk = backend.qk(inputs, x, qk)
    kept_pairs, exact_pairs = backend.pairs(pairs)
    return (kept_qk, kept_pairs), (exact_qk, exact_pairs)


@pytest.mark.parametrize(
    ("backend", "call"), cases(SMALL, OTHERS), indirect=["backend"]
)
def test_output_scan(backend, call):
    inputs, options, x = backend.inputs(call)
    kept, exact = read(backend, inputs, x)
    output, final = backend.run("output_scan", inputs, options, *kept)
    want_output, want_final = oracle.output_scan(x, *exact)
    hold(
        OUTPUT_BOUNDS[backend.dtype],
        output=(chunked(output), want_output),
        final=(final[:, :, None], want_final[:, :, None]),
    )


@pytest.mark.parametrize(
    ("backend", "call"), cases(SMALL, OTHERS), indirect=["backend"]
)
def test_backward_scans(backend, call):
    inputs, options, x = backend.inputs(call)
    kept, exact = read(backend, inputs, x)
    do, d_final = cotangents(call, x)
    ends = (
        backend.rounded(oracle.to_tokens(do)),
        backend.rounded(d_final, backend.scalars),
    )
    scans, d_initial = backend.run("backward_scans", inputs, options, *kept, *ends)
    want, want_d_initial = oracle.backward_scans(x, *exact, do, d_final)
    hold(
        BACKWARD_BOUNDS[backend.dtype],
        states=(scans.states, want.states),
        v_new=(chunked(scans.v_new), want.v_new),
        dstates=(scans.dstates, want.dstates),
        dv=(chunked(scans.dv), want.dv),
        d_initial=(d_initial[:, :, None], want_d_initial[:, :, None]),
    )
