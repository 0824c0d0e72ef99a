"""What the kernel tests share: calls that cover the kernels, what is right for them, and calls with a schedule."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jfla
from jfla._inputs.validate import DEFAULTS, validate
from jfla.pallas.dims import dims_of
from jfla.pallas.heuristics import HOPPER_SMS, schedule
from jfla.types import OPS, DeltaRuleOutput, Inputs, Options

# Relative errors that 16-bit inputs may cost, by tensor.
TOLERANCE = {
    "output": 5e-3, "final_state": 5e-3, "q": 8e-3, "k": 8e-3, "v": 8e-3, "initial_state": 8e-3,
    "g": 1.5e-2, "beta": 1.5e-2, "a_log": 8e-3, "dt_bias": 8e-3,
}  # fmt: skip
MAIN = ("q", "k", "v", "g", "beta")
INTERPRET = True  # kernels of `scheduled` unless a test says otherwise; --compiled sets it to False


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of an op. `gates`: strong (-5..0), weak (the same / 16), mixed (0 to -1000), or raw."""

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
    segment_states: bool = False

    def __str__(self) -> str:
        return "-".join(str(value) for value in dataclasses.astuple(self))

    @property
    def value_heads(self) -> int:
        return self.heads * self.group

    @property
    def gate_shape(self) -> tuple[int, ...]:
        """Of `g` behind batch and time."""
        return (
            (self.value_heads, self.key_dim)
            if self.op == "kda"
            else (self.value_heads,)
        )


def inputs(call: Call) -> tuple[dict[str, Any], dict[str, Any]]:
    """(differentiable arguments, the other ones)."""
    keys = iter(jax.random.split(jax.random.key(0), 12))
    shape = (call.batch, call.time)

    def normal(*rest: int) -> jax.Array:
        return jax.random.normal(next(keys), (*shape, *rest))

    def unit(x: jax.Array) -> jax.Array:
        return x / jnp.linalg.norm(x, axis=-1, keepdims=True)

    q = unit(normal(call.heads, call.key_dim))
    k = unit(normal(call.heads, call.key_dim))
    v = normal(call.value_heads, call.value_dim)
    if call.repeated_keys:
        k = jnp.broadcast_to(k[:, :1], k.shape)
    g = jnp.clip(jax.nn.log_sigmoid(normal(*call.gate_shape)), -5, 0)
    if call.gates == "weak":
        g = g / 16
    if call.gates == "mixed":
        g = jax.random.choice(
            next(keys), jnp.array([0.0, -1e-3, -1.0, -50.0, -1000.0]), g.shape
        )
    beta = jax.nn.sigmoid(normal(call.value_heads))
    if call.betas == "edge":
        beta = jax.random.choice(next(keys), jnp.array([0.0, 1.0, 2.0]), beta.shape)
    if call.betas == "signed":
        beta = 2 * beta - 1
    arrays = {"q": q, "k": k, "v": v}
    arrays = {name: x.astype(call.dtype) for name, x in arrays.items()} | {
        "g": g,
        "beta": beta,
    }
    rest: dict[str, Any] = {}
    if call.gates == "raw":
        arrays["g"] = normal(*call.gate_shape).astype(call.dtype)
        arrays["beta"] = normal(call.value_heads).astype(call.dtype)
        arrays["a_log"] = jnp.log(jnp.linspace(1.0, 4.0, call.value_heads))
        arrays["dt_bias"] = jax.random.normal(next(keys), call.gate_shape)
        rest |= {"beta_max": 1.0, "qk_norm": True}
    if call.segments:
        ids = jnp.sort(
            jax.random.randint(next(keys), shape, 1, call.segments + 1), axis=1
        )
        padding = min(7, call.time - 1)
        rest["segment_ids"] = ids.at[:, -padding:].set(0) if call.time > 1 else ids
    if call.segment_states or not call.segments:
        segments = (call.segments,) if call.segments else ()
        state = (call.batch, *segments, call.value_heads, call.key_dim, call.value_dim)
        arrays["initial_state"] = jax.random.normal(next(keys), state)
        rest["return_final_state"] = True
    return arrays, rest


def check_gradient_of_16_bits(call: Call, run: Callable[..., DeltaRuleOutput]) -> None:
    """The gradient of decays in bfloat16 is that of the same decays in float32, rounded once."""
    arrays, rest = inputs(call)
    decays = arrays.pop("g").astype(jnp.bfloat16)

    @jax.jit
    def gradient(g: jax.Array) -> jax.Array:
        output, adjoint = jax.vjp(lambda g: run(**arrays, **rest, g=g), g)
        return adjoint(output)[0]

    dg = gradient(decays)
    wider = gradient(decays.astype(jnp.float32))
    assert dg.dtype == jnp.bfloat16
    assert jnp.any(dg != 0)
    np.testing.assert_array_equal(dg, wider.astype(jnp.bfloat16))


