"""The decode kernel: q, k, v, gate, beta of a few tokens and a state -> outputs and new states.

One CTA, of one warpgroup, holds a block of V columns of one state in registers and takes it through
all tokens. It reads the block from global memory, and writes it back, with 16 bytes per thread. The
tokens are a thousandth of those bytes: while the block is on its way, gate, norms and beta are
computed and left in shared memory. The final state may overwrite the initial one. Where the state
after every token is wanted, each goes to a place of its own, and the initial one is only read.

With a pool of states the row's slot says which one the CTA reads and writes. A row without one of the
pool's slots stores zeros, and a row with fewer tokens than the call ends its loop earlier.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jfla.gates import NORM_EPSILON
from jfla.pallas.common.decode.layouts import (
    DecodeLayouts,
    broadcast_to_layout,
    decode_layouts,
)
from jfla.pallas.common.decode.spec import (
    DecodeOperands,
    DecodeOutputs,
    DecodeSpec,
    SharedStorage,
    StateBlock,
    decode_operands,
    decode_outputs,
)
from jfla.pallas.common.gate import LOG2E, gate_kind, log2_decay, rate_of
from jfla.pallas.mgpu.branches import int_of, when
from jfla.pallas.mgpu.copies import (
    commit_smem,
    load_with_layout,
    store_from_layout,
    wait_for_stores,
)
from jfla.pallas.mgpu.launch import launch
from jfla.pallas.mgpu.smem import F32
from jfla.pallas.mgpu.types import Gmem, Index, Reg, Smem
from jfla.types import Inputs, Options


class RawTokens(NamedTuple):
    """In registers: what `DecodeOperands` has for all tokens of one block."""

    q: Reg  # [T, K]
    k: Reg
    v: Reg  # [T, v_block]
    g: Reg  # [T, K] or, of a scalar gate, [T]
    beta: Reg  # [T]
    a_log: Reg | None  # []
    dt_bias: Reg | None  # [K] or, of a scalar gate, []


class DecodeWarpgroup(NamedTuple):
    """What the one warpgroup of a CTA sees."""

    spec: DecodeSpec
    layouts: DecodeLayouts
    block: StateBlock
    gmem: DecodeOperands
    output_gmem: Gmem
    # where the final state or all states go; None where none is wanted
    states_gmem: Gmem
    smem: SharedStorage


def run_decode(ctx: DecodeWarpgroup) -> None:
    """Takes a block of a state through the row's tokens; of a pool, only a state that there is."""
    if ctx.gmem.slots is None:
        run_tokens(ctx)
        return
    slot = ctx.gmem.slots[ctx.block.batch]
    exists = jnp.logical_and(slot >= 0, slot < ctx.spec.num_states)

    @when(exists)
    def _named():
        run_tokens(ctx._replace(block=ctx.block._replace(state=slot)))

    @when(jnp.logical_not(exists))
    def _idle():
        zeros = plgpu.layout_cast(
            jnp.zeros(ctx.spec.block_shape, F32), ctx.layouts.state
        )
        store_padding(ctx, 0, zeros)


def run_tokens(ctx: DecodeWarpgroup) -> None:
    """Takes a block of a state through the row's tokens."""
    time = ctx.spec.time
    every_state = ctx.spec.options.return_states
    state = load_state(ctx)
    # A barrier that has nothing to wait for: without it the compiler moves the loads of the state
    # behind the wait for the loads of the tokens.
    wait_for_stores(read_only=True)
    raw = load_raw_tokens(ctx)
    write_tokens(ctx, raw)
    commit_smem()

    def step(t: Index, state: Reg) -> Reg:
        state = decode_step(ctx, t, state)
        if every_state:
            store_state(ctx, ctx.block.of_state_after(t, ctx.states_gmem), state)
        return state

    if ctx.gmem.segment_ids is not None:
        num_tokens = count_tokens(ctx)
        state = lax.fori_loop(0, num_tokens, step, state)
        state = store_padding(ctx, num_tokens, state)
    else:
        state = step(0, state) if time == 1 else lax.fori_loop(0, time, step, state)
    if ctx.states_gmem is not None and not every_state:
        store_state(ctx, ctx.block.of_state(ctx.states_gmem), state)


def count_tokens(ctx: DecodeWarpgroup) -> Index:
    """The row's tokens, behind which there is padding."""
    ids = ctx.gmem.segment_ids
    return sum(int_of(ids[ctx.block.batch, t] > 0) for t in range(ctx.spec.time))


