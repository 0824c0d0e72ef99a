"""Powers of two that bring cotangents into float16's range, from the caller's to those that the kernels read; and back.

A loss may be scaled, and be a mean: float16 then overflows in a sum over tokens, or has no digits. Gradients are linear
in the cotangents of one sequence, and a power of two changes no digit. Every sequence has its own, so that none depends
on another; but packed segments without states share one over several devices.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jfla._inputs.canonicalize import without_padding
from jfla.packing import starts
from jfla.pallas.mgpu.smem import F32
from jfla.parallel.varying import vary_with
from jfla.types import Inputs, Options, State, Value

# The power of two below which the largest cotangent of a sequence is brought. A write strength of 0 stands as 2^-12, by
# which dv is that much smaller than other cotangents: this leaves it digits.
EXPONENT = 4
# Kernels keep products of cotangents with values and states in float16, too: weights of pairs, dq and dk. Where one of
# these is greater than this power of two, the cotangents are smaller by as much.
VALUE_EXPONENT = 6
_SMALLEST = -100  # exponent of a cotangent: the factor, too, is a float32


class CotangentScale(NamedTuple):
    """Factors of the cotangents that the kernels read."""

    of_tokens: Float[Array, "B T"]
    of_states: Float[Array, " B"] | Float[Array, "B S"]

    def scaled(
        self, d_output: Value, d_final: State | None
    ) -> tuple[Value, State | None]:
        """Cotangents of the results, in float32."""
        if d_final is not None:
            d_final = _times(d_final, self.of_states)
        return _times(d_output.astype(F32), self.of_tokens), d_final

    def unscaled(self, d: Inputs) -> Inputs:
        """Cotangents of the arguments, of which none is the gate's."""
        state = d.initial_state
        if state is not None:
            state = _times(state, 1 / self.of_states)
        of_tokens = d._replace(initial_state=None)
        of_tokens = jax.tree.map(lambda x: _times(x, 1 / self.of_tokens), of_tokens)
        return of_tokens._replace(initial_state=state)


def cotangent_scale(
    inputs: Inputs, options: Options, d_output: Value, d_final: State | None
) -> CotangentScale:
    """Of every row, or of every segment of packed rows; the same on all devices over which time is split."""
    slot, num_slots = _slots(inputs, options)
    states = slice(int(options.per_segment_state), None)  # slot 0 is that of padding

    def largest(tokens: Value, of_states: State | None) -> Float[Array, "B slots"]:
        of_tokens = _largest(without_padding(tokens, inputs.segment_ids), axes=2)
        batch = slot.shape[0]
        row = jnp.arange(batch)[:, None]
        found = vary_with(jnp.zeros((batch, num_slots), F32), of_tokens)
        found = found.at[row, slot].max(of_tokens)
        if of_states is not None:
            # With one slot, the states along time are all of the row's.
            axes = 2 if options.per_segment_state else 1
            found = found.at[:, states].max(
                _largest(of_states, axes).reshape(batch, -1)
            )
        if options.sequence_axis is not None:
            found = lax.pmax(found, options.sequence_axis)
        return found

    of_values = _exponent(largest(inputs.v, inputs.initial_state))
    exponent = EXPONENT - jnp.maximum(of_values - VALUE_EXPONENT, 0)
    own = _exponent(largest(d_output, d_final))
    scale = jnp.ldexp(jnp.float32(1.0), exponent - jnp.maximum(own, _SMALLEST))
    of_states = scale[:, states] if options.per_segment_state else scale[:, 0]
    return CotangentScale(jnp.take_along_axis(scale, slot, axis=1), of_states)


def _slots(inputs: Inputs, options: Options) -> tuple[Int[Array, "B T"], int]:
    """The slot of every token's sequence, and how many there are.

    Segments without states of their own have no static number; their ids may be any. In order they are no more than
    tokens. Over several devices, each of which knows its own, a row has one slot.
    """
    ids = inputs.segment_ids
    if ids is not None and options.per_segment_state:
        assert options.num_segments is not None
        return ids, 1 + options.num_segments
    if ids is None or options.sequence_axis is not None:
        return jnp.zeros(inputs.v.shape[:2], jnp.int32), 1
    return jnp.cumsum(starts(ids), axis=1), ids.shape[1]


def _largest(x: Float[Array, "*rest"], axes: int) -> Float[Array, "..."]:
    """The largest absolute value over all axes but the first ones."""
    return jnp.max(jnp.abs(x.astype(F32)), axis=tuple(range(axes, x.ndim)))


def _exponent(largest: Float[Array, "*x"]) -> Int[Array, "*x"]:
    """Of the power of two that is above these, and not above twice as much; any where they are 0."""
    usable = jnp.isfinite(largest) & (largest > 0)
    _, exponent = jnp.frexp(jnp.where(usable, largest, 1.0))
    return exponent


def _times(
    x: Float[Array, "*batch"], scale: Float[Array, "*first"]
) -> Float[Array, "*batch"]:
    """x with its first axes multiplied."""
    factor = scale.reshape(*scale.shape, *(1,) * (x.ndim - scale.ndim))
    return (x * factor).astype(x.dtype)
