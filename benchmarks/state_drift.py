"""What a decoding state of bfloat16 costs: the output's distance from a float32 state's, over many tokens.

Every token is a call of its own that hands the state on, rounded, as a serving loop does. Run on any device with
`python -m benchmarks.state_drift`; docs/usage.md has the figures.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from rich.console import Console
from rich.table import Table

import jfla

TOKENS = 10_000
WINDOW = 500  # tokens over which an error is taken
HEADS = 4
DIM = 128


def gates(key: jax.Array) -> dict[str, jfla.SoftplusGate | jfla.SigmoidGate]:
    """Gates by name."""
    rate_key, step_key = jax.random.split(key)
    rate = jnp.log(jax.random.uniform(rate_key, (HEADS,), minval=1.0, maxval=16.0))
    step = jnp.exp(jax.random.uniform(step_key, (HEADS, DIM), minval=-6.9, maxval=-2.3))
    bias = step + jnp.log(-jnp.expm1(-step))
    return {
        "softplus, published initialisation": jfla.SoftplusGate(rate, bias),
        "-5 sigmoid": jfla.SigmoidGate(lower_bound=-5.0),
        "log-sigmoid / 16": jfla.SoftplusGate(jnp.full(HEADS, -2.77)),
        "hardly any decay, about -0.001": jfla.SoftplusGate(jnp.full(HEADS, -6.6)),
        "no decay": jfla.SoftplusGate(jnp.full(HEADS, -100.0)),
    }


@functools.partial(jax.jit, static_argnames=("op", "dtype"))
def decode(op: str, tokens: Any, gate: Any, dtype: str) -> tuple[jax.Array, jax.Array]:
    """The output [T, H, V] of one sequence, and its last state."""
    recurrent = getattr(jfla, f"recurrent_{op}")

    def token(state: jax.Array, x: Any) -> tuple[jax.Array, jax.Array]:
        one = [a[None, None] for a in x]
        out = recurrent(
            *one,
            gate=gate,
            beta_max=1.0,
            qk_norm=True,
            initial_state=state,
            return_final_state=True,
        )
        return out.final_state, out.output[0, 0]

    state = jnp.zeros((1, HEADS, DIM, DIM), dtype)
    last, output = lax.scan(token, state, tokens)
    return output, last


def error(x: jax.Array, reference: jax.Array) -> float:
    """||x - reference|| / ||reference||."""
    x = x.astype(jnp.float32)
    return float(jnp.linalg.norm(x - reference) / jnp.linalg.norm(reference))


def main() -> None:
    """Prints a table."""
    table = Table(
        "op",
        "gate",
        f"output, first {WINDOW}",
        "in the middle",
        f"last {WINDOW}",
        "state",
    )
    keys = jax.random.split(jax.random.key(0), 7)
    q, k, v, x = (jax.random.normal(key, (TOKENS, HEADS, DIM)) for key in keys[:4])
    beta = jax.random.normal(keys[4], (TOKENS, HEADS))
    for op in ("kda", "gdn"):
        for name, gate in gates(keys[5]).items():
            g = x
            if op == "gdn":
                g = x[..., 0]
                if gate.dt_bias is not None:
                    gate = dataclasses.replace(gate, dt_bias=gate.dt_bias[:, 0])
            tokens = (q, k, v, g, beta)
            wide, wide_state = decode(op, tokens, gate, "float32")
            narrow, narrow_state = decode(op, tokens, gate, "bfloat16")
            starts = (0, TOKENS // 2, TOKENS - WINDOW)
            windows = [slice(start, start + WINDOW) for start in starts]
            errors = [error(narrow[window], wide[window]) for window in windows]
            errors.append(error(narrow_state, wide_state))
            table.add_row(op, name, *(f"{value:.1e}" for value in errors))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
