"""The decay gates inside a kernel: raw gate input, as the caller passed it, to log2 decay per token in registers."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jfla.gates import Gate, SigmoidGate
from jfla.pallas.mgpu.iota import per_row
from jfla.pallas.mgpu.layouts import WGMMA
from jfla.pallas.mgpu.smem import F32
from jfla.pallas.mgpu.types import Layout, Reg

LOG2E = 1.4426950408889634
# A decay of 2^-150 is 0 in float32, and 64 of them still sum without losing the digits of a weak gate.
STRONGEST = -150.0
# Beside one of 2^-64 nothing is left either: sums in float32 lose more. KDA's chunks need a pass over their pairs for
# every 170 bits that a channel loses in 16 tokens (`pair_passes.py`).
STRONGEST_OF_CHANNEL = -64.0
MAX_LOG_RATE = 60.0
_SMALL = 0.018  # below, log(1 + x) is x - x^2 / 2 to 1e-4 of its value


class GateKind(NamedTuple):
    """The static part of a gate: its name ("none", "softplus", "sigmoid") and the sigmoid gate's lower bound."""

    name: str = "none"
    lower_bound: float = 0.0


def gate_kind(gate: Gate | None) -> GateKind:
    """Of the gate that the caller passed."""
    if gate is None:
        return GateKind()
    if isinstance(gate, SigmoidGate):
        return GateKind("sigmoid", gate.lower_bound)
    return GateKind("softplus")


def gate_parameters(
    gate: Gate | None,
    heads: int,
    gate_dim: int,
) -> tuple[jax.Array | None, jax.Array | None]:
    """(rates [HV, 2], dt_bias [HV, G]): `rate_of` each head's a_log, and the bias."""
    if gate is None:
        return None, None
    a_log = jnp.zeros(heads, F32) if gate.a_log is None else gate.a_log.astype(F32)
    bias = (
        jnp.zeros((heads, gate_dim), F32)
        if gate.dt_bias is None
        else gate.dt_bias.astype(F32)
    )
    return jnp.stack(rate_of(a_log), axis=-1), bias.reshape(heads, gate_dim)


def rate_of(a_log: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(excess, scale): exp(a_log) = 2^excess scale, and excess is 0 where a_log is at most MAX_LOG_RATE.

    A gate adds the excess in its exponential: far below zero softplus gives exp(a_log + x), which need not be large.
    Where it is large the decay is 0 anyway.
    """
    excess = jnp.clip(a_log - MAX_LOG_RATE, 0.0, MAX_LOG_RATE)
    return LOG2E * excess, jnp.exp(jnp.minimum(a_log, MAX_LOG_RATE))


def coarse_log2_1p(x: Reg) -> Reg:
    """log2(1 + x) of x >= 0 to about 1e-4 of its value, which is enough beside 16-bit operands."""
    return jnp.where(x < _SMALL, x * (LOG2E - 0.5 * LOG2E * x), jnp.log2(1.0 + x))


def inverse(x: Reg) -> Reg:
    """1 / x of x >= 1, by one instruction and a product, where a division takes several."""
    inv_root = lax.rsqrt(x)
    return inv_root * inv_root


def log2_decay(
    kind: GateKind,
    x: Reg,
    rate: Any,
    log2_bias: Any,
    log2_1p: Callable[[Reg], Reg] = coarse_log2_1p,
    times: float = 1.0,
    strongest: float = STRONGEST,
) -> Reg:
    """Raw gate input [C, channels] float32 to log2 decay in [strongest, 0], times a constant.

    `rate` is `rate_of` the head's a_log, and `log2_bias`, shaped like x, LOG2E times the gate's; None without a gate.
    All is in powers of 2, which spares factors of LOG2E:

        LOG2E softplus(x) = max(y, 0) + log2(1 + 2^-|y|)    with y = LOG2E x
    """
    if kind.name == "none":
        return jnp.maximum(x * (LOG2E * times), strongest * times)
    y = x * LOG2E + log2_bias
    # Nothing is computed of the rate alone: a kernel would wait for its load before it has begun with x.
    excess, scale = rate
    if kind.name == "softplus":
        softplus = jnp.maximum(y, 0.0) + log2_1p(jnp.exp2(excess - jnp.abs(y)))
        decay = softplus * scale * -times
    else:
        bound = kind.lower_bound * LOG2E * times
        decay = bound * inverse(1.0 + jnp.exp2(y * -scale))
    return jnp.maximum(decay, strongest * times)


def with_resets(x: Reg, resets: Reg, times: float = 1.0, layout: Layout = WGMMA) -> Reg:
    """log2 decay times a constant with the packing of `reset_rows` [C] applied."""
    resets = per_row(resets, x.shape[1], layout)
    return jnp.where(
        resets > 0.0, 0.0 * x, jnp.maximum(x + resets * times, STRONGEST * times)
    )


def reset_rows(segment_ids: jax.Array, starts: jax.Array) -> jax.Array:
    """[B, T] float32: STRONGEST on the first token of a segment, 1 on padding, which does not decay, else 0."""
    return jnp.where(segment_ids > 0, jnp.where(starts, STRONGEST, 0.0), 1.0).astype(
        F32
    )
