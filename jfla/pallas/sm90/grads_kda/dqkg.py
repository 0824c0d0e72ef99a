"""dq, dk and dg of a chunk of KDA in a kernel, from W_q, W_k and the states at both ends.

Derived in docs/math.md, equations (13) to (18). W_q = stril(do v_new^T) and W_k = -stril(dv
v_new^T) are the cotangents of the A matrices, D_ij is the decay from token j to token i, q is
scaled, and dv carries beta. A warpgroup has 64 channels:

    dq_i = decay_from_start_i (do S^T)_i + sum_j W_q_ij D_ij k_j
    dk_i = - decay_from_start_i (dv S^T)_i + decay_to_end_i (v_new dS^T)_i
           + sum_j W_k_ij D_ij k_j + sum_j D_ji (W_q_ji q_j + W_k_ji k_j)

dg takes no matmul over pairs of its own. Where y = x exp(a sum of g), the cotangent of that sum is
y dy = x dx, and every g of the sum gets it. So dg gathers x dx of everything that met a decay, each
over the span that it decayed over:

    dg_m = chunk_decay sum_v(S dS)             the state, over the whole chunk
         + sum_{i >= m} (q_i dq_i + k_i dk_i)  q and k that met S, from the chunk's start
         + sum_{i < m} k_i dk_i                k that met dS, to the chunk's end
         + sum_{j < m <= i} D_ij k_j (W_q_ij q_i + W_k_ij k_i)          pairs of tokens

with, in each line, the part of dq and dk that this line's decay makes. The last line comes from the
same dq and dk: where pairs decay from one anchor (the chunk's start or the middle of a block of 32), it
is sum_{i >= m} z_i with z = q dq + k dk - k dk', dk' what later tokens give to a key, since a pair
adds to z_i what it takes from z_j (17); where they decay through a middle, both factors have spans
of their own, and z = q dq + k dk + k dk' (18).

- No ln 2: the kernel computes exp2(log2 e * g), which is exp(g), and the rule speaks of the product
  x dx alone.
- Pairs i = j are not in W_q and W_k here: D_ii = 1 has no gate, and adding what (17) subtracts
  again would cost a small dg its digits. The epilogue adds them to dq and dk when dg is done.
- z is float32, made of the rounded factors that the matmuls saw: what a pair gives to its two
  tokens then cancels. It goes to the tensor cores as two bf16 tiles.

Sums over spans, and their adjoints, are products with 0/1 matrices: `decay_sums.py`. The first line
of dg is the same for every token; it waits in `smem.dg_chunk`, and the epilogue in `kernel.py` adds
it.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jfla.pallas.common.chunk_index import TILE_K
from jfla.pallas.common.decay_sums import FAST_RANGE, GRAD_NEAR_STEPS, MIDDLE_RANGE, step_pairs
from jfla.pallas.common.qk_tiles import K, Q, QkTiles
from jfla.pallas.mgpu.iota import iota2d
from jfla.pallas.mgpu.layouts import COLS
from jfla.pallas.mgpu.mma import dot, load, zeros
from jfla.pallas.mgpu.opaque import pin
from jfla.pallas.mgpu.smem import BF16, F32, transposed
from jfla.pallas.mgpu.types import Index, Reg, Smem
from jfla.pallas.sm90.grads_kda.smem import FIRST_STEP, GRAD_MATRICES, GradsKdaWarpgroup, Salt, Span
from jfla.types import CHUNK

NEVER = -1e30  # as an exponent

Grads = tuple[Reg, Reg, Reg]  # dq, dk, dg, each [C, 64] float32
Carry = tuple[Index, Index, Grads]  # of the loop over steps: the step, where they end


def dq_dk_dg(chunk_ctx: GradsKdaWarpgroup) -> Grads:
    """[C, 64] each, of this warpgroup's channels; without pairs i = j and `smem.dg_chunk`.

    Where the chunk's gates allow, its pairs decay from the chunk's start, which takes one factor >
    1.
    """
    ctx = chunk_ctx.recompute_addresses(Salt.STATES)
    dq = _times_state(ctx, ctx.smem.do, 0)
    dk = _times_state(ctx, ctx.smem.dv, 0)
    ctx.sync_channel_owners()

    # Line 1 of dg: the state decays over the whole chunk.
    ctx = chunk_ctx.recompute_addresses(Salt.WHOLE_CHUNK)
    _write_dg_chunk(ctx)

    # Line 2: q and k that met S; and line 4, where pairs of tokens decay from the chunk's start as
    # well.
    ctx = chunk_ctx.recompute_addresses(Salt.FROM_START)
    from_start = ctx.segment_sum(Span.FROM_START)
    fast = _least(ctx, from_start) > -FAST_RANGE
    dq, dk, z = _grads_from_start(ctx, from_start, fast, dq, dk)
    ctx = chunk_ctx.recompute_addresses(Salt.FROM_START_ADJOINT)
    none = zeros(CHUNK, TILE_K)
    dg = ctx.segment_sum_adjoint(none, Span.FROM_START, ctx.split(z))

    # Line 3: k that met dS.
    ctx = chunk_ctx.recompute_addresses(Salt.TO_END)
    to_end = ctx.segment_sum(Span.TO_END)
    decay = jnp.exp2(to_end)
    dk_to_end = decay * _times_state(ctx, ctx.smem.v_new, 2)
    k = ctx.qk.scaled(K, ctx.wg)
    z = k * dk_to_end
    dg = ctx.segment_sum_adjoint(dg, Span.TO_END, ctx.split(z))

    # Line 4, where the gates are too strong for line 2 to have done it.
    end = FIRST_STEP + jnp.where(fast, 0, GRAD_NEAR_STEPS)
    dk = dk + dk_to_end
    return _add_strong_pairs(chunk_ctx, end, (dq, dk, dg))


def _times_state(ctx: GradsKdaWarpgroup, values_smem: Smem, first: int) -> Reg:
    """[C, 64]: values [C, V] @ the state that begins at tile `first`, S^T (0) or dS^T (2)."""
    products = []
    for n in ctx.v_tiles():
        state = ctx.state(first + n)
        products.append((values_smem.at[n], state))
    return dot(zeros(CHUNK, TILE_K), *products)


def _write_dg_chunk(ctx: GradsKdaWarpgroup) -> None:
    """chunk_decay * rowsum_v(S * dS) into `smem.dg_chunk`: the cotangent of the sum of all g."""
    # The same for every token, so a vector is kept: [channels, C] with equal columns.
    whole_chunk = ctx.segment_sum(Span.WHOLE_CHUNK, transpose=True)
    chunk_decay = jnp.exp2(whole_chunk)
    state_dot_dstate = _multiply_states_in_place(ctx)
    none = zeros(CHUNK, TILE_K)
    dg = ctx.segment_sum_adjoint(
        none,
        Span.WHOLE_CHUNK,
        state_dot_dstate,
        transpose=True,
    )
    dg = chunk_decay * dg
    column = iota2d(1, CHUNK)
    first_column = jnp.where(column == 0, dg, none)
    dg_chunk = ctx.smem.dg_chunk.at[ctx.wg]
    dg_chunk[...] = jnp.sum(first_column, axis=1)


def _multiply_states_in_place(ctx: GradsKdaWarpgroup) -> list[Smem]:
    """S * dS element by element, where S was: one tile [64 of V, 64 channels] for every 64 of V."""

    @pl.loop(0, ctx.num_v_tiles)
    def _(n: Index) -> None:
        tile = ctx.state(n)
        state = load(tile).astype(F32)
        dstate = ctx.state(2 + n)[...].astype(F32)
        tile[...] = (state * dstate).astype(BF16)

    plgpu.commit_smem()
    return [ctx.state(n) for n in ctx.v_tiles()]


def _grads_from_start(
    ctx: GradsKdaWarpgroup,
    from_start: Reg,
    fast: Reg,
    dq: Reg,
    dk: Reg,
) -> Grads:
    """dq, dk and z = x dx of what decays by the sums `from_start`; dq, dk are do S^T, dv S^T.

    If `fast`, with pairs of tokens.
    """
    qk = ctx.qk.with_inv_norms()
    weights = ctx.smem.weights

    def with_pairs(dq: Reg, dk: Reg) -> Grads:
        q_from_start = ctx.scratch(0)
        k_from_start = ctx.scratch(1)
        k_growth = ctx.scratch(2)
        x = qk.scaled(Q, ctx.wg)
        x = x * jnp.exp2(from_start)
        q_from_start[...] = x.astype(BF16)
        x = qk.scaled(K, ctx.wg)
        x = x * jnp.exp2(from_start)
        k_from_start[...] = x.astype(BF16)
        x = qk.scaled(K, ctx.wg)
        x = x * jnp.exp2(-from_start)
        k_growth[...] = x.astype(BF16)
        plgpu.commit_smem()
        w_q = weights.at[ctx.traced(0)]
        w_k = weights.at[ctx.traced(1)]
        dq = dot(dq, (w_q, k_growth))
        dk = dot(-dk, (w_k, k_growth))
        dk_early = dot(
            zeros(CHUNK, TILE_K),
            (transposed(w_q), q_from_start),
            (transposed(w_k), k_from_start),
        )
        # With the rounded factors that the matmuls saw, what a pair gives to both its tokens
        # cancels before it.
        z_q = q_from_start[...].astype(F32) * dq
        z_k = k_from_start[...].astype(F32) * dk
        z_early = k_growth[...].astype(F32) * dk_early
        z = z_q + z_k - z_early
        dq = jnp.exp2(from_start) * dq
        dk_late = jnp.exp2(from_start) * dk
        dk_early = jnp.exp2(-from_start) * dk_early
        return dq, dk_late + dk_early, z

    def states_alone(dq: Reg, dk: Reg) -> Grads:
        dq = jnp.exp2(from_start) * dq
        dk = -jnp.exp2(from_start) * dk
        z_q = qk.scaled(Q, ctx.wg) * dq
        z_k = qk.scaled(K, ctx.wg) * dk
        return dq, dk, z_q + z_k

    return lax.cond(fast, with_pairs, states_alone, dq, dk)


def _least(ctx: GradsKdaWarpgroup, sums: Reg) -> Reg:
    """The least sum of all of this warpgroup's channels."""
    line = ctx.smem.min_sums.at[ctx.wg]
    line[...] = jnp.min(sums, axis=1)
    plgpu.commit_smem()
    return jnp.min(plgpu.load(line, layout=COLS))


