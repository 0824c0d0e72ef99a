"""Draws the inputs of a case: random, never zeros, and the same arrays for every implementation."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jfla.bench.shapes import Case, Gate, Packing
from jfla.packing import segment_ids_from_cu_seqlens

Arrays = dict[str, Array]
MAIN = ("q", "k", "v", "g", "beta")  # what every op takes, in this order

SLOW = 1e-3  # what the decay of the slow channel of "mixed" is multiplied by


def cu_seqlens(packing: Packing, time: int, segments: int) -> Int[np.ndarray, " S_plus_1"]:
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
        inner = np.sort(np.random.default_rng(0).choice(np.arange(1, time), segments - 1, replace=False))
    else:
        inner = time // 2 + np.arange(segments - 1) * (time - time // 2) // (segments - 1)
    return np.concatenate([[0], inner, [time]]).astype(np.int32)


def case_of(case: Case) -> Case:
    """The case whose inputs a case has: those of its forward, unless it decodes."""
    return case if case.timed == "decode" else dataclasses.replace(case, timed="forward")


def draw(case: Case, seed: int) -> Arrays:
    """Unit q and k, normal v and cotangent `do` in bfloat16; log decay `g` and `beta` in (0, 1) in float32.

    Decode has an `initial_state` and no cotangent, packed shapes have `segment_ids` and `cu_seqlens`.
    """
    arrays = _draw(case_of(case), seed)
    shape = case.shape
    if shape.packing is not None:
        cumulative = jnp.asarray(cu_seqlens(shape.packing, shape.time, shape.segments))
        arrays |= {"cu_seqlens": cumulative, "segment_ids": segment_ids_from_cu_seqlens(cumulative, shape.time)}
    return jax.block_until_ready(arrays)


@functools.partial(jax.jit, static_argnums=0)
def _draw(case: Case, seed: int) -> Arrays:
    shape = case.shape
    keys = iter(jax.random.split(jax.random.key(seed, impl="rbg"), 7))  # compiles in a third of the time
    normal = lambda *rest: jax.random.normal(next(keys), (shape.batch, shape.time, *rest))
    unit = lambda x: (x / jnp.linalg.norm(x, axis=-1, keepdims=True)).astype(jnp.bfloat16)
    heads, value_heads, dim = shape.heads, shape.value_heads, shape.dim
    arrays = {"q": unit(normal(heads, dim)), "k": unit(normal(heads, dim))}
    arrays["v"] = normal(value_heads, dim).astype(jnp.bfloat16)
    arrays["g"] = decay(normal(value_heads, dim) if case.op == "kda" else normal(value_heads), case.gate)
    arrays["beta"] = jax.nn.sigmoid(normal(value_heads))
    if case.timed != "decode":
        arrays["do"] = normal(value_heads, dim).astype(jnp.bfloat16)
    if case.timed == "decode":
        arrays["initial_state"] = jax.random.normal(next(keys), (shape.batch, value_heads, dim, dim))
    return arrays


def decay(x: Array, gate: Gate) -> Array:
    """Log decay of every token: clip(logsigmoid(x), -5, 0); "weak": the same / 16; "mixed": strong, but the first
    channel of every head (GDN, which has none: the first head) is 1000 times as slow."""
    g = jnp.clip(jax.nn.log_sigmoid(x), -5, 0)
    if gate == "weak":
        return g / 16
    return g.at[..., 0].multiply(SLOW) if gate == "mixed" else g


def size(arrays: Arrays) -> int:
    """Bytes of all arrays."""
    return sum(x.nbytes for x in arrays.values())
