"""A chunked op on a sequence that lies over several devices: what every device must have, and what all get back.

Within, a device's call is that on its own stretch of time, and `jfla.parallel.stretch` hands its state on.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jfla.parallel.varying import vary_over
from jfla.types import AxisName, DeltaRuleOutput, Inputs, Options

Run = Callable[..., DeltaRuleOutput]  # of Inputs, Options and other static arguments


def across_devices(run: Run) -> Run:
    """`run` on stretches, where `options.sequence_axis` says that there are several.

    The initial state is read on the first device: those of segments go from there to all, because a segment may begin
    anywhere. Of the final states every device has those that are its own; here all get all.
    """

    @functools.wraps(run)
    def on_stretch(inputs: Inputs, options: Options, *static: Any) -> DeltaRuleOutput:
        axis = options.sequence_axis
        if axis is None:
            return run(inputs, options, *static)
        if inputs.initial_state is not None and options.per_segment_state:
            inputs = inputs._replace(
                initial_state=from_first(inputs.initial_state, axis)
            )
        names = (axis,) if isinstance(axis, str) else axis
        # Counted as different on every device of the axis, if they are not.
        inputs = vary_over(inputs, names)
        output, final = run(inputs, options, *static)
        return DeltaRuleOutput(output, None if final is None else lax.psum(final, axis))

    return on_stretch


def from_first(x: jax.Array, axis: AxisName) -> jax.Array:
    """x of the first device, on all."""
    return lax.psum(jnp.where(lax.axis_index(axis) == 0, x, 0), axis)
