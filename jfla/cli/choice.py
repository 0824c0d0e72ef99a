"""Asks, with shapes alone, which implementation a call takes and why."""

from typing import Any, Literal

import jax
import jax.numpy as jnp

from jfla import pallas
from jfla._validate import validate

Op = Literal["kda", "gdn"]
Form = Literal["chunk", "recurrent"]


def shapes(op: Op, batch: int, time: int, heads: int, dim: int, dtype: Any) -> dict[str, jax.ShapeDtypeStruct]:
    """The five inputs with K = V = dim and HV = H; gate and beta in float32."""
    tokens = (batch, time, heads)
    wide = {"q": dtype, "k": dtype, "v": dtype, "g": jnp.float32}
    structs = {name: jax.ShapeDtypeStruct((*tokens, dim), dtype) for name, dtype in wide.items()}
    if op == "gdn":
        structs["g"] = jax.ShapeDtypeStruct(tokens, jnp.float32)
    return structs | {"beta": jax.ShapeDtypeStruct(tokens, jnp.float32)}


def reason(op: Op, form: Form, arrays: dict[str, jax.ShapeDtypeStruct]) -> str | None:
    """Why "pallas" cannot take the call, or None when it does; what the op itself asks before it chooses."""
    defaults = {
        "gate": None, "beta_max": None, "qk_norm": False, "scale": None, "initial_state": None,
        "return_final_state": True, "segment_ids": None, "num_segments": None, "implementation": None,
    }  # fmt: skip
    return pallas.unsupported(form, *validate(op, **arrays, **defaults))