def _add_strong_pairs(chunk_ctx: GradsKdaWarpgroup, end: Index, grads: Grads) -> Grads:
    """Adds what pairs of tokens give, for any gate, in the steps of GRAD_STEPS below `end`.

    From the middle of a block, a token decays on or back, which takes a factor > 1. Through a middle,
    both tokens decay towards it. Where not even blocks of 32 tokens are in range, the squares inside
    them come last.
    """

    def is_left(carry: Carry) -> Reg:
        i, end, _ = carry
        return i < end

    def step(carry: Carry) -> Carry:
        i, end, grads = carry
        ctx = chunk_ctx._replace(zero=chunk_ctx.zero * i)
        ctx = ctx.recompute_addresses(Salt.STEP)
        return _pairs_step(ctx, i, end, grads)

    @pl.when(end > FIRST_STEP)
    def _():
        chunk_ctx.sum_matrix.prefetch(FIRST_STEP)
        chunk_ctx.adjoint_matrix.prefetch(FIRST_STEP)

    first = (jnp.int32(FIRST_STEP), end, grads)
    _, _, grads = lax.while_loop(is_left, step, first)
    return grads


def _pairs_step(ctx: GradsKdaWarpgroup, i: Index, end: Index, grads: Grads) -> Carry:
    """One step: the next one, where they end, and dq, dk, dg with this step's pairs."""
    dq, dk, dg = grads
    # W_q and W_k of these pairs are where dS was, from tile 2 on.
    q = ctx.scratch(0)
    k = ctx.scratch(1)
    k_early = ctx.scratch(2)
    decay_smem = ctx.scratch(3)
    w_q = ctx.scratch(4)
    w_k = ctx.scratch(5)
    from_middle = i == FIRST_STEP
    _write_step_weights(ctx, i)

    log2_decay = ctx.smem.log2_decay.at[ctx.wg]
    sums = ctx.sum_matrix.segment_sum(log2_decay)

    def check_range() -> Reg:
        return _least(ctx, -jnp.abs(sums)) <= -MIDDLE_RANGE

    out_of_range = lax.cond(from_middle, check_range, lambda: jnp.bool_(False))
    end = jnp.where(out_of_range, len(GRAD_MATRICES), end)
    ctx.prefetch_next(ctx.sum_matrix, i, end)
    qk = ctx.qk.with_inv_norms()
    sums += jnp.where(out_of_range, NEVER, 0.0)  # nothing comes of this step then
    early_sign = jnp.where(out_of_range, 0.0, -1.0)
    early_sign = jnp.where(from_middle, early_sign, 1.0)
    early_sums = early_sign * sums
    _write_step_operands(ctx, qk, sums, early_sums)

    # From memory: the sums, or what comes of them, would be registers too many. Rounded, like the
    # operands.
    def late() -> Reg:
        """What q and k decayed by."""
        return decay_smem[...].astype(F32)

    def early() -> Reg:
        """What k_early decayed by: the same, or 1 / the same in a block that has a middle."""
        x = jnp.maximum(late(), 2.0**-MIDDLE_RANGE)
        return jnp.exp2(early_sign * jnp.log2(x))

    # Each result is added before the next matmul; the compiler would keep all three to the end.
    none = zeros(CHUNK, TILE_K)
    # The two signs differ only in a step that is out of range, where dx is 0. Which of them the compiler
    # keeps in a register decides a spill of 4 bytes; like the salts, the choice was found by search.
    sign = jnp.where(from_middle, -1.0, 1.0)
    has_blocks = ctx.has_v_blocks or not ctx.has_all_channels
    if has_blocks and ctx.qk.num_tiles == ctx.num_v_tiles == 2:
        sign = early_sign
    dx = dot(none, (transposed(w_k), k), (transposed(w_q), q))
    dk = dk + early() * dx
    z = sign * k_early[...].astype(F32) * dx
    dk, z = pin((dk, z))
    dx = dot(none, (w_q, k_early))
    dq = dq + late() * dx
    z = z + q[...].astype(F32) * dx
    dq, z = pin((dq, z))
    dx = dot(none, (w_k, k_early))
    dk = dk + late() * dx
    z = z + k[...].astype(F32) * dx
    dk, z = pin((dk, z))
    dg = ctx.segment_sum_adjoint(dg, i, ctx.split(z), end)
    return i + 1, end, (dq, dk, dg)


