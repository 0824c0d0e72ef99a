"""Decoding by a kernel: `Inputs` of a few tokens and a state -> `DeltaRuleOutput`, by one kernel.

`kernel.py` is the kernel and its launch, `spec.py` what a call is made of, and `layouts.py` how
arrays lie in its registers.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from jfla._inputs.pooled import on_pool
from jfla.by_platform import by_platform
from jfla.pallas.common.decode.kernel import launch_decode
from jfla.pallas.context import interpreted
from jfla.pallas.dims import dims_of
from jfla.pallas.heuristics import DECODE_TOKENS, HOPPER_SMS, decode_v_block
from jfla.pallas.machine import Machine, tracing_for
from jfla.pallas.mgpu.in_place import write_in_place
from jfla.pallas.mgpu.smem import F32
from jfla.pallas.mgpu.types import Gmem
from jfla.parallel import dims
from jfla.parallel.sharding import compiler_partitioned
from jfla.parallel.split import split_by
from jfla.parallel.varying import vary_with
from jfla.types import DeltaRuleOutput, Inputs, Options

__all__ = ["DecodePlan", "decode"]

_PER_TOKEN = ("q", "k", "v", "g", "beta", "segment_ids")
Definition = Callable[[Inputs, Options], DeltaRuleOutput]


@dataclasses.dataclass(frozen=True)
class DecodePlan:
    """How a call is carried out. `v_block` is how many columns of a state one CTA holds: 16, 32 or 64.

    Where the call is split over devices, a part of it finds its own with `num_sms`.

    `by_platform` lowers the kernel for CUDA and `definition` for everything else. `interpret` is context, so it has to
    be part of the key of jit's cache.
    """

    v_block: int
    interpret: bool = False
    by_platform: bool = False
    num_sms: int = HOPPER_SMS
    machine: Machine = "hopper"


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2, 3))
def _decode(
    inputs: Inputs,
    options: Options,
    definition: Definition,
    plan: DecodePlan,
) -> DeltaRuleOutput:
    """The recurrent op by the kernel; its derivatives, in any mode, are those of `definition`."""

    whole = dims_of(inputs)

    def launch(inputs: Inputs, options: Options) -> DeltaRuleOutput:
        @split_by((dims.recurrent_inputs_of(inputs),), _output_dims(inputs, options))
        def split(inputs: Inputs) -> DeltaRuleOutput:
            v_block = plan.v_block
            part = dims_of(inputs)
            if part != whole:
                v_block = decode_v_block(part, plan.num_sms)
            with tracing_for(plan.machine):
                return _launches(inputs, options, v_block)

        outputs = jax.custom_batching.sequential_vmap(split)(inputs)
        return vary_with(outputs, inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta)

    def kernel(inputs: Inputs) -> DeltaRuleOutput:
        if inputs.state_slots is None or _takes_pool(inputs, options):
            return launch(inputs, options)
        return on_pool(launch, inputs, options)

    def portable(inputs: Inputs) -> DeltaRuleOutput:
        return definition(inputs, options)

    with interpreted(plan.interpret), jax.named_scope("jfla_decode"):
        if not plan.by_platform:
            return kernel(inputs)
        return by_platform(inputs, cuda=kernel, default=portable)


@_decode.defjvp
def _decode_jvp(
    options: Options,
    definition: Definition,
    plan: DecodePlan,
    primals: tuple[Inputs],
    tangents: tuple[Inputs],
) -> tuple[DeltaRuleOutput, DeltaRuleOutput]:
    del plan

    def definition_of(inputs: Inputs) -> DeltaRuleOutput:
        return definition(inputs, options)

    return jax.jvp(definition_of, primals, tangents)


decode = compiler_partitioned(
    jax.jit(_decode, static_argnames=("options", "definition", "plan"))
)


def _output_dims(inputs: Inputs, options: Options) -> Any:
    names = dims.recurrent_inputs_of(inputs)
    states = names.initial_state
    if options.return_states:
        states = names.v.replace(" V", " K V")
    return dims.OUTPUT._replace(output=names.v, final_state=states)


def _takes_pool(inputs: Inputs, options: Options) -> bool:
    """Whether the kernel itself reads and writes the slots of a pool: in place, or not at all."""
    if inputs.q.shape[1] > DECODE_TOKENS:
        return False
    writes = options.return_final_state and not options.return_states
    return not writes or _in_place(inputs, options)


def _launches(inputs: Inputs, options: Options, v_block: int) -> DeltaRuleOutput:
    """One launch for 8 tokens: longer calls hand a float32 state from one to the next."""
    time = inputs.q.shape[1]
    if time <= DECODE_TOKENS:
        return _launch_decode(inputs, options, v_block)
    per_launch = dataclasses.replace(
        options, return_final_state=True, state_dtype="float32"
    )

    def some(state: Array, tokens: Inputs) -> tuple[Array, DeltaRuleOutput]:
        output, states = _launch_decode(
            tokens._replace(initial_state=state), per_launch, v_block
        )
        assert states is not None  # as asked for
        if options.return_states:
            return states[:, -1], DeltaRuleOutput(output, states)
        return states, DeltaRuleOutput(output, None)

    def of_tokens(first: Array | int, number: int) -> Inputs:
        def part(x: Array) -> Array:
            return lax.dynamic_slice_in_dim(x, first, number, axis=1)

        per_token = {name: getattr(inputs, name) for name in _PER_TOKEN}
        return inputs._replace(initial_state=None, **jax.tree.map(part, per_token))

    def step(state: Array, i: Array) -> tuple[Array, DeltaRuleOutput]:
        return some(state, of_tokens(i * DECODE_TOKENS, DECODE_TOKENS))

    state = _float32_state(inputs)
    num_launches = time // DECODE_TOKENS
    state, outputs = lax.scan(step, state, jnp.arange(num_launches))
    outputs = [jax.tree.map(_join_time, outputs)]
    if time % DECODE_TOKENS:
        state, last = some(
            state, of_tokens(num_launches * DECODE_TOKENS, time % DECODE_TOKENS)
        )
        outputs.append(last)
    output, states = jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), *outputs)
    if not options.return_final_state:
        return DeltaRuleOutput(output, None)
    return DeltaRuleOutput(
        output, options.as_final_state(state if states is None else states)
    )


def _float32_state(inputs: Inputs) -> Array:
    if inputs.initial_state is not None:
        return inputs.initial_state.astype(F32)
    batch, _, heads, value_dim = inputs.v.shape
    return jnp.zeros((batch, heads, inputs.q.shape[-1], value_dim), F32)


def _join_time(x: Array) -> Array:
    """[launches, B, T, ..] to [B, launches * T, ..]."""
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])


def _launch_decode(inputs: Inputs, options: Options, v_block: int) -> DeltaRuleOutput:
    """Launches the kernel, which overwrites a donated initial state with the final one."""
    state = inputs.initial_state
    if state is None or not _in_place(inputs, options):
        return DeltaRuleOutput(
            *launch_decode(inputs, options, v_block, state, in_place=False)
        )

    def overwrite(refs: tuple[Gmem, Gmem], inputs: Inputs) -> None:
        state_gmem, output_gmem = refs
        output_gmem[...] = launch_decode(
            inputs, options, v_block, state_gmem, in_place=True
        ).output

    # XLA copies the state before it is overwritten, unless the caller donated it.
    unwritten = jnp.zeros(inputs.v.shape, inputs.v.dtype)
    written = (state, unwritten)
    state, output = write_in_place(
        overwrite, written, inputs._replace(initial_state=None)
    )
    return DeltaRuleOutput(output, state)


def _in_place(inputs: Inputs, options: Options) -> bool:
    """Whether the kernel gets the state as a reference: if the final state alone is wanted, in the same dtype.

    Where shard_map tracks which values vary over its mesh, no kernel can be handed a reference.
    """
    state = inputs.initial_state
    if state is None or not options.return_final_state or options.return_states:
        return False
    if state.dtype != (options.state_dtype or F32):
        return False
    return not jax.typeof(state).manual_axis_type.varying
