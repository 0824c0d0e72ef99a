"""What goes into an op and comes out, with the names of its dimensions in the place of every array.

An array has as many of the names as it has dimensions: a gate's parameter has HV, or HV and K.
"""

from collections.abc import Callable
from typing import Any

from jfla.stages import IntraChunk, Residuals
from jfla.types import DeltaRuleOutput, Inputs, Options


def _named(container: Callable[..., Any], **names: Any) -> Any:
    """The container of names, which its types say are arrays."""
    return container(**names)


INPUTS = _named(
    Inputs,
    q="B T H K",
    k="B T H K",
    v="B T HV V",
    g="B T HV G",
    beta="B T HV",
    gate="HV K",
    initial_state="B HV K V",
    segment_ids="B T",
)
# Rows that name slots of a pool all see it whole: only heads may be split.
POOL_INPUTS = _named(
    Inputs,
    q="rows T H K",
    k="rows T H K",
    v="rows T HV V",
    g="rows T HV G",
    beta="rows T HV",
    gate="HV K",
    initial_state="P HV K V",
    segment_ids="rows T",
    state_slots="rows",
)
OUTPUT = _named(DeltaRuleOutput, output="B T HV V", final_state="B HV K V")
SEVERAL_STATES = "B S HV K V"  # of packed segments, or along time
RESIDUALS = _named(
    Residuals,
    intra=_named(IntraChunk, a_qk="B HV N C C", a_inv="B HV N C C"),
    state_checkpoints="B HV spans V K",
    entered=None,  # inside shard_map, where nothing is split
    split_r=None,
    factors="B HV N rows C",
    token_scalars="B HV N scalars C",
)


def inputs_of(options: Options) -> Any:
    """The names for the inputs of a chunked call."""
    if options.per_segment_state:
        return INPUTS._replace(initial_state=SEVERAL_STATES)
    return INPUTS


def recurrent_inputs_of(inputs: Inputs) -> Any:
    """The names for the inputs of a recurrent call."""
    return INPUTS if inputs.state_slots is None else POOL_INPUTS


def output_of(options: Options) -> Any:
    """The names for the output of a chunked call."""
    if options.per_segment_state or options.states_every is not None:
        return OUTPUT._replace(final_state=SEVERAL_STATES)
    return OUTPUT
