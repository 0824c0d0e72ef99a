"""From cotangents of log decays and write strengths to those of the raw g, the gate's parameters and the raw beta.

Outside of `split_by`, so that the partitioner sums the parameters' gradients over rows on other devices.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jfla._inputs.canonicalize import without_padding
from jfla.gates import Gate, log_decay, write_strength
from jfla.pallas.common.gate_grads import gate_grads, supports
from jfla.pallas.mgpu.smem import BF16, F32
from jfla.parallel.split import split_by
from jfla.parallel.varying import vary_with
from jfla.types import Inputs, Options


def gate_cotangents(inputs: Inputs, options: Options, d: Inputs) -> Inputs:
    """`d` is what `jfla.pallas.arrays.cotangents` gives. The gates of channels go through a kernel."""

    def strength(beta: Array) -> Array:
        beta = without_padding(beta, inputs.segment_ids)
        return write_strength(beta, options.beta_max)

    def decay(g: Array, gate: Gate | None) -> Array:
        # Without a gate dg is 0 on padding as it is, and masking it would be a pass of XLA over it.
        if gate is not None:
            g = without_padding(g, inputs.segment_ids)
        return log_decay(g, gate)

    (dbeta,) = jax.vjp(strength, inputs.beta)[1](d.beta)
    gate = inputs.gate
    per_channel = not options.op.scalar_gate
    if gate is not None and per_channel and supports(gate, inputs.g):
        dg, dgate = _by_kernel(inputs.g, gate, d.g)
    else:
        decays, adjoint = jax.vjp(decay, inputs.g, gate)
        dg, dgate = adjoint(d.g.astype(decays.dtype))
    return d._replace(g=dg, gate=dgate, beta=dbeta)


def _by_kernel(
    g: Float[Array, "B T HV K"], gate: Gate, dg: Float[Array, "B T HV K"]
) -> tuple[Float[Array, "B T HV K"], Gate]:
    """Cotangents of the raw g and of the gate; dg is 0 on padding."""

    # Value heads, each by itself: to `split_by` those are "H".
    @split_by(("B T H G", "H G", "B T H G"), ("B T H G", "B H G", "B H G"))
    def split(g: Array, gate: Gate, dg: Array) -> tuple[Array, Array, Array]:
        return gate_grads(g, gate, dg)

    raw = g if g.dtype in (BF16, F32) else g.astype(F32)
    dx, dt_bias, da_log = vary_with(split(raw, gate, dg), g, dg)

    def copies_of_rows(gate: Gate) -> list[Array]:
        """The parameters once for every row: their cotangents are summed over rows, and over devices with others."""
        present = [x for x in (gate.a_log, gate.dt_bias) if x is not None]
        copies = [
            jnp.broadcast_to(x.astype(F32)[None], (g.shape[0], *x.shape))
            for x in present
        ]
        return vary_with(copies, g, dg)

    copies, adjoint = jax.vjp(copies_of_rows, gate)
    by_row = []
    if gate.a_log is not None:
        by_row.append(jnp.sum(da_log, axis=-1))
    if gate.dt_bias is not None:
        by_row.append(dt_bias)
    like_copies = jax.tree.map(
        lambda x, copy: x.reshape(copy.shape),
        by_row,
        copies,
    )
    (dgate,) = adjoint(like_copies)
    return dx.astype(g.dtype), dgate