def store_padding(ctx: DecodeWarpgroup, first: Index, state: Reg) -> Reg:
    """From token `first` on the output is 0, and the state stays as it is."""
    layout = ctx.layouts.column_vector

    def store(t: Index, state: Reg) -> Reg:
        zeros = plgpu.layout_cast(jnp.zeros(ctx.spec.v_block, F32), layout)
        store_output(ctx, t, zeros)
        if ctx.spec.options.return_states:
            store_state(ctx, ctx.block.of_state_after(t, ctx.states_gmem), state)
        return state

    return lax.fori_loop(first, ctx.spec.time, store, state)


def store_output(ctx: DecodeWarpgroup, t: Index, output: Reg) -> None:
    """Rounds the block's part of token t's output to its dtype, and stores it."""
    output_gmem = ctx.block.of_values(ctx.output_gmem).at[t]
    store_from_layout(output_gmem, output.astype(ctx.output_gmem.dtype))


def load_state(ctx: DecodeWarpgroup) -> Reg:
    """[K, v_block] float32: the initial state."""
    layout = ctx.layouts.state
    if ctx.gmem.state is None:
        zeros = jnp.zeros(ctx.spec.block_shape, F32)
        return plgpu.layout_cast(zeros, layout)
    block_gmem = ctx.block.of_state(ctx.gmem.state)
    state = load_with_layout(block_gmem, layout).astype(F32)
    if jax.typeof(state).manual_axis_type.varying:
        # Under shard_map what is loaded varies over the mesh, to JAX, and what is computed of it does not: the carry of
        # the loop over tokens has to begin as something computed.
        state = state * 1.0
    return state


def store_state(ctx: DecodeWarpgroup, block_gmem: Gmem, state: Reg) -> None:
    """Rounds the state to the dtype in which it is handed on, and stores it."""
    store_from_layout(block_gmem, state.astype(ctx.spec.final_dtype))


def load_raw_tokens(ctx: DecodeWarpgroup) -> RawTokens:
    """Loads what all tokens bring to the block."""
    gmem = ctx.gmem
    layouts = ctx.layouts
    batch = ctx.block.batch
    value_head = ctx.block.value_head
    head = ctx.block.head
    q = load_with_layout(gmem.q.at[batch, :, head], layouts.token_keys)
    k = load_with_layout(gmem.k.at[batch, :, head], layouts.token_keys)
    v = load_with_layout(ctx.block.of_values(gmem.v), layouts.column_vector)
    g = gmem.g.at[batch, :, value_head]
    if ctx.spec.scalar_gate:
        g = load_with_layout(g.at[:, 0], layouts.token_scalars)
    else:
        g = load_with_layout(g, layouts.token_keys)
    beta = load_with_layout(gmem.beta.at[batch, :, value_head], layouts.token_scalars)
    a_log = None if gmem.a_log is None else gmem.a_log[value_head]
    return RawTokens(q, k, v, g, beta, a_log, _load_dt_bias(ctx))


def _load_dt_bias(ctx: DecodeWarpgroup) -> Reg | None:
    dt_bias = ctx.gmem.dt_bias
    if dt_bias is None:
        return None
    if ctx.spec.scalar_gate:
        return dt_bias[ctx.block.value_head, 0]
    return load_with_layout(dt_bias.at[ctx.block.value_head], ctx.layouts.key_vector)


def write_tokens(ctx: DecodeWarpgroup, raw: RawTokens) -> None:
    """Applies gate, sigmoid of beta, l2norm and scale, and writes every token to shared memory."""
    options = ctx.spec.options
    smem = ctx.smem
    shape = ctx.spec.token_keys_shape
    a_log = jnp.broadcast_to(0.0 if raw.a_log is None else raw.a_log, shape)
    log2_bias: Reg | float = 0.0
    if raw.dt_bias is not None:
        log2_bias = LOG2E * raw.dt_bias
        if not ctx.spec.scalar_gate:
            layout = ctx.layouts.token_keys
            log2_bias = broadcast_to_layout(log2_bias, shape, 1, layout)
    g = raw.g.astype(F32)
    if ctx.spec.scalar_gate:
        g = per_token_to_keys(ctx, g)
    beta = per_token_to_keys(ctx, raw.beta.astype(F32))
    exponent = log2_decay(
        ctx.spec.gate, g, rate_of(a_log), log2_bias, log2_1p=_float32_log2_1p
    )
    smem.decay[...] = jnp.exp2(exponent)
    if options.beta_max is not None:
        beta = options.beta_max / (1.0 + jnp.exp(-beta))
    smem.beta[...] = beta
    q = l2_normalized(ctx, raw.q.astype(F32))
    smem.q[...] = q * options.scale
    smem.k[...] = l2_normalized(ctx, raw.k.astype(F32))
    smem.v[...] = raw.v


