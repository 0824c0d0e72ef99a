"""The chunked ops of "xla", from validated inputs to outputs, with their derivative rule."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jfla._inputs.chunking import ChunkInputs, from_chunks, prepare_chunks
from jfla.linear_rule import differentiable
from jfla.parallel.sharding import compiler_partitioned
from jfla.types import DeltaRuleOutput, Inputs, Options
from jfla.xla.backward import backward
from jfla.xla.forward import Carried, Pairs, intra_over_chunks, output_scan


def _by_platform(stages: Callable, *args: Any) -> Any:
    """One chunk at a time on a CPU, whose cache then holds what lies between the stages; all at once elsewhere."""
    one, all_at_once = (functools.partial(stages, chunk_at_a_time=flag) for flag in (True, False))
    return lax.platform_dependent(*args, cpu=one, default=all_at_once)


def _all_at_once(stages: Callable, *args: Any) -> Any:
    """On any platform: a choice would be differentiated whole, and keep what both of its sides need."""
    return stages(*args, chunk_at_a_time=False)


def forward(
    inputs: Inputs,
    options: Options,
    run: Callable = _by_platform,
) -> tuple[DeltaRuleOutput, Pairs]:
    """The output, and a_qk and the inverse [N, B, HV, C, C]. `run` says whether chunks go one at a time."""
    with jax.named_scope("jfla_chunk_forward"), jax.default_matmul_precision("highest"):
        x, initial = prepare_chunks(inputs, options)
        intra = functools.partial(intra_over_chunks, scalar_gate=options.op.scalar_gate)
        pairs = name_residuals(run(intra, x))
        output, final = run(output_scan, x, initial, pairs)
        output = from_chunks(output, inputs, options)
        if not options.return_final_state:
            return DeltaRuleOutput(output, None), pairs
        final = options.as_final_state(final)
        one_state = not options.per_segment_state and options.states_every is None
        return DeltaRuleOutput(output, final[:, 0] if one_state else final), pairs


def backward_of(
    inputs: Inputs,
    options: Options,
    pairs: Pairs,
    d_output: DeltaRuleOutput,
) -> Inputs:
    """Cotangents of the inputs."""

    def prepared(differentiable: Inputs) -> tuple[tuple[ChunkInputs, Carried], Any]:
        inputs_with_ids = differentiable._replace(segment_ids=inputs.segment_ids)
        x, initial = prepare_chunks(inputs_with_ids, options)
        return (x._replace(slot=None, source=None), initial), (x.slot, x.source)

    with jax.named_scope("jfla_chunk_backward"), jax.default_matmul_precision("highest"):
        without_ids = inputs._replace(segment_ids=None)
        (x, initial), adjoint, (slot, source) = jax.vjp(prepared, without_ids, has_aux=True)
        x = x._replace(slot=slot, source=source)
        to_output = lambda o: from_chunks(o, inputs, options)
        (do,) = jax.linear_transpose(to_output, x.v)(d_output.output)
        d_final = jnp.zeros_like(initial)
        if d_output.final_state is not None:
            d_final = d_final + d_output.final_state.reshape(initial.shape)
        stages = functools.partial(backward, scalar_gate=options.op.scalar_gate)
        (cotangents,) = adjoint(_by_platform(stages, x, initial, pairs, do, d_final))
        return cotangents


def name_residuals(pairs: Pairs) -> Pairs:
    """For `jax.checkpoint_policies.save_only_these_names`."""
    a_qk = checkpoint_name(pairs.a_qk, "jfla_a_qk")
    return Pairs(a_qk, checkpoint_name(pairs.inverse, "jfla_inverse"))


@dataclasses.dataclass(frozen=True)
class _Rule:
    """The derivative rule of the chunked op: `jfla.linear_rule.Rule`."""

    options: Options

    def primal(self, inputs: Inputs) -> DeltaRuleOutput:
        return forward(inputs, self.options)[0]

    def forward(self, inputs: Inputs) -> tuple[DeltaRuleOutput, Pairs]:
        return forward(inputs, self.options)

    def backward(self, inputs: Inputs, residuals: Pairs, d_output: DeltaRuleOutput) -> Inputs:
        return backward_of(inputs, self.options, residuals, d_output)

    def plain(self, inputs: Inputs) -> DeltaRuleOutput:
        return plain(inputs, self.options)


def _chunk(inputs: Inputs, options: Options) -> DeltaRuleOutput:
    return differentiable(_Rule(options), inputs)


def plain(inputs: Inputs, options: Options) -> DeltaRuleOutput:
    """The op without a derivative rule."""
    return forward(inputs, options, _all_at_once)[0]


run = compiler_partitioned(jax.jit(_chunk, static_argnames="options"))
run_without_vjp = compiler_partitioned(jax.jit(plain, static_argnames="options"))