def packed(lengths: list[int], total: int) -> jax.Array:
    """Segment ids of sequences with these lengths, [1, total], with padding behind them."""
    return jfla.segment_ids_from_cu_seqlens(jnp.cumsum(jnp.array([0, *lengths])), total)


def main_and_rest(arrays: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """(q, k, v, g, beta) and the keyword arguments of a call."""
    rest = {name: x for name, x in arrays.items() if name not in MAIN}
    if "a_log" in rest:
        rest["gate"] = jfla.SoftplusGate(rest.pop("a_log"), rest.pop("dt_bias"))
    return [arrays[name] for name in MAIN], rest


def validated(op: str, *args: Any, **kwargs: Any) -> tuple[Inputs, Options]:
    """The arguments of a chunked op as Inputs and Options."""
    return validate(OPS[op], *args, **(DEFAULTS | kwargs))


def results(
    op: Any, arrays: dict[str, Any], rest: dict[str, Any]
) -> dict[str, jax.Array]:
    """The output, the final state and every gradient of a fixed linear functional of both."""

    def weight(x: jax.Array, seed: int) -> jax.Array:
        # Rounded, because the cotangent of a 16-bit output is: that error is not the kernels'.
        factors = jax.random.normal(jax.random.key(seed), x.shape, jnp.float32)
        return jnp.sum(
            x.astype(jnp.float32) * factors.astype(jnp.bfloat16).astype(jnp.float32)
        )

    def loss(arrays: dict[str, Any]) -> tuple[jax.Array, DeltaRuleOutput]:
        main, more = main_and_rest(arrays)
        out = op(*main, **more, **rest)
        total = weight(out.output, 1)
        if out.final_state is not None:
            total = total + weight(out.final_state, 2)
        return total, out

    grads, out = jax.grad(loss, has_aux=True)(arrays)
    final = {} if out.final_state is None else {"final_state": out.final_state}
    return {"output": out.output} | final | grads


def by_kernels(op: str) -> Callable[..., DeltaRuleOutput]:
    """The public chunked op with implementation="pallas"."""
    chunk = getattr(jfla, f"chunk_{op}")
    return lambda *args, **kwargs: chunk(*args, **kwargs, implementation="pallas")


def scheduled(
    op: str,
    *,
    num_sms: int = HOPPER_SMS,
    interpret: bool | None = None,
    in_place: bool = False,
    **overrides: Any,
) -> Callable[..., DeltaRuleOutput]:
    """The chunked op by kernels, with the schedule for `num_sms` multiprocessors and fields as given.

    Rows with a chunk that is not whole are read `in_place`, as if copies took long, or copied. Without `interpret` the
    module's `INTERPRET` holds.
    """
    from jfla.chunk_op import Plan, run

    def call(*args: Any, **kwargs: Any) -> DeltaRuleOutput:
        inputs, options = validated(op, *args, **kwargs)
        dims = dims_of(inputs, options)
        if in_place:
            usual = schedule(options.op, dims, num_sms, bytes_per_us=1e-3)
            assert usual.row_is_segment
        else:
            usual = schedule(options.op, dims.as_copied(), num_sms)
        plan = Plan(
            dataclasses.replace(usual, **overrides),
            interpret=INTERPRET if interpret is None else interpret,
        )
        return run(inputs, options, plan)

    return call


def error(got: Any, want: Any) -> float:
    """||got - want|| / ||want|| in float64."""
    got = np.asarray(got, np.float64)
    want = np.asarray(want, np.float64)
    return float(np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30))


def check(call: Call, op: Callable[..., DeltaRuleOutput], **options: Any) -> None:
    """`op` against the recurrence in float64 on the same, already rounded inputs: values and gradients."""
    arrays, rest = inputs(call)
    rest |= options
    got = jax.jit(lambda arrays: results(op, arrays, rest))(arrays)
    with jax.enable_x64(True):
        exact = jax.tree.map(lambda x: x.astype(jnp.float64), arrays)
        recurrent = getattr(jfla.reference, f"recurrent_{call.op}")
        want = jax.jit(lambda arrays: results(recurrent, arrays, rest))(exact)
        found = {name: error(got[name], want[name]) for name in want}
    over = {
        name: f"{e:.1e} > {TOLERANCE[name]:.1e}"
        for name, e in found.items()
        if not e <= TOLERANCE[name]
    }
    assert not over, f"{call}: {over}"
