"""What every stage of jfla/stages.py leaves, in float64: its equations written plainly, chunk by chunk.

Decays between two tokens come from differences of cumulative sums, in which float64 has digits to spare; a reset is
a log decay of RESET. Nothing of the library is used but the containers that its stages fill.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jfla.stages import ChunkGrads, DecayedQK, IntraChunk, ScanResults
from support.kernel_cases import Call

CHUNK = 64
RESET = -1e4
NORM_EPSILON = 1e-6


@dataclasses.dataclass(frozen=True)
class Tokens:
    """One call in chunks [B, HV, N, C, ...]: q and k as the caller passed them, with a row per value head."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    g: np.ndarray  # natural log decay, with resets
    beta: np.ndarray
    initial: np.ndarray  # [B, HV, K, V]
    keep: np.ndarray  # [B, 1, N, C]: neither padding nor the tail
    scale: float
    qk_norm: bool


def tokens(call: Call, arrays: dict[str, Any], rest: dict[str, Any]) -> Tokens:
    """Of the arguments that `kernel_cases.inputs` made."""
    x = {name: np.asarray(a, np.float64) for name, a in arrays.items()}
    g = x["g"]
    beta = x["beta"]
    if "a_log" in x:
        rate = np.exp(x["a_log"])
        rate = rate[:, None] if call.op == "kda" else rate
        g = -rate * np.logaddexp(0, g + x["dt_bias"])
    if call.op == "gdn":
        g = g[..., None]
    if rest.get("beta_max") is not None:
        beta = rest["beta_max"] / (1 + np.exp(-beta))
    keep = np.ones((call.batch, call.time), bool)
    if call.segments:
        ids = np.asarray(rest["segment_ids"])
        keep = ids > 0
        # nothing is reset at token 0
        before = np.concatenate([ids[:, :1], ids[:, :-1]], axis=1)
        g = np.where((keep & (ids != before))[..., None, None], RESET, g)
    state = (call.batch, call.value_heads, call.key_dim, call.value_dim)

    def chunks(a: np.ndarray) -> np.ndarray:
        kept = np.where(keep.reshape(keep.shape + (1,) * (a.ndim - 2)), a, 0)
        return to_chunks(pad_time(kept))

    return Tokens(
        q=chunks(np.repeat(x["q"], call.group, axis=2)),
        k=chunks(np.repeat(x["k"], call.group, axis=2)),
        v=chunks(x["v"]),
        g=chunks(g),
        beta=chunks(beta),
        initial=x.get("initial_state", np.zeros(state)),
        keep=to_chunks(pad_time(keep[..., None])),
        scale=call.key_dim**-0.5,
        qk_norm=rest.get("qk_norm", False),
    )


def pad_time(a: Any) -> np.ndarray:
    """[B, T, ...] with zeros up to whole chunks."""
    return np.pad(a, [(0, 0), (0, -a.shape[1] % CHUNK)] + [(0, 0)] * (a.ndim - 2))


def to_chunks(a: Any) -> np.ndarray:
    """[B, T, HV, ...] to [B, HV, N, C, ...]."""
    a = np.asarray(a)
    return np.moveaxis(a.reshape(a.shape[0], -1, CHUNK, *a.shape[2:]), 3, 1)


def to_tokens(a: Any) -> Any:
    """The way back, of an array of numpy or JAX."""
    axes = (0, 2, 3, 1, *range(4, a.ndim))
    a = a.transpose(axes)
    return a.reshape(a.shape[0], -1, *a.shape[3:])


# One chunk, in jnp so that it can be differentiated.


def _scaled_qk(q: Any, k: Any, scale: float, qk_norm: bool) -> tuple[Any, Any]:
    if qk_norm:
        q = q / jnp.sqrt(jnp.sum(q * q, axis=-1, keepdims=True) + NORM_EPSILON)
        k = k / jnp.sqrt(jnp.sum(k * k, axis=-1, keepdims=True) + NORM_EPSILON)
    return scale * q, k


def _pairs_of_chunk(
    q: Any, k: Any, g: Any, *, scale: float, qk_norm: bool
) -> tuple[DecayedQK, Any, Any]:
    """q and k as they meet the state, tril(q D k^T) and stril(k D k^T)."""
    q, k = _scaled_qk(q, k, scale, qk_norm)
    g_cum = jnp.cumsum(g, axis=0)
    g_last = g_cum[-1]
    causal = jnp.tril(jnp.ones((CHUNK, CHUNK), bool))[:, :, None]
    d = jnp.exp(jnp.where(causal, g_cum[:, None] - g_cum[None, :], -jnp.inf))
    a_qk = jnp.sum(q[:, None] * d * k[None, :], axis=-1)
    a_kk = jnp.tril(jnp.sum(k[:, None] * d * k[None, :], axis=-1), -1)
    qk = DecayedQK(
        q_from_start=q * jnp.exp(g_cum),
        k_from_start=k * jnp.exp(g_cum),
        k_to_end=k * jnp.exp(g_last - g_cum),
        chunk_decay=jnp.exp(g_last),
    )
    return qk, a_qk, a_kk


def _intra_of_chunk(
    q: Any, k: Any, g: Any, beta: Any, *, scale: float, qk_norm: bool
) -> tuple[DecayedQK, IntraChunk]:
    qk, a_qk, a_kk = _pairs_of_chunk(q, k, g, scale=scale, qk_norm=qk_norm)
    lower = beta[:, None] * a_kk
    return qk, IntraChunk(a_qk, jnp.linalg.inv(jnp.eye(CHUNK) + lower) * beta)