def _write_step_weights(ctx: GradsKdaWarpgroup, i: Index) -> None:
    """The pairs of step i of W_q and W_k, where dS was: scratch 4 and 5."""

    @pl.loop(0, 2)
    def _(which: Index) -> None:
        pairs = step_pairs(i - FIRST_STEP)
        none = zeros(CHUNK, CHUNK).astype(BF16)
        weights = ctx.smem.weights[which]
        target = ctx.state(2 + which)
        target[...] = jnp.where(pairs, weights, none)

    plgpu.commit_smem()


def _write_step_operands(ctx: GradsKdaWarpgroup, qk: QkTiles, sums: Reg, early_sums: Reg) -> None:
    """q, k and k_early of a step, decayed by the sums, and the decay itself: scratch 0 to 3."""
    decay_smem = ctx.scratch(3)
    decay_smem[...] = jnp.exp2(sums).astype(BF16)
    x = qk.scaled(Q, ctx.wg)
    x = x * jnp.exp2(sums)
    ctx.scratch(0)[...] = x.astype(BF16)
    x = qk.scaled(K, ctx.wg)
    x = x * jnp.exp2(sums)
    ctx.scratch(1)[...] = x.astype(BF16)
    x = qk.scaled(K, ctx.wg)
    early_sums = jnp.minimum(early_sums, MIDDLE_RANGE)
    x = x * jnp.exp2(early_sums)
    ctx.scratch(2)[...] = x.astype(BF16)
    plgpu.commit_smem()
