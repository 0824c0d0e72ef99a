"""What the kernel tests share: calls that cover the kernels, and what is right for them, in float64."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jfla
from jfla import gradients
from jfla._types import CHUNK, Inputs, Options
from jfla._validate import DEFAULTS, validate
from jfla.gates import l2norm
from jfla.pallas._arrays import KernelArrays, kernel_arrays
from jfla.prepare import ChunkInputs, prepare_chunks
from jfla.reference import chunked

# Relative errors that 16-bit inputs may cost, by tensor.
TOLERANCE = {
    "output": 5e-3, "final_state": 5e-3, "q": 8e-3, "k": 8e-3, "v": 8e-3, "initial_state": 8e-3,
    "g": 1.5e-2, "beta": 1.5e-2, "a_log": 8e-3, "dt_bias": 8e-3,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of an op. `gates`: strong (-5..0), weak (the same / 16), mixed (0 to -1000 in one sequence), or raw."""

    op: str
    gates: str = "strong"
    batch: int = 1
    time: int = 100
    heads: int = 1
    group: int = 2
    key_dim: int = 64
    value_dim: int = 64
    segments: int = 0
    dtype: str = "bfloat16"
    betas: str = "usual"  # or "edge": 0, 1 and 2, or "signed": -1 .. 1
    repeated_keys: bool = False

    def __str__(self) -> str:
        return "-".join(str(value) for value in dataclasses.astuple(self))


def inputs(call: Call) -> tuple[dict[str, Any], dict[str, Any]]:
    """(differentiable arguments, the other ones)."""
    keys = iter(jax.random.split(jax.random.key(0), 12))
    shape, value_heads = (call.batch, call.time), call.heads * call.group
    normal = lambda *rest: jax.random.normal(next(keys), (*shape, *rest))
    unit = lambda x: x / jnp.linalg.norm(x, axis=-1, keepdims=True)
    gate_shape = (value_heads, call.key_dim) if call.op == "kda" else (value_heads,)
    q, k, v = (normal(h, d) for h, d in ((call.heads, call.key_dim),) * 2 + ((value_heads, call.value_dim),))
    if call.repeated_keys:
        k = jnp.broadcast_to(k[:, :1], k.shape)
    g = jnp.clip(jax.nn.log_sigmoid(normal(*gate_shape)), -5, 0)
    if call.gates == "weak":
        g = g / 16
    if call.gates == "mixed":
        g = jax.random.choice(next(keys), jnp.array([0.0, -1e-3, -1.0, -50.0, -1000.0]), g.shape)
    beta = jax.nn.sigmoid(normal(value_heads))
    if call.betas == "edge":
        beta = jax.random.choice(next(keys), jnp.array([0.0, 1.0, 2.0]), beta.shape)
    if call.betas == "signed":
        beta = 2 * beta - 1
    arrays = {"q": unit(q), "k": unit(k), "v": v}
    arrays = {name: x.astype(call.dtype) for name, x in arrays.items()} | {"g": g, "beta": beta}
    rest: dict[str, Any] = {}
    if call.gates == "raw":
        arrays |= {"g": normal(*gate_shape).astype(call.dtype), "beta": normal(value_heads).astype(call.dtype)}
        arrays |= {"a_log": jnp.log(jnp.linspace(1.0, 4.0, value_heads))}
        arrays |= {"dt_bias": jax.random.normal(next(keys), gate_shape)}
        rest |= {"beta_max": 1.0, "qk_norm": True}
    if call.segments:
        ids = jnp.sort(jax.random.randint(next(keys), shape, 1, call.segments + 1), axis=1)
        rest["segment_ids"] = ids.at[:, -min(7, call.time - 1) :].set(0) if call.time > 1 else ids
    else:
        state = (call.batch, value_heads, call.key_dim, call.value_dim)
        arrays["initial_state"] = jax.random.normal(next(keys), state)
        rest["return_final_state"] = True
    return arrays, rest