def _lagrangian(
    q: Any,
    k: Any,
    g: Any,
    ends: tuple[Any, Any],
    values: tuple[Any, Any, Any],
    **static: Any,
) -> Any:
    """Of one chunk's map, whose gradients are those of this with v_new and its multiplier dv held.

    v_new is what solves v - k_from_start S - stril(k D k^T) v_new - v_new / beta = 0. Terms that q, k and g are not in
    are left out.
    """
    state, dstate = ends
    v_new, do, dv = values
    qk, a_qk, a_kk = _pairs_of_chunk(q, k, g, **static)
    output = qk.q_from_start @ state + a_qk @ v_new
    end = qk.chunk_decay[:, None] * state + qk.k_to_end.T @ v_new
    error = -qk.k_from_start @ state - a_kk @ v_new
    return jnp.sum(do * output) + jnp.sum(dstate * end) + jnp.sum(dv * error)


def _over_chunks(function: Any, *arrays: np.ndarray) -> Any:
    """`function` on every chunk [B, HV, N, ...], one after the other, in float64."""
    flat = [a.reshape(-1, *a.shape[3:]) for a in arrays]
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        found = jax.jit(lambda *xs: jax.lax.map(lambda x: function(*x), xs))(*flat)
    return jax.tree.map(
        lambda a: np.asarray(a).reshape(*arrays[0].shape[:3], *a.shape[1:]), found
    )


# The stages. Containers hold float64, in chunks [B, HV, N, C, ...] where a stage has time.


def intra(x: Tokens) -> tuple[DecayedQK, IntraChunk]:
    """q and k as they meet the state, a_qk and a_inv."""
    function = functools.partial(_intra_of_chunk, scale=x.scale, qk_norm=x.qk_norm)
    return _over_chunks(function, x.q, x.k, x.g, x.beta)


def output_scan(
    x: Tokens, qk: DecayedQK, pairs: IntraChunk
) -> tuple[np.ndarray, np.ndarray]:
    """The output, and the final state [B, HV, K, V]."""
    states, v_new, final = _states(x, qk, pairs)
    return qk.q_from_start @ states + pairs.a_qk @ v_new, final


def _states(
    x: Tokens, qk: DecayedQK, pairs: IntraChunk
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The state at every chunk's start, v_new, and the final state."""
    state = x.initial
    states = []
    values = []
    for n in range(x.v.shape[2]):
        v_new = pairs.a_inv[:, :, n] @ (x.v[:, :, n] - qk.k_from_start[:, :, n] @ state)
        states.append(state)
        values.append(v_new)
        state = (
            qk.chunk_decay[:, :, n, :, None] * state + qk.k_to_end[:, :, n].mT @ v_new
        )
    return np.stack(states, axis=2), np.stack(values, axis=2), state


def backward_scans(
    x: Tokens, qk: DecayedQK, pairs: IntraChunk, do: np.ndarray, d_final: np.ndarray
) -> tuple[ScanResults, np.ndarray]:
    """`ScanResults` in chunks, and dS [B, HV, K, V] before the first."""
    states, v_new, _ = _states(x, qk, pairs)
    dstate = d_final
    dstates = []
    values = []
    for n in reversed(range(x.v.shape[2])):
        from_output = pairs.a_qk[:, :, n].mT @ do[:, :, n]
        dv = pairs.a_inv[:, :, n].mT @ (from_output + qk.k_to_end[:, :, n] @ dstate)
        dstates.insert(0, dstate)
        values.insert(0, dv)
        decayed = qk.chunk_decay[:, :, n, :, None] * dstate
        read = qk.q_from_start[:, :, n].mT @ do[:, :, n]
        dstate = decayed + read - qk.k_from_start[:, :, n].mT @ dv
    dstates = np.stack(dstates, axis=2)
    scans = ScanResults(states.mT, dstates.mT, v_new, do, np.stack(values, axis=2))
    return scans, dstate


def chunk_grads(x: Tokens, scans: ScanResults) -> ChunkGrads:
    """`ChunkGrads` in chunks, from `ScanResults` in chunks: JAX's gradients of one chunk's Lagrangian."""
    static = {"scale": x.scale, "qk_norm": x.qk_norm}

    def grads(q: Any, k: Any, g: Any, *rest: Any) -> tuple[Any, Any, Any]:
        state, dstate, *values = rest
        function = functools.partial(_lagrangian, **static)
        return jax.grad(function, argnums=(0, 1, 2))(
            q, k, g, (state, dstate), tuple(values)
        )

    ends = scans.states.mT, scans.dstates.mT
    dq, dk, dg = _over_chunks(
        grads, x.q, x.k, x.g, *ends, scans.v_new, scans.do, scans.dv
    )
    return ChunkGrads(dq, dk, dg, np.sum(scans.v_new * scans.dv, axis=-1))


def decode(x: Tokens, time: int) -> tuple[np.ndarray, np.ndarray]:
    """The output [B, T, HV, V] and the state after every token [B, T, HV, K, V], token by token."""
    q, k, v, g, beta = (to_tokens(a)[:, :time] for a in (x.q, x.k, x.v, x.g, x.beta))
    if x.qk_norm:
        q, k = (
            a / np.sqrt(np.sum(a * a, axis=-1, keepdims=True) + NORM_EPSILON)
            for a in (q, k)
        )
    state = x.initial
    outputs = []
    states = []
    for t in range(time):
        state = np.exp(g[:, t])[..., None] * state
        error = beta[:, t, :, None] * (
            v[:, t] - np.einsum("bhkv,bhk->bhv", state, k[:, t])
        )
        state = state + k[:, t, :, :, None] * error[:, :, None, :]
        outputs.append(np.einsum("bhkv,bhk->bhv", state, x.scale * q[:, t]))
        states.append(state)
    return np.stack(outputs, axis=1), np.stack(states, axis=1)
