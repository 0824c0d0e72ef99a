"""A call on slots of a pool of states by a call on rows that have states of their own."""

from collections.abc import Callable

from jfla.pool import named_slots, read_slots, row_tokens, write_slots
from jfla.types import DeltaRuleOutput, Inputs, Options

Run = Callable[[Inputs, Options], DeltaRuleOutput]


def on_pool(run: Run, inputs: Inputs, options: Options) -> DeltaRuleOutput:
    """What `run` gives for the states that the rows name, and the pool with the final ones, if those are asked for.

    With `return_states` nothing is written: the states come back as they are, zeros in idle rows.
    """
    pool = inputs.initial_state
    # What `state_slots` means.
    assert pool is not None
    assert inputs.state_slots is not None
    slots = named_slots(inputs.state_slots, pool.shape[0])
    rows = inputs._replace(
        initial_state=read_slots(pool, slots),
        segment_ids=row_tokens(slots, inputs.segment_ids, inputs.q.shape[1]),
        state_slots=None,
    )
    output, states = run(rows, options)
    if states is None or options.return_states:
        return DeltaRuleOutput(output, states)
    return DeltaRuleOutput(output, write_slots(pool, slots, states))
