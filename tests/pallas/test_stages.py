"""Every stage of the kernels alone, in interpret mode with race detection, against its portable twin in float64."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jfla
from jfla import gradients
from jfla._types import CHUNK
from jfla._validate import DEFAULTS, validate
from jfla.gates import log_decay
from jfla.nn import KimiDeltaAttention
from jfla.pallas import _chunk_kda, _team, delta_rule, prepare_kda
from jfla.pallas import gradients_kda as gradients_kernel
from jfla.pallas._arrays import kernel_arrays, key_arrays, key_options
from jfla.pallas._ends import Ends
from jfla.pallas._jobs import run
from jfla.pallas._operands import Operands, Pairs
from jfla.pallas._patterns import FAST_RANGE, NEAR_STEPS
from jfla.pallas._walk import WalkConfig
from jfla.pallas.scan import Kept, backward_scans, output_scan
from jfla.reference import chunked
from pallas.kernels import (
    Call,
    Stages,
    cotangents,
    exact,
    inputs,
    rounded,
    stages,
    to_chunks,
    to_tokens,
    twin_gradients,
    twin_scans,
    worst,
)

# Of the weak gates' chunks every token counts; strong ones leave little of what is farther than a few tokens.
KDA = {
    "weak": Call("kda", "weak", key_dim=128, value_dim=128, group=1),
    "mixed": Call("kda", "mixed", segments=3, betas="edge"),
    "raw": Call("kda", "raw", key_dim=128, group=1),
    "strong": Call("kda", "strong", time=64, group=1, betas="signed"),
}
GDN = {
    "weak": Call("gdn", "weak", key_dim=128, value_dim=128, group=1),
    "mixed": Call("gdn", "mixed", segments=3, betas="edge"),
    "raw": Call("gdn", "raw", group=1),
    "strong": Call("gdn", "strong", time=64, group=1, betas="signed"),
}

# Of an element, beside the largest one of its chunk. One rounding to bfloat16 is 2e-3; GDN's factors are float32.
PREPARED = {
    "kda": {"q_in": 4e-3, "k_in": 4e-3, "k_out": 4e-3, "decay": 5e-4, "a_qk": 8e-3, "inverse": 5e-3},
    "gdn": {"q_in": 5e-5, "k_in": 5e-5, "k_out": 5e-5, "decay": 5e-5, "a_qk": 8e-3, "inverse": 5e-3},
}
SCANNED = {"output": 8e-3, "final": 5e-3, "states": 8e-3, "v_new": 8e-3, "dends": 8e-3, "dv": 8e-3, "dfirst": 5e-3}
GRADIENTS = {"dq": 6e-3, "dk": 4e-3, "dg": 4e-3, "written": 1e-6}


def hold(bounds: dict[str, float], **pairs: tuple[Any, Any]) -> None:
    found = {name: worst(*pair) for name, pair in pairs.items()}
    over = {name: f"{error:.1e} > {bounds[name]:.1e}" for name, error in found.items() if not error <= bounds[name]}
    assert not over, f"{over}"


@pytest.mark.slow
@pytest.mark.parametrize("call", [*KDA.values(), *GDN.values()], ids=str)
def test_prepare(call):
    s = stages(call)
    with jfla.pallas.interpret():
        op, pairs, _ = run(delta_rule.prepare(s.arrays, s.inputs, s.options))
    if call.op == "gdn":  # q and k as they are, and a factor for every row
        *factors, whole = jnp.moveaxis(op.decay, 3, 0)
        rows = (np.repeat(to_chunks(a), call.group, axis=1) for a in op[:3])
        q_in, k_in, k_out = (np.asarray(f, np.float64)[..., None] * a for f, a in zip(factors, rows))
        op = Operands(q_in, k_in, k_out, whole[..., :1])
    hold(
        PREPARED[call.op],
        q_in=(op.q_in, s.op.q_in),
        k_in=(op.k_in, s.op.k_in),
        k_out=(op.k_out, s.op.k_out),
        decay=(op.decay, s.op.decay),
        a_qk=(pairs.a_qk, s.pair.a_qk),
        inverse=(pairs.inverse, np.asarray(s.pair.inverse) * np.asarray(s.x.beta)[..., None, :]),
    )


SCANS = [(KDA["weak"], 128), (KDA["mixed"], 64), (GDN["weak"], 64), (GDN["mixed"], 64)]


def read_by_scans(s: Stages) -> tuple[Operands, Pairs, gradients.Operands, chunked.Pairwise]:
    """The twin's operands and pairs rounded, as the kernels read them; and those same numbers for the twin's scans.

    beta is in the inverse, as the kernels keep it: the twin's scans then get a beta of 1.
    """
    with jax.enable_x64(True):
        pairs = Pairs(*rounded((s.pair.a_qk, s.pair.inverse * s.x.beta[..., None, :])))
        if s.inputs.g.shape[-1] == 1:
            before, after = jnp.exp(gradients.sum_before(s.x.g)[..., 0]), jnp.exp(gradients.sum_after(s.x.g)[..., 0])
            factors = [before * s.options.scale, before, after, jnp.broadcast_to(s.op.decay, before.shape)]
            factors = rounded(jnp.stack(factors, axis=3), "float32")
            return Operands(s.arrays.q, s.arrays.k, s.arrays.k, factors), pairs, s.op, chunked.Pairwise(*exact(pairs))
        read = Operands(*rounded(s.op))._replace(decay=rounded(s.op.decay, "float32"))
        return read, pairs, gradients.Operands(*exact(read)), chunked.Pairwise(*exact(pairs))


@pytest.mark.slow
@pytest.mark.parametrize(("call", "v_block"), SCANS, ids=str)
def test_output_scan(call, v_block):
    s = stages(call)
    read, pairs, op, pair = read_by_scans(s)
    with jfla.pallas.interpret():
        scan = output_scan(read, pairs, s.arrays.v, s.arrays.initial, WalkConfig(v_block), Kept(last=True))
        output, _, final = run(scan)

    by_chunk = lambda a: np.moveaxis(np.asarray(a), 2, 0)
    state, outputs = np.asarray(s.initial[:, 0]), []
    for v, q_in, k_in, k_out, decay, a_qk, inverse in zip(*map(by_chunk, (to_chunks(s.arrays.v), *op, *pair))):
        v_new = inverse @ (v - k_in @ state)
        outputs.append(q_in @ state + a_qk @ v_new)
        state = decay[..., None] * state + k_out.mT @ v_new
    hold(SCANNED, output=(to_chunks(output), np.stack(outputs, axis=2)), final=(final[:, :, None], state[:, :, None]))


@pytest.mark.slow
@pytest.mark.parametrize(("call", "v_block"), SCANS, ids=str)
def test_backward_scans(call, v_block):
    s = stages(call)
    read, pairs, op, pair = read_by_scans(s)
    do, dlast = cotangents(s)
    with jfla.pallas.interpret():
        states, v_new, dends, dv, dfirst = backward_scans(
            read, pairs, s.arrays.v, do, (s.arrays.initial, dlast), WalkConfig(v_block), keeps_first=True
        )
    want = twin_scans(s, op, pair)
    hold(
        SCANNED,
        states=(states.mT, want.states),
        v_new=(to_chunks(v_new), want.v_new),
        dends=(dends.mT, want.dends),
        dv=(to_chunks(dv), want.dv),
        dfirst=(dfirst.mT, jnp.moveaxis(want.dfirst, 1, 2)),
    )


@pytest.mark.slow
@pytest.mark.parametrize("call", [c for op in (KDA, GDN) for c in (op["weak"], op["mixed"], op["raw"])], ids=str)
def test_chunk_gradients(call, monkeypatch):
    monkeypatch.setattr(delta_rule, "query_dtype", lambda _: jnp.float32)
    s = stages(call)
    left = twin_scans(s, *read_by_scans(s)[2:])
    with jax.enable_x64(True):
        left = rounded(left)
        ends = Ends(left.states.mT, left.dends.mT, to_tokens(left.v_new), cotangents(s)[0], to_tokens(left.dv))
        dq, dk, dg, written = twin_gradients(s, exact(left))
    with jfla.pallas.interpret():
        prepared = run(delta_rule.prepare(s.arrays, s.inputs, s.options, with_pairs=False))
        got = delta_rule.chunk_gradients(s.arrays, s.inputs, s.options, prepared, ends)
    got_dg = to_chunks(got.dg) if call.op == "kda" else got.dg[..., None]
    hold(
        GRADIENTS,
        dq=(to_chunks(got.dq), dq),
        dk=(to_chunks(got.dk), dk),
        dg=(got_dg, dg),
        written=(got.written, written),
    )


def gates(name: str, heads: int, time: int) -> tuple[jax.Array, Any]:
    """(g [1, T, HV, 128], gate). "published" and "bounded" are those that the layer begins with."""
    bound = -5.0 if "bounded" in name else None
    layer = KimiDeltaAttention(8, heads, 128, value_head_dim=64, lower_bound=bound, rngs=nnx.Rngs(0))
    g = jax.random.normal(jax.random.key(3), (1, time, heads, 128))
    if name == "log_sigmoid":
        return jax.nn.log_sigmoid(g), None
    if name == "strong chunks":  # one of them in blocks of 16 too, and of both only one half of the channels
        g = jax.nn.log_sigmoid(g).at[:, :CHUNK, 0, :64].set(-4.0)
        return g.at[:, CHUNK : 2 * CHUNK, 0, 64:].set(-50.0), None
    if name == "bounded, raw":
        return g, jfla.SigmoidGate(lower_bound=-5.0)
    parameters = layer.a_log[...], layer.dt_bias[...]
    gate = jfla.SigmoidGate(*parameters, bound) if bound else jfla.SoftplusGate(*parameters)
    return g * (1.0 if "spread" in name else 0.1), gate


def out_of_range(decay: np.ndarray) -> np.ndarray:
    """[B, HV, N, 2]: the halves of 64 channels, of [B, HV, N, channels], with one that decays by 2^-FAST_RANGE."""
    return (decay.reshape(*decay.shape[:3], 2, 64) / np.log(2)).min(axis=-1) <= -FAST_RANGE


def too_strong(g: jax.Array, gate: Any) -> tuple[np.ndarray, np.ndarray]:
    """[B, HV, N, 2]: the halves of chunks whose gates are too strong from the chunk's start; and from blocks of 16."""
    decay = to_chunks(log_decay(g, gate))
    blocks = decay.reshape(*decay.shape[:3], 4, 16, -1)[..., 1:, :]  # without their first tokens
    strong = out_of_range(decay.sum(axis=3))
    return strong, strong & out_of_range(blocks.sum(axis=4).min(axis=3))


