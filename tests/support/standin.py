"""Plain JAX in the place of the Hopper kernels, with their operands and results, on simulated devices.

Interpret mode takes one device.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jfla import chunk_op
from jfla.gates import Gate, log_decay, write_strength
from jfla.pallas.dims import dims_of
from jfla.pallas.heuristics import Schedule, schedule
from jfla.parallel.stretch import Stretch
from jfla.stages import IntraChunk, Residuals
from jfla.types import DeltaRuleOutput, Inputs, Options
from jfla.xla import op as xla
from jfla.xla.forward import Pairs
from support.kernel_cases import validated

NUM_SMS = 7  # of no other test, with which the compiled function could be shared


class Standin:
    """`jfla.pallas.chunk` in plain JAX. `parts` is what v was of the calls that were traced."""

    def __init__(self) -> None:
        self.parts: list[tuple[int, ...]] = []

    def forward(
        self,
        inputs: Inputs,
        options: Options,
        schedule: Schedule,
        *,
        for_backward: bool,
        stretch: Stretch | None,
    ) -> tuple[DeltaRuleOutput, Residuals]:
        self.parts.append(inputs.v.shape)
        output, (pairs, entered) = xla.forward(inputs, options)
        intra = IntraChunk(*(jnp.moveaxis(x, 0, 2) for x in pairs))
        return output, Residuals(intra, None, entered)

    def backward(
        self,
        inputs: Inputs,
        options: Options,
        schedule: Schedule,
        residuals: Residuals,
        do: jax.Array,
        d_final: jax.Array | None,
    ) -> Inputs:
        self.parts.append(inputs.v.shape)
        pairs = Pairs(*(jnp.moveaxis(x, 2, 0) for x in residuals.intra))
        decay = log_decay(inputs.g, inputs.gate)
        beta = write_strength(inputs.beta, options.beta_max)
        inputs = inputs._replace(g=decay, beta=beta, gate=None)
        options = dataclasses.replace(options, beta_max=None)
        kept = xla.Residuals(pairs, residuals.entered)
        d = xla.backward_of(inputs, options, kept, DeltaRuleOutput(do, d_final))
        return d._replace(segment_ids=None)


def gate_grads(
    g: jax.Array, gate: Gate, dg: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`jfla.pallas.common.gate_grads.gate_grads` in plain JAX."""

    def of_row(g: jax.Array, dg: jax.Array) -> tuple[jax.Array, ...]:
        channels = g.shape[1:]
        a_log = jnp.zeros(channels[0]) if gate.a_log is None else gate.a_log
        dt_bias = jnp.zeros(channels) if gate.dt_bias is None else gate.dt_bias

        def decay(g: jax.Array, bias: jax.Array, a_log: jax.Array) -> jax.Array:
            whole = dataclasses.replace(gate, a_log=a_log, dt_bias=bias)
            return log_decay(g[None], whole)[0]

        dx, d_bias, d_rate = jax.vjp(decay, g, dt_bias, a_log)[1](dg)
        # The kernel leaves it by channels.
        by_channel = jnp.zeros(channels).at[:, 0].set(d_rate)
        return dx, d_bias, by_channel

    return jax.vmap(of_row)(g, dg)


def op_of(name: str, by_platform: bool = False) -> Any:
    """The chunked op by kernels, on any platform or only where it is lowered for CUDA."""

    def op(*args: Any, **kwargs: Any) -> DeltaRuleOutput:
        inputs, options = validated(name, *args, **kwargs)
        usual = schedule(options.op, dims_of(inputs, options), NUM_SMS)
        return chunk_op.run(
            inputs, options, chunk_op.Plan(usual, by_platform=by_platform)
        )

    return op
