"""Kernel jfla_gate_grads: the raw gate input and the cotangent of the log decay to those of the input and parameters.

Of a gate per channel. It reads both arrays once and writes one. XLA reads them again for each parameter, and its
exponentials and logarithms of softplus take longer than the bytes.

With x the raw input and its bias, rate = exp(a_log) of the head:

    softplus   g = -rate softplus(x)              dx = -dg rate sigmoid(x)               da_log = dg g
    sigmoid    g = lower sigmoid(rate x)          dx = dg lower rate sigmoid'(rate x)    da_log = dx x

A CTA is one warpgroup. It has 64 or 128 channels of a head and some tiles of tokens, whose sums it leaves.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from jfla.gates import Gate
from jfla.pallas.common.chunk_index import CHANNEL_BLOCK, TILE_K
from jfla.pallas.common.gate import (
    LOG2E,
    STRONGEST_OF_CHANNEL,
    GateKind,
    gate_kind,
    gate_parameters,
    inverse,
)
from jfla.pallas.mgpu.copies import load_with_layout, store_from_layout
from jfla.pallas.mgpu.iota import iota, per_column, per_row
from jfla.pallas.mgpu.launch import launch
from jfla.pallas.mgpu.layouts import whole_rows
from jfla.pallas.mgpu.moves import add_rows
from jfla.pallas.mgpu.smem import F32
from jfla.pallas.mgpu.types import Barrier, Gmem, Index, Reg, Smem
from jfla.types import CHUNK

TILE_ELEMENTS = 4096  # of 64 or 128 channels
TOKENS_PER_CTA = 128
ELEMENTS_AT_ONCE = 512  # four neighbours of each thread


class GateOperands(NamedTuple):
    """What the kernel reads."""

    g: Gmem  # [B, T, HV, K], raw
    dg: Gmem  # [B, T, HV, K] float32, of the log decay
    rates: Gmem  # [HV, 2]: `rate_of` a_log
    bias: Gmem  # [HV, K]


class GateGrads(NamedTuple):
    """What it leaves; the sums are over the tokens of a CTA."""

    dg: Gmem  # [B, T, HV, K] of the raw g, in its dtype
    dt_bias: Gmem  # [B, HV, CTAs, K] float32
    da_log: Gmem  # the same, of every channel


def supports(gate: Gate, g: Float[Array, "B T HV K"]) -> bool:
    """Whether the kernel takes this gate and its raw input."""
    known = gate_kind(gate).name in ("softplus", "sigmoid")
    return known and g.shape[1] >= CHUNK and g.shape[-1] % TILE_K == 0


def gate_grads(
    g: Float[Array, "B T HV K"], gate: Gate, dg: Float[Array, "B T HV K"]
) -> tuple[Float[Array, "B T HV K"], Float[Array, "B HV K"], Float[Array, "B HV K"]]:
    """On the host: launches the kernel. The cotangents of g, and for every row of the batch of dt_bias and of a_log.

    That of a_log is still to be summed over channels. Where dg is 0 so is that of g, whatever g is.
    """
    batch, time, heads, key_dim = g.shape
    kind = gate_kind(gate)
    width = TILE_K if key_dim % CHANNEL_BLOCK else CHANNEL_BLOCK
    tokens = TILE_ELEMENTS // width
    tiles_per_cta = TOKENS_PER_CTA // tokens
    num_tiles = -(-time // tokens)
    num_slices = -(-num_tiles // tiles_per_cta)
    layout = whole_rows(width)

    def body(
        gmem: GateOperands, out_gmem: GateGrads, _smem: Smem, _barriers: Barrier
    ) -> None:
        time_slice = lax.axis_index("slice")
        head = lax.axis_index("head")
        row = lax.axis_index("row")
        columns = pl.ds(lax.axis_index("block") * width, width)
        rate = (gmem.rates[head, 0], gmem.rates[head, 1])
        bias = load_with_layout(gmem.bias.at[head, columns], layout.reduce(0))
        bias = per_column(bias, tokens, layout)

        def add_tile(tile: Index, sums: tuple[Reg, Reg]) -> tuple[Reg, Reg]:
            # The last tile ends with the last token, and begins with tokens of the tile before it.
            first = jnp.minimum(tile * tokens, time - tokens)
            part = (row, pl.ds(first, tokens), head, columns)
            dg = load_with_layout(gmem.dg.at[part], layout)
            raw = load_with_layout(gmem.g.at[part], layout)
            dx, da_log = _derive(kind, raw.astype(F32) + bias, rate, dg)
            store_from_layout(out_gmem.dg.at[part], dx.astype(out_gmem.dg.dtype))
            if time % tokens:
                token = iota(tokens, layout.reduce(1)) + first
                is_new = per_row(token, width, layout) >= tile * tokens
                dx, da_log = (jnp.where(is_new, x, 0.0 * x) for x in (dx, da_log))
            return add_rows(sums[0], dx), add_rows(sums[1], da_log)

        none = jnp.zeros((ELEMENTS_AT_ONCE // width, width), F32)
        none = plgpu.layout_cast(none, layout)
        begin = time_slice * tiles_per_cta
        end = jnp.minimum(begin + tiles_per_cta, num_tiles)
        sums = lax.fori_loop(begin, end, add_tile, (none, none))
        for target, x in zip((out_gmem.dt_bias, out_gmem.da_log), sums):
            of_channels = jnp.sum(x, axis=0)
            store_from_layout(target.at[row, head, time_slice, columns], of_channels)

    per_cta = jax.ShapeDtypeStruct((batch, heads, num_slices, key_dim), F32)
    grads = launch(
        body,
        GateOperands(g, dg.astype(F32), *gate_parameters(gate, heads, key_dim)),
        GateGrads(jax.ShapeDtypeStruct(g.shape, g.dtype), per_cta, per_cta),
        # Channels of a head side by side, and heads: neighbours in memory.
        grid={
            "row": batch,
            "slice": num_slices,
            "head": heads,
            "block": key_dim // width,
        },
        num_warpgroups=1,
        name="jfla_gate_grads",
    )
    return grads.dg, jnp.sum(grads.dt_bias, axis=2), jnp.sum(grads.da_log, axis=2)


def _derive(
    kind: GateKind, x: Reg, rate: tuple[Index, Index], dg: Reg
) -> tuple[Reg, Reg]:
    """Of every element the cotangent of x, the raw input and its bias, and its share of that of a_log."""
    excess, scale = rate  # see `rate_of`
    if kind.name == "sigmoid":
        power = jnp.exp(-jnp.abs(scale * x))
        sigmoid = inverse(1.0 + power)
        dx = dg * (kind.lower_bound * scale) * (power * sigmoid * sigmoid)
        has_gradient = dg != 0.0
        da_log = dx * x
    else:
        power = jnp.exp2(excess - LOG2E * jnp.abs(x))
        decay = -scale * (jnp.maximum(x, 0.0) + _log1p(power))
        sigmoid = inverse(1.0 + power) * jnp.where(x < 0.0, power, 1.0)
        dx = -scale * sigmoid * dg
        da_log = decay * dg
        # Of a decay that is 0, dg is what rounding has left, and the rate has no bound.
        has_gradient = (dg != 0.0) & (decay * LOG2E > STRONGEST_OF_CHANNEL)
    dx, da_log = (jnp.where(has_gradient, y, jnp.zeros_like(y)) for y in (dx, da_log))
    return dx, da_log


def _log1p(x: Reg) -> Reg:
    """log(1 + x) of x >= 0 to 1e-5 of its value."""
    series = x * (1.0 - x * (0.5 - x * (1.0 / 3)))
    return jnp.where(x < 0.03, series, jnp.log(1.0 + x))
