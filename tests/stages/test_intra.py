"""The intra-chunk stage of every backend: q and k as they meet the state, a_qk and a_inv."""

import pytest
from support import stage_oracle as oracle
from support.kernel_cases import Call
from support.stage_backends import cases, hold

from jfla.stages import FactoredQK

SMALL = [Call(op, "weak", time=64, group=1) for op in ("kda", "gdn")]
# Of the weak gates' chunks every token counts; strong ones leave little of what is farther than a few tokens.
OTHERS = [
    Call("kda", "weak", key_dim=128, value_dim=128, group=1),
    Call("kda", "mixed", segments=3, betas="edge"),
    Call("kda", "raw", key_dim=128, group=1),
    Call("kda", "strong", time=64, group=1, betas="signed"),
    Call("gdn", "weak", key_dim=128, value_dim=128, group=1),
    Call("gdn", "mixed", segments=3, betas="edge"),
    Call("gdn", "raw", group=1),
    Call("gdn", "strong", time=64, group=1, betas="signed"),
]

NAMES = ("q_from_start", "k_from_start", "k_to_end", "chunk_decay", "a_qk", "a_inv")
# Of an element, beside the largest one of its chunk. One rounding to bfloat16 is 2e-3; GDN's factors are float32.
BOUNDS = {
    ("bfloat16", "kda"): dict(zip(NAMES, (4e-3, 4e-3, 4e-3, 5e-4, 8e-3, 5e-3))),
    ("bfloat16", "gdn"): dict(zip(NAMES, (5e-5, 5e-5, 5e-5, 5e-5, 8e-3, 5e-3))),
    ("float32", "kda"): dict.fromkeys(NAMES, 1e-5),
    ("float32", "gdn"): dict.fromkeys(NAMES, 1e-5),
    ("float64", "kda"): dict.fromkeys(NAMES, 1e-10),
    ("float64", "gdn"): dict.fromkeys(NAMES, 1e-10),
}


@pytest.mark.parametrize(
    ("backend", "call"), cases(SMALL, OTHERS), indirect=["backend"]
)
def test_intra(backend, call):
    inputs, options, x = backend.inputs(call)
    qk, pairs = backend.run("intra", inputs, options)
    assert isinstance(qk, FactoredQK) == (call.op == "gdn")
    with backend.context():
        qk = qk.expanded()
    want_qk, want_pairs = oracle.intra(x)
    found = {name: (getattr(qk, name), getattr(want_qk, name)) for name in NAMES[:4]}
    found |= {
        name: (getattr(pairs, name), getattr(want_pairs, name)) for name in NAMES[4:]
    }
    hold(BOUNDS[backend.dtype, call.op], **found)
