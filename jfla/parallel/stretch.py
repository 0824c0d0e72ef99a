"""One device's stretch of a sequence that lies over several: which state enters it, and what it hands on.

Inside shard_map every device has the tokens of a stretch of time, in the order of a mesh axis. States are
[B, S, HV, K, V], S = 1 where segments have no states of their own. Of every row at most one state crosses the border
between two devices, that of the sequence to which the tokens on both sides belong. With it goes, over a stretch,

    X_out = R X_in + C

(docs/math.md, equation 9). If another sequence is open at the stretch's end, R is 0. What happens to all other states
is the device's own matter. A backend finds R and C with the a_qk and a_inv that its output needs anyway, and
then runs from the states that `Stretch.enter` gives. Its backward is the same in reverse: `Stretch.leave`.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jfla.packing import read_slot, write_slot
from jfla.parallel.hand_over import handed_over
from jfla.types import AxisName, Inputs, Options

States = Float[Array, "B S HV K V"]
StateMap = Float[Array, "B HV K K"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stretch:
    """Where the state that crosses borders lies among this device's states."""

    first: Int[Array, " B"]  # slot of the first token's sequence
    last: Int[Array, " B"]  # slot of the sequence that is open at the end
    # whether slot `first` begins from what the devices before leave
    enters: Bool[Array, " B"]
    # the final states that are this device's, each on one device
    owned: Bool[Array, "B S"]
    axis: AxisName = dataclasses.field(metadata={"static": True})

    def enter(
        self,
        initial: States,
        state_map: Callable[[States], tuple[StateMap, Float[Array, "B HV K V"]]],
    ) -> "Entered":
        """The states that this device begins from.

        `state_map(states)` is R and C of the stretch: what slot `first` becomes in slot `last`, and what is in slot
        `last` after the stretch from these states.
        """
        r, c = state_map(self.without_entering(initial))
        r = jnp.where(_per_row(self.enters & (self.first == self.last), r), r, 0)
        before = handed_over(r, c, self.axis)
        with_it = write_slot(initial, self.first, before)
        return Entered(
            jnp.where(_per_row(self.enters, initial), with_it, initial), r, self
        )

    def leave(
        self, d_final: States, r: StateMap, at_start: Callable[[States], States]
    ) -> States:
        """Cotangents of the states after this stretch, those that the devices behind send included.

        `at_start(d_final)` is the cotangent of the states before the stretch.
        """
        d = read_slot(at_start(d_final), self.first)
        d = jnp.where(_per_row(self.enters, d), d, 0)
        after = handed_over(r.mT, d, self.axis, reverse=True)
        return write_slot(d_final, self.last, read_slot(d_final, self.last) + after)

    def without_entering(self, states: States) -> States:
        """0 in the place of the state that devices before hand over; the cotangent of initial states likewise."""
        without = write_slot(states, self.first, jnp.zeros_like(states[:, 0]))
        return jnp.where(_per_row(self.enters, states), without, states)

    def own(self, states: States) -> States:
        """The final states that are this device's, 0 for the others: the sum over devices has every state once."""
        return jnp.where(self.owned[:, :, None, None, None], states, 0)


class Entered(NamedTuple):
    """What a device knows once the maps went over the axis; kept for the backward."""

    states: States  # that its tokens begin from
    r: StateMap
    stretch: Stretch


def stretch_of(inputs: Inputs, options: Options) -> Stretch | None:
    """This device's stretch of the call; None where time is not split over devices."""
    axis = options.sequence_axis
    if axis is None:
        return None
    index = lax.axis_index(axis)
    batch = inputs.q.shape[0]
    if inputs.segment_ids is None:
        slot = jnp.zeros(batch, jnp.int32)
        owned = jnp.full((batch, 1), index == lax.axis_size(axis) - 1)
        return Stretch(slot, slot, jnp.full(batch, index > 0), owned, axis)
    return _packed(inputs.segment_ids, options.num_states, axis)


def _packed(
    segment_ids: Int[Array, "B T"], num_segments: int | None, axis: AxisName
) -> Stretch:
    """Ids do not decrease over the devices, and padding comes last: the ids at a stretch's ends say it all."""
    index = lax.axis_index(axis)
    first = segment_ids[:, 0]
    last = jnp.max(segment_ids, axis=1)
    ends = lax.all_gather(jnp.stack([first, last]), axis)  # [devices, 2, B]
    last_before = ends[jnp.maximum(index - 1, 0), 1]
    # Through a device that has only padding the state passes unchanged.
    enters = (index > 0) & ((first == last_before) | (first == 0))
    if num_segments is None:
        slot = jnp.zeros_like(first)
        # Where another sequence is open at the end, R is 0 by the decay of -inf at its start.
        return Stretch(slot, slot, enters, jnp.zeros((first.shape[0], 1), bool), axis)
    # A final state is that of the last device whose tokens begin at or before the segment.
    segments = jnp.arange(1, num_segments + 1)[None]

    def reached(device: Int[Array, ""]) -> Bool[Array, "B S"]:
        begin = ends[device, 0][:, None]
        return (begin > 0) & (begin <= segments)

    size = lax.axis_size(axis)
    here = (index == 0) | reached(index)
    owned = here & ~((index < size - 1) & reached(jnp.minimum(index + 1, size - 1)))
    return Stretch(
        jnp.maximum(first - 1, 0), jnp.maximum(last - 1, 0), enters, owned, axis
    )


def _per_row(mask: Bool[Array, " B"], x: Array) -> Bool[Array, "B *ones"]:
    return mask.reshape(mask.shape + (1,) * (x.ndim - 1))
