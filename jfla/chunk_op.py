"""The chunked ops by kernels: the derivative rule around a backend's forward and backward, and which one is lowered.

A `Plan` is static. Where a call is traced, only its lowering knows the platform: `by_platform` then lowers the kernels
for CUDA and "xla" for everything else. The residuals are the kernels': "xla" leaves zeros in their place and makes its
own again in the backward.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jfla.linear_rule import differentiable, opaque_forward
from jfla.pallas.arrays import gate_cotangents
from jfla.pallas.context import interpreted
from jfla.pallas.heuristics import Dims, Schedule, dims_of, schedule_of_part
from jfla.pallas.sm90 import chunk as sm90
from jfla.parallel import dims
from jfla.parallel.sharding import compiler_partitioned
from jfla.parallel.split import split_by
from jfla.parallel.varying import vary_with
from jfla.stages import IntraChunk, Residuals
from jfla.types import DeltaRuleOutput, Inputs, Options
from jfla.xla import op as xla


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a call is carried out. `interpret` is part of the key under which the compiled function is kept."""

    schedule: Schedule
    interpret: bool = False
    by_platform: bool = False

    def schedule_for(self, inputs: Inputs, options: Options, whole: Dims) -> Schedule:
        """Of the whole call, or of the part of it that a device has."""
        part = dims_of(inputs)
        return self.schedule if part == whole else schedule_of_part(options.op, part, self.schedule)


def _output_dims(options: Options) -> Any:
    return dims.OUTPUT if options.states_every is None else dims.STATES_OUTPUT


def _forward(
    inputs: Inputs,
    options: Options,
    plan: Plan,
    for_backward: bool,
) -> tuple[DeltaRuleOutput, Residuals]:
    def kernels(inputs: Inputs) -> tuple[DeltaRuleOutput, Residuals]:
        @split_by((dims.INPUTS,), (_output_dims(options), dims.RESIDUALS))
        def split(inputs: Inputs) -> tuple[DeltaRuleOutput, Residuals]:
            schedule = plan.schedule_for(inputs, options, whole)
            return sm90.forward(inputs, options, schedule, for_backward=for_backward)

        whole = dims_of(inputs)
        return vary_with(split(inputs), *inputs[:5])

    if not plan.by_platform:
        return kernels(inputs)

    def portable(inputs: Inputs) -> tuple[DeltaRuleOutput, Residuals]:
        output, _ = xla.forward(inputs, options)
        _, residuals = jax.eval_shape(kernels, inputs)
        unused = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), residuals)
        return output, vary_with(unused, *inputs[:5])

    return lax.platform_dependent(inputs, cuda=kernels, default=portable)


def _backward(
    inputs: Inputs,
    options: Options,
    plan: Plan,
    residuals: Residuals,
    d_output: DeltaRuleOutput,
) -> Inputs:
    def kernels(inputs: Inputs, residuals: Residuals, d_output: DeltaRuleOutput) -> Inputs:
        @split_by((dims.INPUTS, dims.RESIDUALS, _output_dims(options)), dims.INPUTS)
        def split(inputs: Inputs, residuals: Residuals, d_output: DeltaRuleOutput) -> Inputs:
            schedule = plan.schedule_for(inputs, options, whole)
            return sm90.backward(inputs, options, schedule, residuals, *d_output)

        whole = dims_of(inputs)
        # Outside, so that the partitioner sums the gradients of the gate's parameters over rows on other devices.
        return gate_cotangents(inputs, options, split(inputs, residuals, d_output))

    if not plan.by_platform:
        return kernels(inputs, residuals, d_output)

    def portable(inputs: Inputs, residuals: Residuals, d_output: DeltaRuleOutput) -> Inputs:
        _, pairs = xla.forward(inputs, options)
        return xla.backward_of(inputs, options, pairs, d_output)

    return lax.platform_dependent(inputs, residuals, d_output, cuda=kernels, default=portable)


def _name(residuals: Residuals) -> Residuals:
    """For `jax.checkpoint_policies.save_only_these_names`."""
    a_qk = checkpoint_name(residuals.intra.a_qk, "jfla_a_qk")
    a_inv = checkpoint_name(residuals.intra.a_inv, "jfla_inverse")
    checkpoints = residuals.state_checkpoints
    if checkpoints is not None:
        checkpoints = checkpoint_name(checkpoints, "jfla_states")
    return Residuals(IntraChunk(a_qk, a_inv), checkpoints)


@dataclasses.dataclass(frozen=True)
class _Rule:
    """The derivative rule of the kernels: `jfla.linear_rule.Rule`. Forward mode is that of "xla"."""

    options: Options
    plan: Plan

    def primal(self, inputs: Inputs) -> DeltaRuleOutput:
        with interpreted(self.plan.interpret):
            return _forward(inputs, self.options, self.plan, for_backward=False)[0]

    def forward(self, inputs: Inputs) -> tuple[DeltaRuleOutput, Residuals]:
        output, residuals = opaque_forward(_Rule._kernels, self, inputs)
        return output, _name(residuals)

    def _kernels(self, inputs: Inputs) -> tuple[DeltaRuleOutput, Residuals]:
        with interpreted(self.plan.interpret):
            return _forward(inputs, self.options, self.plan, for_backward=True)

    def backward(self, inputs: Inputs, residuals: Residuals, d_output: DeltaRuleOutput) -> Inputs:
        # The backward may be traced outside the contexts in which the forward was traced.
        with interpreted(self.plan.interpret), jax.default_matmul_precision("highest"):
            return _backward(inputs, self.options, self.plan, residuals, d_output)

    def plain(self, inputs: Inputs) -> DeltaRuleOutput:
        return xla.plain(inputs, self.options)


def _chunk(inputs: Inputs, options: Options, plan: Plan) -> DeltaRuleOutput:
    return differentiable(_Rule(options, plan), inputs)


run = compiler_partitioned(jax.jit(_chunk, static_argnames=("options", "plan")))
