"""Calls of the chunked ops that are differentiated in both modes, and what the reference makes of them."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import jfla


@dataclasses.dataclass(frozen=True)
class Call:
    """The static part of a call: two rows, 70 tokens, one query head, two value heads, K = V = 16."""

    op: str
    gate: str | None = None
    state: bool = False
    segments: str | None = None  # "packed", or "states": each with a state of its own
    dtype: str = "float64"

    def __str__(self) -> str:
        said = [self.op, self.gate, self.state and "state", self.segments]
        return "-".join(filter(None, said))


CALLS = [
    Call("kda"),
    Call("kda", "softplus", state=True, segments="states"),
    Call("gdn", "sigmoid", state=True),
    Call("gdn", segments="packed"),
    Call("gdn", "softplus", segments="states"),
]
GATED = Call("gdn", "softplus", state=True)


def draw(call: Call, seed: int = 0, batch: int = 2) -> dict[str, jax.Array]:
    """The arrays of a call that have derivatives."""
    rng = np.random.default_rng(seed)
    tokens = (batch, 70)
    gate_dim = (16,) if call.op == "kda" else ()
    q, k = rng.standard_normal((2, *tokens, 1, 16))
    x = {"q": q, "k": k, "v": rng.standard_normal((*tokens, 2, 16))}
    x["g"] = -rng.random((*tokens, 2, *gate_dim))
    x["beta"] = rng.standard_normal((*tokens, 2))
    if call.gate:
        # slow decays: the initial state is not forgotten
        x["a_log"] = rng.standard_normal(2) - 4
        x["dt_bias"] = rng.standard_normal((2, *gate_dim))
    if call.state:
        states = (3,) if call.segments == "states" else ()
        x["initial_state"] = rng.standard_normal((batch, *states, 2, 16, 16))
    return {name: jnp.asarray(a, call.dtype) for name, a in x.items()}


def segment_ids(call: Call, batch: int) -> jax.Array | None:
    """Two segments, the second across the chunk boundary, none of the third, and padding."""
    if call.segments is None:
        return None
    ids = np.repeat([1, 2, 0], [20, 47, 3])
    return jnp.asarray(np.stack([ids] * batch))


def op_of(call: Call, module=jfla) -> Callable:
    """{name: array} -> {"output", "final_state"} by "xla" or by the reference."""
    form = getattr(module, f"chunk_{call.op}")
    gates = {"softplus": jfla.SoftplusGate, "sigmoid": jfla.SigmoidGate}

    def run(x: dict[str, jax.Array]) -> dict[str, jax.Array]:
        gate = gates[call.gate](x["a_log"], x["dt_bias"]) if call.gate else None
        final = call.segments != "packed"
        out = form(
            *(x[name] for name in ("q", "k", "v", "g", "beta")),
            gate=gate,
            beta_max=1.0,
            qk_norm=True,
            initial_state=x.get("initial_state"),
            return_final_state=final,
            segment_ids=segment_ids(call, x["v"].shape[0]),
            num_segments=3 if call.segments == "states" else None,
            implementation="xla",
        )
        return {name: a for name, a in out._asdict().items() if a is not None}

    return run


plain_of = functools.partial(op_of, module=jfla.reference)


def loss_of(op: Callable) -> Callable:
    """A scalar of both outputs whose own second derivative is not zero."""
    return lambda x: sum(jnp.sum(jnp.sin(a)) for a in jax.tree.leaves(op(x)))


def jvp_of(op: Callable) -> Callable:
    """(primals, tangents) -> (outputs, tangents)."""
    return lambda x, dx: jax.jvp(op, (x,), (dx,))


def tangents_of(x: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Some tangents: one of every array."""
    return jax.tree.map(jnp.cos, x)


@functools.cache
def wanted(call: Call) -> tuple:
    """What the reference makes of `draw(call)`: (outputs, tangents), and (loss, gradients)."""
    plain = plain_of(call)
    run = lambda x: (
        jvp_of(plain)(x, tangents_of(x)),
        jax.value_and_grad(loss_of(plain))(x),
    )
    return jax.jit(run)(draw(call))


def assert_close(got, want, tolerance: float = 1e-12) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        assert float(jnp.linalg.norm(b)) > 1e-3
        assert float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b)) <= tolerance
