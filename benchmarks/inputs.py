"""Draws the inputs of a case: random, never zeros, and the same arrays for every implementation."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from benchmarks.gates import decay, initial_gate
from benchmarks.shapes import Case, Packing
from jfla import SoftplusGate, segment_ids_from_cu_seqlens

Arrays = dict[str, Array]
MAIN = ("q", "k", "v", "g", "beta")  # what every op takes, in this order
GATE_PARAMETERS = ("a_log", "dt_bias")  # of a model's call


def cu_seqlens(
    packing: Packing, time: int, segments: int
) -> Int[np.ndarray, " S_plus_1"]:
    """Cumulative lengths of the packed sequences, each of at least one token, together T.

    - uniform: all of T / S tokens, up to rounding.
    - random: S - 1 different cuts, uniform in 1 .. T - 1, from a fixed seed.
    - skewed: the first takes half of T, the others share the rest alike.

    >>> print(cu_seqlens("uniform", 10, 4), cu_seqlens("skewed", 12, 4))
    [ 0  2  5  7 10] [ 0  6  8 10 12]
    """
    if packing == "uniform":
        inner = np.arange(1, segments) * time // segments
    elif packing == "random":
        random = np.random.default_rng(0)
        inner = np.sort(random.choice(np.arange(1, time), segments - 1, replace=False))
    else:
        first = time // 2
        others = segments - 1
        inner = first + np.arange(others) * (time - first) // others
    return np.concatenate([[0], inner, [time]]).astype(np.int32)


def case_of(case: Case) -> Case:
    """The case whose inputs a case has: those of its forward, unless it decodes."""
    return (
        case if case.timed == "decode" else dataclasses.replace(case, timed="forward")
    )


def draw(case: Case, seed: int) -> Arrays:
    """Unit q and k, normal v and cotangent `do` in bfloat16; log decay `g` and `beta` in float32.

    A model's call has normal q, k and `g` in bfloat16, and `GATE_PARAMETERS`. Decode has an `initial_state` and no
    cotangent, packed shapes have `segment_ids` and `cu_seqlens`.
    """
    arrays = _draw(case_of(case), seed)
    shape = case.shape
    if shape.packing is not None:
        cumulative = jnp.asarray(cu_seqlens(shape.packing, shape.time, shape.segments))
        arrays["cu_seqlens"] = cumulative
        arrays["segment_ids"] = segment_ids_from_cu_seqlens(cumulative, shape.time)
    return jax.block_until_ready(arrays)


def call_options(arrays: Arrays) -> dict[str, Any]:
    """What an op is told of a model's call beside `MAIN`: a gate with these parameters, and norms."""
    if not arrays.keys() >= set(GATE_PARAMETERS):
        return {}
    gate = SoftplusGate(**{name: arrays[name] for name in GATE_PARAMETERS})
    return {"gate": gate, "qk_norm": True}


def differentiated(arrays: Arrays) -> Arrays:
    """The arrays whose gradients a backward has."""
    return {name: arrays[name] for name in (*MAIN, *GATE_PARAMETERS) if name in arrays}


def described(case: Case) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and dtypes of what `draw` gives, but for the arrays of packing; nothing is drawn."""
    return jax.eval_shape(functools.partial(_draw, case_of(case)), 0)


@functools.partial(jax.jit, static_argnums=0)
def _draw(case: Case, seed: int) -> Arrays:
    shape = case.shape
    # The generator "rbg" compiles in a third of the default one's time.
    keys = iter(jax.random.split(jax.random.key(seed, impl="rbg"), 7))

    def normal(*rest: int) -> Array:
        return jax.random.normal(next(keys), (shape.batch, shape.time, *rest))

    def of_tokens(x: Array) -> Array:
        """q or k, unit where the op does not normalise."""
        if not case.is_models_call:
            x = x / jnp.linalg.norm(x, axis=-1, keepdims=True)
        return x.astype(jnp.bfloat16)

    dim = shape.dim
    value_heads = shape.value_heads
    gate_shape = (value_heads, dim) if case.op == "kda" else (value_heads,)
    arrays = {}
    arrays["q"] = of_tokens(normal(shape.heads, dim))
    arrays["k"] = of_tokens(normal(shape.heads, dim))
    arrays["v"] = normal(value_heads, dim).astype(jnp.bfloat16)
    gate_input = normal(*gate_shape)
    if case.is_models_call:
        arrays["g"] = gate_input.astype(jnp.bfloat16)
        arrays |= vars(initial_gate(gate_shape))
    else:
        arrays["g"] = decay(gate_input, case.gate, case.op)
    arrays["beta"] = jax.nn.sigmoid(normal(value_heads))
    if case.timed != "decode":
        arrays["do"] = normal(value_heads, dim).astype(jnp.bfloat16)
    else:
        state_shape = (shape.batch, value_heads, dim, dim)
        arrays["initial_state"] = jax.random.normal(next(keys), state_shape)
    return arrays


def size(arrays: Arrays) -> int:
    """Bytes of all arrays."""
    return sum(x.nbytes for x in arrays.values())