def who_reads(first: int, g: jax.Array, gate: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[np.ndarray, np.ndarray]:
    """[B, HV, N] of prepare, [B, HV, N, 2] of the gradients: who reads the patterns of PAIRS from `first` on.

    NaN in these tells.
    """
    nan = np.full((CHUNK, CHUNK), np.nan)
    spoiled = lambda steps, first: [*steps[:first], *[nan] * len(steps[first:])]
    monkeypatch.setattr(prepare_kda, "STRONG", spoiled(_team.STRONG, first))
    monkeypatch.setattr(gradients_kernel, "KDA_STEPS", spoiled(_chunk_kda.KDA_STEPS, _chunk_kda.FIRST_PAIRS + first))
    batch, time, heads, _ = g.shape
    arrays, rest = inputs(Call("kda", batch=batch, time=time, heads=heads, group=1, key_dim=128))
    given, options = validate("kda", **(DEFAULTS | arrays | rest | {"g": g, "gate": gate}))
    x, some = kernel_arrays(given, options), arrays["v"]
    states = jnp.ones((batch, heads, time // CHUNK, 64, 128), "bfloat16")
    with jfla.pallas.interpret():
        pairs = run(delta_rule.prepare(x, given, options)).pairs
        ends = Ends(states, states, some, some, some)
        grads = gradients_kernel.gradients_kda(key_arrays(x, given), ends, key_options(given, options), jnp.float32)
    in_a_qk, in_inverse = (np.isnan(a.astype("float32")).any(axis=(3, 4)) for a in pairs)
    np.testing.assert_array_equal(in_a_qk, in_inverse)
    dq = to_chunks(grads.dq)
    return in_a_qk, np.isnan(dq.reshape(*dq.shape[:4], 2, 64)).any(axis=(3, 5))


@pytest.mark.parametrize("which", ["strong", pytest.param("strongest", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("name", "heads", "time", "strong_chunks"),
    [
        pytest.param("published", 3, 64, (1, 0), marks=pytest.mark.slow),
        pytest.param("bounded", 2, 64, (0, 0), marks=pytest.mark.slow),
        ("strong chunks", 1, 192, (2, 1)),
    ],
)
def test_only_chunks_with_too_strong_gates_take_the_other_forms(name, heads, time, strong_chunks, which, monkeypatch):
    n = ("strong", "strongest").index(which)
    g, gate = gates(name, heads, time)
    prepared, differentiated = who_reads((0, NEAR_STEPS)[n], g, gate, monkeypatch)
    expected = too_strong(g, gate)[n]
    np.testing.assert_array_equal(differentiated, expected)
    np.testing.assert_array_equal(prepared, expected.any(axis=-1))
    assert prepared.sum() == strong_chunks[n]


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        ("published", 0.65, 0.75),
        ("published, spread", 0.35, 0.45),
        ("bounded", 1.0, 1.0),
        ("bounded, raw", 0.0, 0.0),
        ("log_sigmoid", 1.0, 1.0),
    ],
)
def test_how_many_chunks_take_the_fast_form(name, least, most):
    """Of 512. With the gates that the layer begins with, 0.70: heads whose rate exp(a_log) is above some 12 do not.

    For all others of these, blocks of 16 tokens are in range.
    """
    strong, strongest = too_strong(*gates(name, 128, 256))
    assert least <= 1 - strong.any(axis=-1).mean() <= most
    assert not strongest.any()