def results(op: Any, arrays: dict[str, Any], rest: dict[str, Any]) -> dict[str, jax.Array]:
    """The output, the final state and every gradient of a fixed linear functional of both."""

    def loss(arrays):
        arrays = dict(arrays)
        gate = {"gate": jfla.SoftplusGate(arrays.pop("a_log"), arrays.pop("dt_bias"))} if "a_log" in arrays else {}
        main = [arrays.pop(name) for name in ("q", "k", "v", "g", "beta")]
        out = op(*main, **arrays, **gate, **rest)
        # Rounded, because the cotangent of a 16-bit output is: that error is not the kernels'.
        factors = lambda x, seed: jax.random.normal(jax.random.key(seed), x.shape, jnp.float32).astype(jnp.bfloat16)
        weight = lambda x, seed: jnp.sum(x.astype(jnp.float32) * factors(x, seed).astype(jnp.float32))
        total = weight(out.output, 1) + (0 if out.final_state is None else weight(out.final_state, 2))
        return total, out

    grads, out = jax.grad(loss, has_aux=True)(arrays)
    final = {} if out.final_state is None else {"final_state": out.final_state}
    return {"output": out.output} | final | grads


def errors(call: Call, **named: Any) -> dict[str, float]:
    """||x - ref|| / ||ref|| of everything, against the recurrence in float64 on the same, already rounded inputs."""
    arrays, rest = inputs(call)
    got = results(lambda *a, **k: getattr(jfla, f"chunk_{call.op}")(*a, **k, **named), arrays, rest)
    with jax.enable_x64(True):
        exact = jax.tree.map(lambda x: x.astype(jnp.float64), arrays)
        want = results(getattr(jfla.reference, f"recurrent_{call.op}"), exact, rest)
    norm = lambda x: float(np.linalg.norm(np.asarray(x, np.float64)))
    return {n: norm(np.asarray(got[n], np.float64) - np.asarray(want[n])) / max(norm(want[n]), 1e-30) for n in want}


def check(call: Call, **named: Any) -> None:
    found = errors(call, **named)
    over = {name: f"{e:.1e} > {TOLERANCE[name]:.1e}" for name, e in found.items() if not e <= TOLERANCE[name]}
    assert not over, f"{call}: {over}"


class Stages(NamedTuple):
    """One call: what the kernels read of it, and what their twins make of the same numbers in float64."""

    inputs: Inputs
    options: Options
    arrays: KernelArrays
    initial: jax.Array  # [B, 1, HV, K, V]
    x: ChunkInputs  # like what follows with [B, HV, N] in front, as the kernels have it
    op: gradients.Operands
    pair: chunked.Pairwise


@functools.cache
def stages(call: Call) -> Stages:
    arrays, rest = inputs(call)
    if "a_log" in arrays:
        rest["gate"] = jfla.SoftplusGate(arrays.pop("a_log"), arrays.pop("dt_bias"))
    given, options = validate(call.op, **(DEFAULTS | arrays | rest))

    @jax.jit
    def twins(given: Inputs) -> tuple[Any, ...]:
        x, initial = prepare_chunks(given, options)
        return initial, *chunks_third((x, gradients.operands(x), chunked.pairwise(x)))

    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        return Stages(given, options, kernel_arrays(given, options), *twins(exact(given)))


def chunks_third(tree: Any) -> Any:
    return jax.tree.map(lambda a: jnp.moveaxis(a, 0, 2), tree)


def chunks_first(tree: Any) -> Any:
    """As the twins have them."""
    return jax.tree.map(lambda a: jnp.moveaxis(a, 2, 0), tree)


def exact(tree: Any) -> Any:
    """In float64; inside jax.enable_x64."""
    return jax.tree.map(lambda a: a.astype("float64") if jnp.issubdtype(a.dtype, jnp.floating) else a, tree)


def rounded(tree: Any, dtype: str = "bfloat16") -> Any:
    return jax.tree.map(lambda a: a.astype(dtype), tree)


