"""Calls of the chunked ops as shapes, to be compiled."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import jfla


class Described(NamedTuple):
    """A call's shapes, by argument, and what of it is static."""

    arrays: dict[str, Any]
    static: dict[str, Any]


def describe(
    op: str, dims: tuple[int, int], raw: bool, batch: int, time: int | None = None
) -> Described:
    """`batch` decides whether V is split; with 16 kernels overlap, and GDN's backward goes span by span."""
    key_dim, value_dim = dims
    heads = 2
    time = time or (8192 if batch == 16 else 128)
    tokens = (batch, time, heads)
    shape = jax.ShapeDtypeStruct
    gate_shape = (*tokens, key_dim) if op == "kda" else tokens
    arrays = {
        "q": shape((*tokens, key_dim), jnp.bfloat16),
        "k": shape((*tokens, key_dim), jnp.bfloat16),
        "v": shape((*tokens, value_dim), jnp.bfloat16),
        "g": shape(gate_shape, jnp.bfloat16 if raw else jnp.float32),
        "beta": shape(tokens, jnp.float32),
    }
    if raw:
        arrays["gate"] = jfla.SoftplusGate(shape((heads,), jnp.float32), None)
    return Described(arrays, {"scale": 0.1, "qk_norm": raw})


def value_and_gradients(op: str, static: dict[str, Any]) -> Any:
    """The cotangents of all arrays of a call, as a function of `arrays` and segment ids."""
    chunk = getattr(jfla, f"chunk_{op}")

    def both(arrays: dict[str, Any], segment_ids: Any) -> Any:
        call = lambda x: chunk(**x, **static, segment_ids=segment_ids)
        out, adjoint = jax.vjp(call, arrays)
        return adjoint(out)[0]

    return both
