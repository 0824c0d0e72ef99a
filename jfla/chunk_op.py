"""The chunked ops by kernels: the derivative rule around a backend's forward and backward, and which one is lowered.

A `Plan` is static. Where a call is traced, only its lowering knows the platform: `by_platform` then lowers the kernels
for CUDA and "xla" for everything else. The residuals are the kernels': "xla" leaves zeros in their place and makes its
own again in the backward.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jfla.by_platform import by_platform
from jfla.linear_rule import differentiable, opaque_forward
from jfla.pallas import chunk as kernels_of_chunk
from jfla.pallas.context import interpreted
from jfla.pallas.dims import Dims, dims_of
from jfla.pallas.gate_cotangents import gate_cotangents
from jfla.pallas.heuristics import Schedule, schedule_of_part
from jfla.parallel import dims
from jfla.parallel.sequence import across_devices
from jfla.parallel.sharding import compiler_partitioned
from jfla.parallel.split import split_by
from jfla.parallel.stretch import stretch_of
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
        part = dims_of(inputs, options)
        return (
            self.schedule
            if part == whole
            else schedule_of_part(options.op, part, self.schedule)
        )


def _forward(
    inputs: Inputs,
    options: Options,
    plan: Plan,
    for_backward: bool,
) -> tuple[DeltaRuleOutput, Residuals | None]:
    """Residuals only `for_backward`: else some are rings, whose dimensions are not those that may be split."""

    def kernels(inputs: Inputs) -> tuple[DeltaRuleOutput, Residuals | None]:
        stretch = stretch_of(inputs, options)
        kept = dims.RESIDUALS if for_backward else None

        @split_by((dims.inputs_of(options),), (dims.output_of(options), kept))
        def split(inputs: Inputs) -> tuple[DeltaRuleOutput, Residuals | None]:
            schedule = plan.schedule_for(inputs, options, whole)
            output, residuals = kernels_of_chunk.forward(
                inputs, options, schedule, for_backward=for_backward, stretch=stretch
            )
            return output, residuals if for_backward else None

        whole = dims_of(inputs, options)
        output, residuals = vary_with(split(inputs), *inputs[:5])
        if stretch is not None and output.final_state is not None:
            final = stretch.own(output.final_state[:, None])[:, 0]
            output = output._replace(final_state=final)
        return output, residuals

    if not plan.by_platform:
        return kernels(inputs)

    def portable(inputs: Inputs) -> tuple[DeltaRuleOutput, Residuals | None]:
        output, own = xla.forward(inputs, options)
        _, residuals = jax.eval_shape(kernels, inputs)
        if residuals is None:
            return output, None
        unused = jax.tree.map(
            lambda x: jnp.zeros(x.shape, x.dtype), residuals._replace(entered=None)
        )
        return output, vary_with(unused._replace(entered=own.entered), *inputs[:5])

    return by_platform(inputs, cuda=kernels, default=portable)


def _backward(
    inputs: Inputs,
    options: Options,
    plan: Plan,
    residuals: Residuals,
    d_output: DeltaRuleOutput,
) -> Inputs:
    @jax.default_matmul_precision("highest")  # of what XLA computes around the kernels
    def kernels(
        inputs: Inputs, residuals: Residuals, d_output: DeltaRuleOutput
    ) -> Inputs:
        named = dims.inputs_of(options)

        @split_by((named, dims.RESIDUALS, dims.output_of(options)), named)
        def split(
            inputs: Inputs, residuals: Residuals, d_output: DeltaRuleOutput
        ) -> Inputs:
            schedule = plan.schedule_for(inputs, options, whole)
            return kernels_of_chunk.backward(
                inputs, options, schedule, residuals, *d_output
            )

        whole = dims_of(inputs, options)
        d = split(inputs, residuals, _own_final(residuals, d_output))
        return gate_cotangents(inputs, options, _own_initial(inputs, residuals, d))

    if not plan.by_platform:
        return kernels(inputs, residuals, d_output)

    def portable(
        inputs: Inputs, residuals: Residuals, d_output: DeltaRuleOutput
    ) -> Inputs:
        own = xla.Residuals(xla.pairs_of(inputs, options), residuals.entered)
        return xla.backward_of(inputs, options, own, d_output)

    return by_platform(inputs, residuals, d_output, cuda=kernels, default=portable)


def _own_final(residuals: Residuals, d_output: DeltaRuleOutput) -> DeltaRuleOutput:
    """With cotangents of those final states that are this device's."""
    entered = residuals.entered
    d_final = d_output.final_state
    if entered is None or d_final is None:
        return d_output
    return d_output._replace(final_state=entered.stretch.own(d_final[:, None])[:, 0])


def _own_initial(inputs: Inputs, residuals: Residuals, d: Inputs) -> Inputs:
    """Without the cotangent of a state that another device handed over."""
    entered = residuals.entered
    if entered is None or d.initial_state is None:
        return d
    if inputs.initial_state is None:
        return d._replace(initial_state=None)
    d_initial = entered.stretch.without_entering(d.initial_state[:, None])
    return d._replace(initial_state=d_initial[:, 0])


def _name(residuals: Residuals) -> Residuals:
    """For `jax.checkpoint_policies.save_only_these_names`."""
    a_qk = checkpoint_name(residuals.intra.a_qk, "jfla_a_qk")
    a_inv = checkpoint_name(residuals.intra.a_inv, "jfla_inverse")
    # Vectors, together a fifth of A_inv at most, have its name: policies that keep it keep all that the kernels read.
    factors, token_scalars = (
        None if x is None else checkpoint_name(x, "jfla_inverse")
        for x in (residuals.factors, residuals.token_scalars)
    )
    checkpoints = residuals.state_checkpoints
    if checkpoints is not None:
        checkpoints = checkpoint_name(checkpoints, "jfla_states")
    entered = residuals.entered
    if entered is not None:
        entered = xla.name_entered(entered)
    split_r = residuals.split_r
    if split_r is not None:
        split_r = checkpoint_name(split_r, "jfla_state_map")
    intra = IntraChunk(a_qk, a_inv)
    return Residuals(intra, checkpoints, entered, split_r, factors, token_scalars)


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
            output, residuals = _forward(
                inputs, self.options, self.plan, for_backward=True
            )
            assert residuals is not None
            return output, residuals

    def backward(
        self, inputs: Inputs, residuals: Residuals, d_output: DeltaRuleOutput
    ) -> Inputs:
        # The backward may be traced outside the contexts in which the forward was traced.
        with interpreted(self.plan.interpret):
            return _backward(inputs, self.options, self.plan, residuals, d_output)

    def plain(self, inputs: Inputs) -> DeltaRuleOutput:
        return xla.plain(inputs, self.options)


def _chunk(inputs: Inputs, options: Options, plan: Plan) -> DeltaRuleOutput:
    return differentiable(_Rule(options, plan), inputs)


run = compiler_partitioned(
    across_devices(jax.jit(_chunk, static_argnames=("options", "plan")))
)