def to_chunks(a: Any) -> np.ndarray:
    """[B, T, HV, D] to [B, HV, N, C, D], in float64."""
    a = np.asarray(a, np.float64)
    return np.moveaxis(a.reshape(a.shape[0], -1, CHUNK, *a.shape[2:]), 3, 1)


def to_tokens(a: jax.Array) -> jax.Array:
    """The way back, in the dtype of a."""
    a = jnp.moveaxis(a, 1, 3)
    return a.reshape(a.shape[0], -1, *a.shape[3:])


def worst(got: Any, want: Any) -> float:
    """The largest error in any chunk, [B, HV, N, ...], beside the chunk's largest element; NaN where there is one."""
    got, want = (np.asarray(a, np.float64) for a in (got, want))
    assert got.shape == want.shape
    largest = lambda a: np.abs(a.reshape(*a.shape[:3], -1)).max(axis=-1)
    return float(np.max(largest(got - want) / np.maximum(largest(want), 1e-6)))


def cotangents(s: Stages) -> tuple[jax.Array, jax.Array]:
    """Of the output, [B, T, HV, V] in whole chunks with 0 on the tail, and of the last state, [B, HV, 1, V, K]."""
    first, second = jax.random.split(jax.random.key(7))
    do = jax.random.normal(first, s.arrays.v.shape, "float32").at[:, s.inputs.q.shape[1] :].set(0)
    batch, heads, _, value_dim, key_dim = s.arrays.dims
    return rounded(do), jax.random.normal(second, (batch, heads, 1, value_dim, key_dim), "float32")


class Scanned(NamedTuple):
    """What the twin's two scans leave, in float64."""

    states: jax.Array
    v_new: jax.Array
    dends: jax.Array
    dv: jax.Array
    dfirst: jax.Array


def twin_scans(s: Stages, op: gradients.Operands, pair: chunked.Pairwise) -> Scanned:
    @jax.jit
    def both(initial: jax.Array, dlast: jax.Array, *rest: Any) -> Scanned:
        x, op, pair, do = chunks_first(rest)
        states, _, v_new, _ = chunked.state_scan(x, initial, op, pair)
        _, dv_local = chunked.output_adjoint(pair, v_new, do)
        dends, dv, dfirst = chunked.state_adjoint_scan(x, op, pair, do, dv_local, dlast)
        return Scanned(*chunks_third((states, v_new, dends, dv)), dfirst)

    do, dlast = cotangents(s)
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        x = s.x._replace(beta=jnp.ones_like(s.x.beta))
        return both(s.initial, jnp.moveaxis(exact(dlast).mT, 2, 1), x, op, pair, jnp.asarray(to_chunks(do)))


def twin_gradients(s: Stages, left: Scanned) -> tuple[jax.Array, ...]:
    """dq and dk of what the caller passed, for every value head; dg of the decay; dv . v_new."""

    def caller(q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
        norm = l2norm if s.options.qk_norm else lambda a: a
        return norm(q) * s.options.scale, norm(k)

    @jax.jit
    def of(rows: list[jax.Array], written: jax.Array, *rest: Any) -> tuple[jax.Array, ...]:
        x, op, pair, states, v_new, dends, dv, do = chunks_first(rest)
        d_a_qk, _ = chunked.output_adjoint(pair, v_new, do)
        y, error = dv / jnp.where(x.beta == 0, 1, x.beta)[..., None], x.v - op.k_in @ states
        found = chunks_third(gradients.chunk_gradients(x, op, states, error, v_new, do, d_a_qk, dends, y))
        return *jax.vjp(caller, *rows)[1](found[:2]), found[3], written

    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        rows = [jnp.repeat(to_chunks(a), s.x.q.shape[1] // a.shape[2], axis=1) for a in s.arrays[:2]]
        written = jnp.sum(left.dv * left.v_new, axis=-1)
        return of(rows, written, s.x, s.op, s.pair, *left[:4], jnp.asarray(to_chunks(cotangents(s)[0])))
