"""What a call is compared with: the recurrence in float64, on one query and key head with its value heads."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jfla
from benchmarks.soak.cases import GATE, MAIN, Arrays, Call, Indices
from benchmarks.soak.computed import differentiated, gate, static_arguments

BLOCK = 256  # tokens between the states that the backward keeps


def part(call: Call, name: str, a: Any, head: int) -> Any:
    """What is compared of an array, by its name: one query and key head with its value heads."""
    name = name.removeprefix("d") if name != "dt_bias" else name
    heads = slice(head * call.group, (head + 1) * call.group)
    if name in ("q", "k"):
        return a[:, :, head : head + 1]
    if name in GATE:
        return a[heads]
    if name.endswith("_state"):
        return a[..., heads, :, :]
    return a[:, :, heads]


def exact(call: Call) -> Callable[[Arrays, Any, Arrays], Arrays]:
    """The recurrence in float64 on arrays of one query and key head."""

    def run(x: Any, indices: Any, cotangents: Any) -> dict[str, Any]:
        def forward(x: Any) -> dict[str, Any]:
            return _recurrence(call, x, indices)

        return (
            forward(x)
            if call.transform == "jit"
            else differentiated(forward, x, cotangents)
        )

    jitted = jax.jit(run)

    def call_(x: Arrays, indices: Indices, cotangents: Arrays) -> Arrays:
        with jax.enable_x64(True):
            wide = jax.tree.map(
                lambda a: jnp.asarray(a.astype(np.float64)), (x, cotangents)
            )
            found = jitted(wide[0], indices, wide[1])
            return {name: np.asarray(a) for name, a in found.items()}

    return call_


def _recurrence(call: Call, x: Any, indices: Any) -> dict[str, Any]:
    """In blocks, so that its backward keeps one state for each; padding behind the end is inert."""
    op = getattr(jfla.reference, f"recurrent_{call.op}")
    block = call.states_every or min(BLOCK, call.time)
    rest = -call.time % block
    ids = indices.get("segment_ids", jnp.ones((call.batch, call.time), jnp.int32))
    pool_slots = indices.get("state_slots")
    if pool_slots is not None:
        ids = jnp.where(pool_slots[:, None] < 0, 0, ids)
    static = static_arguments(call) | {"return_final_state": True, "num_segments": None}

    def blocks(a: Any) -> Any:
        a = jnp.pad(a, ((0, 0), (0, rest), *[(0, 0)] * (a.ndim - 2)))
        return jnp.moveaxis(a.reshape(call.batch, -1, block, *a.shape[2:]), 1, 0)

    slots = call.segments or 1
    shape = (call.batch, slots, call.group, call.key_dim, call.value_dim)
    state = jnp.zeros(shape)
    if call.state is not None:
        state = x["initial_state"]
        if pool_slots is not None:
            state = state[pool_slots]  # an idle row's is some other, which it leaves
        state = state.reshape(shape)

    @jax.checkpoint
    def body(state: Any, tokens: Any) -> tuple[Any, Any]:
        ids, *main = tokens
        out = op(
            *main, gate=gate(call, x), initial_state=state, segment_ids=ids, **static
        )
        return out.final_state, (out.output, out.final_state)

    tokens = (blocks(ids), *(blocks(x[name]) for name in MAIN))
    state, (output, states) = lax.scan(body, state, tokens)
    output = jnp.moveaxis(output, 0, 1).reshape(call.batch, -1, *output.shape[3:])
    found = {"output": output[:, : call.time]}
    if not call.final:
        return found
    if call.states_every:
        found["final_state"] = jnp.moveaxis(states[:, :, 0], 0, 1)
    elif pool_slots is not None:
        pool = x["initial_state"]
        written = jnp.where(pool_slots < 0, len(pool), pool_slots)
        found["final_state"] = pool.at[written].set(state[:, 0], mode="drop")
    else:
        found["final_state"] = state if call.segments else state[:, 0]
    return found