def per_token_to_keys(ctx: DecodeWarpgroup, x: Reg) -> Reg:
    """[T] to [T, K]."""
    return broadcast_to_layout(x, ctx.spec.token_keys_shape, 0, ctx.layouts.token_keys)


def l2_normalized(ctx: DecodeWarpgroup, x: Reg) -> Reg:
    """x [T, K] over its norm, where the op normalizes q and k."""
    if not ctx.spec.options.qk_norm:
        return x
    square_norm = jnp.sum(x * x, axis=1)
    inv_norm = lax.rsqrt(square_norm + NORM_EPSILON)
    return x * per_token_to_keys(ctx, inv_norm)


def _float32_log2_1p(x: Reg) -> Reg:
    """log2(1 + x) of x in 0 .. 1 to float32, also where it is small, because decays multiply over thousands of steps.

    log(1 + x) = 2 atanh(x / (2 + x)), by its series: s + s^3 / 3 + .. with s <= 1 / 3. Of larger x, where the decay is
    0, it is positive.
    """
    s = x / (x + 2.0)
    square = s * s
    series = s * 0.0 + 1.0 / 15
    for n in (13, 11, 9, 7, 5, 3, 1):
        series = series * square + 1.0 / n
    return (2.0 * LOG2E) * s * series


def decode_step(ctx: DecodeWarpgroup, t: Index, state: Reg) -> Reg:
    """The recurrence of token t: stores its output and returns the state [K, v_block] after it.

    S <- decay S;   S <- S + k beta (v - k^T S);   o = q^T S
    """
    smem = ctx.smem
    k = _load_row_vector(ctx, smem.k.at[t])
    decay = _load_row_vector(ctx, smem.decay.at[t])
    state = state * decay
    v = load_with_layout(smem.v.at[t], ctx.layouts.column_vector).astype(F32)
    predicted_v = jnp.sum(state * k, axis=0)
    error = v - predicted_v
    v_new = error * smem.beta[t, 0]
    v_new = broadcast_to_layout(v_new, ctx.spec.block_shape, 1, ctx.layouts.state)
    state = state + k * v_new
    q = _load_row_vector(ctx, smem.q.at[t])
    output = jnp.sum(state * q, axis=0)
    store_output(ctx, t, output)
    return state


def _load_row_vector(ctx: DecodeWarpgroup, vector_smem: Smem) -> Reg:
    """[K] to [K, v_block]."""
    vector = load_with_layout(vector_smem, ctx.layouts.row_vector)
    return broadcast_to_layout(vector, ctx.spec.block_shape, 0, ctx.layouts.state)


def launch_decode(
    inputs: Inputs,
    options: Options,
    v_block: int,
    state: Gmem,
    in_place: bool,
) -> DecodeOutputs:
    """Launches the kernel on all blocks of all states.

    `state` is the initial state or None; with `in_place` it is a `jax.Ref` of it, which the final
    state overwrites.
    """
    batch, time, heads, key_dim = inputs.q.shape
    value_heads, value_dim = inputs.v.shape[2:]
    gate = gate_kind(inputs.gate)
    dims = (batch, time, heads, value_heads, key_dim, value_dim)
    final_dtype = options.state_dtype or F32
    initial_dtype = final_dtype if state is None else state.dtype
    num_states = batch if state is None else state.shape[0]
    spec = DecodeSpec(
        *dims, v_block, gate, options, num_states, initial_dtype, inputs.v.dtype
    )
    layouts = decode_layouts(time, key_dim, v_block, spec.column_bytes)
    new_states = options.return_final_state and not in_place

    def body(
        gmem: DecodeOperands,
        outputs_gmem: DecodeOutputs,
        smem: SharedStorage,
        _barriers: tuple,
    ) -> None:
        states_gmem = gmem.state if in_place else outputs_gmem.states
        block = spec.state_block(lax.axis_index("cta"))
        ctx = DecodeWarpgroup(
            spec, layouts, block, gmem, outputs_gmem.output, states_gmem, smem
        )
        run_decode(ctx)

    return launch(
        body,
        decode_operands(inputs, options, state),
        decode_outputs(spec, inputs.v, new_states=new_states),
        grid={"cta": spec.num_ctas},
        num_warpgroups=1,
        smem=spec.smem(),
        name="jfla_decode",
        auto_barriers=False,  # shared memory is written once, before any of it is read
    )
