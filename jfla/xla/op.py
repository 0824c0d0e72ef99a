"""The chunked ops of "xla", from validated inputs to outputs, with their derivative rule."""

import dataclasses
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jfla._inputs.chunking import ChunkInputs, from_chunks, prepare_chunks
from jfla.by_platform import by_platform
from jfla.linear_rule import differentiable
from jfla.parallel.sequence import across_devices
from jfla.parallel.sharding import compiler_partitioned
from jfla.parallel.stretch import Entered, stretch_of
from jfla.types import DeltaRuleOutput, Inputs, Options
from jfla.xla.backward import backward, dstate_at_start
from jfla.xla.forward import Carried, Pairs, intra_over_chunks, output_scan, state_map


class Residuals(NamedTuple):
    """What the forward leaves for the backward beside the inputs."""

    pairs: Pairs
    entered: Entered | None  # where time is split over devices


def matmul_precision(inputs: Inputs) -> AbstractContextManager[None]:
    """`jax.default_matmul_precision` where it is set. Otherwise enough for the digits that the inputs have.

    "high" is tensorfloat32 on a GPU and three passes of bfloat16 on a TPU; one pass is too little for the inverse.
    """
    narrow = all(x.dtype.itemsize == 2 for x in (inputs.q, inputs.k, inputs.v))
    enough = "high" if narrow else "highest"
    return jax.default_matmul_precision(
        jax.config.jax_default_matmul_precision or enough
    )


def _by_platform(stages: Callable, *args: Any) -> Any:
    """One chunk at a time on a CPU, whose cache then holds what lies between the stages; all at once elsewhere."""
    one, all_at_once = (
        functools.partial(stages, chunk_at_a_time=flag) for flag in (True, False)
    )
    return by_platform(*args, cpu=one, default=all_at_once)


def _all_at_once(stages: Callable, *args: Any) -> Any:
    """On any platform: a choice would be differentiated whole, and keep what both of its sides need."""
    return stages(*args, chunk_at_a_time=False)


def forward(
    inputs: Inputs,
    options: Options,
    run: Callable = _by_platform,
) -> tuple[DeltaRuleOutput, Residuals]:
    """The output, and what the backward needs. `run` says whether chunks go one at a time."""
    with jax.named_scope("jfla_chunk_forward"), matmul_precision(inputs):
        x, initial = prepare_chunks(inputs, options)
        intra = functools.partial(intra_over_chunks, scalar_gate=options.op.scalar_gate)
        pairs = name_residuals(run(intra, x))
        stretch = stretch_of(inputs, options)
        entered = None
        if stretch is not None:
            slots = (stretch.first, stretch.last)
            entered = stretch.enter(
                initial, lambda states: run(state_map, x, states, slots, pairs)
            )
            entered = name_entered(entered)
            initial = entered.states
        output, final = run(output_scan, x, initial, pairs)
        if stretch is not None:
            final = stretch.own(final)
        output = from_chunks(output, inputs, options)
        kept = Residuals(pairs, entered)
        if not options.return_final_state:
            return DeltaRuleOutput(output, None), kept
        final = options.as_final_state(final)
        one_state = not options.per_segment_state and options.states_every is None
        return DeltaRuleOutput(output, final[:, 0] if one_state else final), kept


def backward_of(
    inputs: Inputs,
    options: Options,
    residuals: Residuals,
    d_output: DeltaRuleOutput,
) -> Inputs:
    """Cotangents of the inputs."""
    pairs, entered = residuals

    def prepared(differentiable: Inputs) -> tuple[tuple[ChunkInputs, Carried], Any]:
        inputs_with_ids = differentiable._replace(segment_ids=inputs.segment_ids)
        x, initial = prepare_chunks(inputs_with_ids, options)
        return (x._replace(slot=None, source=None), initial), (x.slot, x.source)

    with jax.named_scope("jfla_chunk_backward"), matmul_precision(inputs):
        without_ids = inputs._replace(segment_ids=None)
        (x, initial), adjoint, (slot, source) = jax.vjp(
            prepared, without_ids, has_aux=True
        )
        x = x._replace(slot=slot, source=source)
        to_output = lambda o: from_chunks(o, inputs, options)
        (do,) = jax.linear_transpose(to_output, x.v)(d_output.output)
        d_final = jnp.zeros_like(initial)
        if d_output.final_state is not None:
            d_final = d_final + d_output.final_state.reshape(initial.shape)
        stages = functools.partial(backward, scalar_gate=options.op.scalar_gate)
        if entered is None:
            (cotangents,) = adjoint(
                _by_platform(stages, x, initial, pairs, do, d_final)
            )
            return cotangents
        stretch = entered.stretch
        at_start = lambda d_final: _by_platform(dstate_at_start, x, d_final, pairs, do)
        d_final = stretch.leave(stretch.own(d_final), entered.r, at_start)
        dx, d_initial = _by_platform(stages, x, entered.states, pairs, do, d_final)
        return adjoint((dx, stretch.without_entering(d_initial)))[0]


def pairs_of(inputs: Inputs, options: Options) -> Pairs:
    """a_qk and the inverse alone."""
    with jax.named_scope("jfla_chunk_forward"), matmul_precision(inputs):
        x, _ = prepare_chunks(inputs, options)
        intra = functools.partial(intra_over_chunks, scalar_gate=options.op.scalar_gate)
        return _by_platform(intra, x)


def name_residuals(pairs: Pairs) -> Pairs:
    """For `jax.checkpoint_policies.save_only_these_names`."""
    a_qk = checkpoint_name(pairs.a_qk, "jfla_a_qk")
    return Pairs(a_qk, checkpoint_name(pairs.inverse, "jfla_inverse"))


def name_entered(entered: Entered) -> Entered:
    """For the same: what would have to go over the network again."""
    states = checkpoint_name(entered.states, "jfla_entering_state")
    return entered._replace(
        states=states, r=checkpoint_name(entered.r, "jfla_state_map")
    )


@dataclasses.dataclass(frozen=True)
class _Rule:
    """The derivative rule of the chunked op: `jfla.linear_rule.Rule`."""

    options: Options

    def primal(self, inputs: Inputs) -> DeltaRuleOutput:
        return forward(inputs, self.options)[0]

    def forward(self, inputs: Inputs) -> tuple[DeltaRuleOutput, Residuals]:
        return forward(inputs, self.options)

    def backward(
        self, inputs: Inputs, residuals: Residuals, d_output: DeltaRuleOutput
    ) -> Inputs:
        return backward_of(inputs, self.options, residuals, d_output)

    def plain(self, inputs: Inputs) -> DeltaRuleOutput:
        return plain(inputs, self.options)


def _chunk(inputs: Inputs, options: Options) -> DeltaRuleOutput:
    return differentiable(_Rule(options), inputs)


def plain(inputs: Inputs, options: Options) -> DeltaRuleOutput:
    """The op without a derivative rule."""
    return forward(inputs, options, _all_at_once)[0]


run = compiler_partitioned(across_devices(jax.jit(_chunk, static_argnames="options")))
run_without_vjp = compiler_partitioned(jax.jit(plain, static_argnames="options"))
