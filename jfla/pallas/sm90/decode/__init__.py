"""Decoding on Hopper: `Inputs` of a few tokens and a state -> `DeltaRuleOutput`, by one kernel.

`kernel.py` is the kernel and its launch, `spec.py` what a call is made of, and `layouts.py` how
arrays lie in its registers.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array

from jfla.pallas.context import interpreted
from jfla.pallas.heuristics import HOPPER_SMS, decode_v_block, dims_of
from jfla.pallas.mgpu.smem import F32
from jfla.pallas.mgpu.types import Gmem
from jfla.pallas.sm90.decode.kernel import launch_decode
from jfla.pallas.sm90.decode.spec import DecodeOutputs
from jfla.parallel import dims
from jfla.parallel.sharding import compiler_partitioned
from jfla.parallel.split import split_by
from jfla.parallel.varying import vary_with
from jfla.types import DeltaRuleOutput, Inputs, Options

__all__ = ["DecodePlan", "decode"]

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


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2, 3))
def _decode(
    inputs: Inputs,
    options: Options,
    definition: Definition,
    plan: DecodePlan,
) -> DeltaRuleOutput:
    """The recurrent op by the kernel; its derivatives, in any mode, are those of `definition`."""

    whole = dims_of(inputs)
    states_dims = "B T HV K V" if options.return_states else "B HV K V"

    @split_by((dims.INPUTS,), DecodeOutputs("B T HV V", states_dims))
    def launch(inputs: Inputs) -> DecodeOutputs:
        v_block = plan.v_block
        part = dims_of(inputs)
        if part != whole:
            v_block = decode_v_block(part.value_dim, part.sequences, plan.num_sms)
        return _launch(inputs, options, v_block)

    def kernel(inputs: Inputs) -> DeltaRuleOutput:
        outputs = jax.custom_batching.sequential_vmap(launch)(inputs)
        return DeltaRuleOutput(
            *vary_with(outputs, inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta)
        )

    def portable(inputs: Inputs) -> DeltaRuleOutput:
        return definition(inputs, options)

    with interpreted(plan.interpret), jax.named_scope("jfla_decode"):
        if not plan.by_platform:
            return kernel(inputs)
        return lax.platform_dependent(inputs, cuda=kernel, default=portable)


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


decode = compiler_partitioned(jax.jit(_decode, static_argnames=("options", "definition", "plan")))


def _launch(inputs: Inputs, options: Options, v_block: int) -> DecodeOutputs:
    """Launches the kernel, which overwrites a donated initial state with the final one."""
    state = inputs.initial_state
    if state is None or not _in_place(state, options):
        return launch_decode(inputs, options, v_block, state, in_place=False)

    def overwrite(refs: tuple[Gmem, Gmem]) -> None:
        state_gmem, output_gmem = refs
        output_gmem[...] = launch_decode(inputs, options, v_block, state_gmem, in_place=True).output

    # XLA copies the state before it is overwritten, unless the caller donated it.
    unwritten = jnp.zeros(inputs.v.shape, inputs.v.dtype)
    state, output = pl.run_state(overwrite)((state, unwritten))
    return DecodeOutputs(output, state)


def _in_place(state: Array, options: Options) -> bool:
    """Whether the kernel gets the state as a reference: if the final state alone is wanted, in the same dtype.

    Where shard_map tracks which values vary over its mesh, no kernel can be handed a reference.
    """
    if not options.return_final_state or options.return_states:
        return False
    if state.dtype != (options.state_dtype or F32):
        return False
    return not jax.typeof(state).manual_axis_type.varying
