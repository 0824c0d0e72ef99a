"""Chunked calls whose K or V lies between the sizes of the kernels: padded with channels of 0; results without them.

A channel in which q and k are 0 writes nothing and reads nothing, whatever its decay: its rows of the state stay 0. A
column in which v is 0 has an output of 0. So nothing of the call changes, and no cotangent of what is added remains.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jfla.pallas.heuristics import SUPPORTED_DIMS
from jfla.types import DeltaRuleOutput, Inputs


def kernel_size(size: int) -> int | None:
    """The smallest K or V of the kernels that is at least this one, or None."""
    return next((dim for dim in SUPPORTED_DIMS if dim >= size), None)


def padded_sizes(inputs: Inputs) -> dict[str, tuple[int, int]]:
    """By "K" and "V": the size and what it is padded to, for those that are padded."""
    sizes = {"K": inputs.q.shape[-1], "V": inputs.v.shape[-1]}
    pairs = {
        letter: (size, kernel_size(size) or size) for letter, size in sizes.items()
    }
    return {letter: pair for letter, pair in pairs.items() if pair[0] != pair[1]}


def pad_channels(inputs: Inputs, scalar_gate: bool) -> Inputs:
    """The call with K and V of the kernels."""
    sizes = padded_sizes(inputs)
    k = _missing(sizes, "K")
    v = _missing(sizes, "V")
    if not k and not v:
        return inputs
    gate = inputs.gate
    if gate is not None and gate.dt_bias is not None and not scalar_gate:
        gate = dataclasses.replace(gate, dt_bias=_pad(gate.dt_bias, k))
    state = inputs.initial_state
    return inputs._replace(
        q=_pad(inputs.q, k),
        k=_pad(inputs.k, k),
        v=_pad(inputs.v, v),
        g=inputs.g if scalar_gate else _pad(inputs.g, k),
        gate=gate,
        initial_state=None if state is None else _pad(state, k, v),
    )


def without_padded_channels(out: DeltaRuleOutput, inputs: Inputs) -> DeltaRuleOutput:
    """The results in the sizes of the call that was padded."""
    if not padded_sizes(inputs):
        return out
    key_dim = inputs.q.shape[-1]
    value_dim = inputs.v.shape[-1]
    state = out.final_state
    return DeltaRuleOutput(
        out.output[..., :value_dim],
        None if state is None else state[..., :key_dim, :value_dim],
    )


def _missing(sizes: dict[str, tuple[int, int]], letter: str) -> int:
    size, target = sizes.get(letter, (0, 0))
    return target - size


def _pad(x: jax.Array, *after: int) -> jax.Array:
    """Zeros behind the last axes, so many for each."""
    lead = x.ndim - len(after)
    return jnp.pad(x, [(0, 0)] * lead + [(0, n) for n in after])
