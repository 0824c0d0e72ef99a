"""The call under test: from a `Call` and its arrays to values and gradients, by the transform that it names."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jfla
from benchmarks.soak.cases import GATE, MAIN, MAPPED, Call

Compiled = Callable[[Any, Any, Any], dict[str, jax.Array]]


class Refused(Exception):
    """The implementation does not take a call; the message is the reason."""


def gate(call: Call, x: Any) -> jfla.SoftplusGate | jfla.SigmoidGate | None:
    if call.gate is None:
        return None
    kind = jfla.SoftplusGate if call.gate == "softplus" else jfla.SigmoidGate
    return kind(x["a_log"], x.get("dt_bias"))


def static_arguments(call: Call) -> dict[str, Any]:
    with_states = call.segments and (call.final or call.state is not None)
    return {
        "beta_max": call.beta_max,
        "qk_norm": call.qk_norm,
        "scale": call.scale,
        "return_final_state": call.final,
        "num_segments": call.segments if with_states else None,
    }


def _function(call: Call) -> Callable[..., jfla.DeltaRuleOutput]:
    return getattr(jfla, f"{call.form}_{call.op}")


def _states_along_time(call: Call) -> dict[str, Any]:
    if call.form == "recurrent":
        return {"return_states": bool(call.states_every)}
    return {"return_states_every": call.states_every or None}


def _values(
    call: Call, implementation: str | None, x: Any, indices: Any
) -> dict[str, Any]:
    out = _function(call)(
        *(x[name] for name in MAIN),
        gate=gate(call, x),
        initial_state=x.get("initial_state"),
        implementation=implementation,
        **indices,
        **static_arguments(call),
        **_states_along_time(call),
    )
    return {name: a for name, a in out._asdict().items() if a is not None}


def differentiated(
    forward: Callable[[Any], Any], x: Any, cotangents: Any
) -> dict[str, Any]:
    out, adjoint = jax.vjp(forward, x)
    return out | {f"d{name}": a for name, a in adjoint(cotangents)[0].items()}


def compiled(call: Call, implementation: str | None) -> Compiled:
    """Jitted (arrays, indices, cotangents) -> {"output", "final_state", "dq", ..}."""

    def run(x: Any, indices: Any, cotangents: Any) -> dict[str, Any]:
        def forward(x: Any) -> dict[str, Any]:
            return _values(call, implementation, x, indices)

        if call.transform == "jit":
            return forward(x)
        if call.transform == "checkpoint":
            return differentiated(jax.checkpoint(forward), x, cotangents)
        if call.transform == "shard_map":
            return differentiated(
                _over_devices(call, implementation, x, indices), x, cotangents
            )
        return differentiated(forward, x, cotangents)

    return jax.jit(_mapped(run) if call.transform == "vmap" else run)


def _mapped(run: Compiled) -> Compiled:
    """`run` with its batch axis in two, one of them mapped; the gate's parameters are not."""

    def split(x: Any) -> Any:
        return x.reshape(MAPPED, -1, *x.shape[1:])

    def by_rows(x: Any, indices: Any, cotangents: Any) -> dict[str, Any]:
        shared = {name: a for name, a in x.items() if name in GATE}
        rows = {name: split(a) for name, a in x.items() if name not in GATE}
        others = jax.tree.map(split, (indices, cotangents))
        found = jax.vmap(lambda rows, others: run(rows | shared, *others))(rows, others)
        return {
            name: a.sum(axis=0)
            if name.removeprefix("d") in GATE
            else a.reshape(-1, *a.shape[2:])
            for name, a in found.items()
        }

    return by_rows


def _over_devices(
    call: Call, implementation: str | None, x: Any, indices: Any
) -> Callable[[Any], dict[str, Any]]:
    """The values with the batch split over all devices; the gate's parameters are on each."""
    kind = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((jax.device_count(),), ("batch",), axis_types=kind)
    rows = jax.P("batch")
    specs = {name: jax.P() if name in GATE else rows for name in x}
    of_device = functools.partial(_values, call, implementation)
    split = jax.shard_map(of_device, mesh=mesh, in_specs=(specs, rows), out_specs=rows)
    return lambda x: split(x, indices)


def taken(call: Call, implementation: str | None, arrays: tuple[Any, Any, Any]) -> str:
    """The implementation that takes the call here. Raises `Refused` with the reason."""
    if implementation == "xla":
        return "xla"  # it takes every call
    x, indices, _ = jax.tree.map(jnp.asarray, arrays)
    try:
        choice = jfla.explain(
            _function(call),
            *(x[name] for name in MAIN),
            gate=gate(call, x),
            initial_state=x.get("initial_state"),
            implementation=implementation,
            **indices,
            **static_arguments(call),
            **_states_along_time(call),
        )
    except NotImplementedError as reason:
        raise Refused(str(reason)) from reason
    return choice.implementation
