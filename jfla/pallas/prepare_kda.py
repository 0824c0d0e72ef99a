"""Kernel: everything about a chunk that needs no state, for KDA: gate, decayed dots, inverse, operands.

Every exponent is a sum of decays over a stretch of tokens, taken on the tensor cores as (matrix of ones) @ g with g in
two bf16 parts: nothing is ever subtracted, so no gate is too strong. The decayed dots go by halving: a square between
two blocks of s tokens decays through their boundary, and both factors are <= 1. The four diagonal blocks of 16 tokens
decay from their own first row (one factor > 1: the fast form) where the chunk's gates allow, else by halving down to 1.

A team is two warpgroups: each makes the operands of every other 64 key channels; then one multiplies the rows of q, the
other those of k.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jfla._types import CHUNK
from jfla.gates import NORM_EPSILON
from jfla.pallas._gate import GateKind, log2_decay, with_resets
from jfla.pallas._launch import launch
from jfla.pallas._operands import Operands, Pairs, Place
from jfla.pallas._tile import (
    BF16,
    COLS,
    F16,
    F32,
    ROWS,
    WGMMA,
    apart,
    below,
    dot,
    index,
    per_column,
    per_row,
    shift,
    tile_buffer,
    transposed,
    unit_lower_inverse,
    zeros,
)

BLOCK = 64  # key channels per tile
FAST_RANGE = 115.0  # the fast form's exponents (log2) stay below 2^115: finite in float32 and bfloat16 with room for k


class PrepareConfig(NamedTuple):
    """teams: chunks that one program works on, two warpgroups each."""

    teams: int = 1


class PrepareArrays(NamedTuple):
    """What the kernel reads. `rates` [HV, 2], `bias` [HV, K] belong to the gate; `resets` [B, T] to packing."""

    q: jax.Array  # [B, T, H, K]
    k: jax.Array
    g: jax.Array  # [B, T, HV, K], raw when there is a gate
    beta: jax.Array  # [B, HV, T] float32
    rates: jax.Array
    bias: jax.Array
    resets: jax.Array | None


def stretch(level: jax.Array) -> jax.Array:
    """Which g a token sums on its way to the boundary of its block of 2^level: later halves back, earlier ones on."""
    row, column = index(0), index(1)
    back = jnp.where(column <= row, 1, 0)
    return (apart(level) == 0) & (back == (shift(row, level) & 1))


def from_first_row(level: jax.Array) -> jax.Array:
    """Which g a token sums back to the first row of its block of 2^level; none at level 0."""
    column = index(1)
    return (apart(level) == 0) & (column <= index(0)) & ((column & ((1 << level) - 1)) != 0)


def prepare_kda(
    x: PrepareArrays,
    time: int,
    *,
    scale: float,
    qk_norm: bool,
    kind: GateKind,
    config: PrepareConfig,
    with_pairs: bool = True,
) -> tuple[Operands, Pairs | None]:
    """The operands of every chunk, and its pairs unless the caller has them. Tokens from `time` on are padding."""
    batch, padded, _, key_dim = x.q.shape
    value_heads, n_chunks, blocks = x.g.shape[2], padded // CHUNK, key_dim // BLOCK
    teams = config.teams
    packed = x.resets is not None

    def kernel(*refs):
        q_g, k_g, g_g, beta_g, rates_g, bias_g, *refs = refs
        resets_g: Any = refs.pop(0) if packed else None
        q_o, k_in_o, k_out_o, decay_o, *pair_o, scoped = refs
        buffers, loaded, meet = scoped
        wg = lax.axis_index("wg")
        team, me = lax.div(wg, jnp.int32(2)), lax.rem(wg, jnp.int32(2))
        chunk = lax.axis_index("group") * teams + team
        place = Place(lax.axis_index("sequence"), lax.axis_index("head"), chunk)
        q_s, k_s, high_s, low_s, pair_s, a_s, lower_s, bias_s, rows_s, norm_s, flag_s, window_s = (
            b.at[team] for b in buffers
        )
        window_s = window_s.at[me]
        # A reference indexed by a Python int cannot be closed over by the accumulators of `dot`.
        numbers, zero_index, one_index = [wg * 0 + b for b in range(blocks)], wg * 0, wg * 0 + 1

        def meet_other():
            plgpu.commit_smem()
            plgpu.barrier_arrive(meet.at[team])
            plgpu.barrier_wait(meet.at[team])

        def each_block(body):
            """My key channels: every other block of 64."""
            for block in range(0, blocks, 2):
                if block + 1 < blocks:
                    body(me + block)
                else:
                    pl.when(me == 0)(lambda block=block: body(me + block))

        def load_all():
            def block_in(b):
                columns = pl.ds(b * BLOCK, BLOCK)
                for source, target in ((q_g, q_s), (k_g, k_s)):
                    plgpu.copy_gmem_to_smem(place.rows(source, value_heads, columns), target.at[b], loaded.at[team])
                plgpu.copy_gmem_to_smem(bias_g.at[place.head, columns], bias_s.at[b], loaded.at[team])

            each_block(block_in)
            tokens = pl.ds(chunk * CHUNK, CHUNK)

            @pl.when(me == 0)
            def _():
                plgpu.copy_gmem_to_smem(beta_g.at[place.batch, place.head, tokens], rows_s.at[0], loaded.at[team])
                if packed:
                    plgpu.copy_gmem_to_smem(resets_g.at[place.batch, tokens], rows_s.at[1], loaded.at[team])

            plgpu.barrier_wait(loaded.at[team])

        def gate_in(b):
            """g of a block as log2 decay, in two bf16 parts."""
            columns = pl.ds(b * BLOCK, BLOCK)
            g = plgpu.load(place.rows(g_g, value_heads, columns), layout=WGMMA, optimized=False).astype(F32)
            bias = per_column(plgpu.load(bias_s.at[b], layout=COLS), CHUNK) if kind.name != "given" else None
            g = log2_decay(kind, g, (rates_g[place.head, 0], rates_g[place.head, 1]), bias)
            if kind.name != "given" and time != padded:
                g = jnp.where(index(0) + chunk * CHUNK < time, g, zeros(CHUNK, BLOCK))
            if packed:
                g = with_resets(g, plgpu.load(rows_s.at[1], layout=ROWS))
            high = g.astype(BF16)
            high_s.at[b][...] = high
            low_s.at[b][...] = (g - high.astype(F32)).astype(BF16)
            if qk_norm:
                for i, source in enumerate((q_s, k_s)):
                    y = plgpu.load(source.at[b], layout=WGMMA).astype(F32)
                    norm_s.at[i, b][...] = jnp.sum(y * y, axis=1)

        def factor(i):
            """What multiplies each row of q (0) or k (1) under qk_norm: 1 / norm, and for q the scale."""
            total = sum(plgpu.load(norm_s.at[i, b], layout=ROWS) for b in range(blocks))
            return lax.rsqrt(total + NORM_EPSILON) * (scale if i == 0 else 1.0)

        def load(i, b):
            y = plgpu.load((q_s, k_s)[i].at[b], layout=WGMMA).astype(F32)
            if qk_norm:
                return y * per_row(factor(i), BLOCK)
            return y * scale if i == 0 else y

        def sum_over(mask):
            """Sets which g a token sums. In shared memory: as a left operand in registers, a pattern that is known at
            compile time is put there too late for the tensor cores, and part of it is missing."""
            window_s[...] = jnp.where(mask, zeros(CHUNK, CHUNK) + 1.0, zeros(CHUNK, CHUNK)).astype(BF16)
            plgpu.commit_smem()

        def sums(b):
            return dot(zeros(CHUNK, BLOCK), (window_s, high_s.at[b]), (window_s, low_s.at[b]))

        def products(rows, columns, mask, who):
            """The pairs in `mask`, rows @ columns^T over all key channels: q's into A_qk, k's times beta into L."""

            def into(tile, rows, factor):
                pairs = [(pair_s.at[rows, b], transposed(pair_s.at[columns, b])) for b in numbers]
                new = factor(dot(zeros(CHUNK, CHUNK), *pairs)).astype(tile.dtype)
                tile[...] = jnp.where(mask(), new, plgpu.load(tile, layout=WGMMA))

            if 0 in who:
                pl.when(me == 0)(lambda: into(a_s, rows, lambda x: x))
            if 1 in who:
                beta = lambda x: x * per_row(plgpu.load(rows_s.at[0], layout=ROWS), CHUNK)
                pl.when(me == 1)(lambda: into(lower_s, columns if len(who) == 2 else rows, beta))

        def halving(i, _):
            """The squares between blocks of 2^level tokens: rows of q against k, and of k against k."""
            level = 5 - i
            sum_over(stretch(level))

            def operands(b):
                e = jnp.exp2(sums(b))
                pair_s.at[0, b][...] = (load(0, b) * e).astype(BF16)
                pair_s.at[1, b][...] = (load(1, b) * e).astype(BF16)

            each_block(operands)
            meet_other()
            products(zero_index, one_index, lambda: below(level), (0, 1))
            meet_other()
            return _

        def diagonal(level):
            """Blocks of 2^level tokens from their own first rows, which takes one factor > 1. At level 0 all are 1."""
            sum_over(from_first_row(level))
            for which in (1, 0):

                def operands(b, which=which):
                    inside = sums(b)
                    pair_s.at[0, b][...] = (load(which, b) * jnp.exp2(inside)).astype(BF16)
                    if which == 1:
                        pair_s.at[1, b][...] = (load(1, b) * jnp.exp2(-inside)).astype(BF16)

                each_block(operands)
                meet_other()
                mask = lambda which=which: (apart(level) == 0) & (index(1) + which <= index(0))
                products(zero_index, one_index, mask, (which,))
                meet_other()

        def strongest():
            """The largest sum of decays (log2, positive) inside a block of 16 tokens, after its first row."""
            sum_over(from_first_row(jnp.int32(4)))

            def body(b):
                # Per row, then over a vector that every warp holds whole: a reduction across warps would go through one
                # scratch buffer that both warpgroups of a team share.
                flag_s.at[b][...] = jnp.max(-sums(b), axis=1)

            each_block(body)
            meet_other()
            worst = [jnp.max(plgpu.load(flag_s.at[b], layout=COLS)) for b in numbers]
            return functools.reduce(jnp.maximum, worst)

        def write_operands():
            sum_over(index(1) <= index(0))
            for b in numbers:
                e = jnp.exp2(sums(b))
                bias_s.at[b][...] = jnp.sum(jnp.where(index(0) == CHUNK - 1, e, zeros(CHUNK, BLOCK)), axis=0)
                pair_s.at[0, b][...] = (load(1, b) * e).astype(BF16)
                q_s.at[b][...] = (load(0, b) * e).astype(BF16)
            sum_over(index(1) > index(0))
            for b in numbers:
                k_s.at[b][...] = (load(1, b) * jnp.exp2(sums(b))).astype(BF16)
            plgpu.commit_smem()
            for b in numbers:
                columns = pl.ds(b * BLOCK, BLOCK)
                for source, target in ((q_s, q_o), (pair_s.at[0], k_in_o), (k_s, k_out_o)):
                    plgpu.copy_smem_to_gmem(source.at[b], place.tile(target).at[:, columns])
                plgpu.copy_smem_to_gmem(bias_s.at[b], place.tile(decay_o).at[columns])

        @pl.when(chunk < n_chunks)
        def _():
            load_all()
            each_block(gate_in)
            meet_other()
            if not with_pairs:
                pl.when(me == 0)(write_operands)
                plgpu.wait_smem_to_gmem(0)
                return
            empty = lambda tile: tile.__setitem__(..., zeros(CHUNK, CHUNK).astype(tile.dtype))
            pl.when(me == 0)(lambda: empty(a_s))
            pl.when(me == 1)(lambda: empty(lower_s))
            fast = strongest() < FAST_RANGE
            lax.fori_loop(0, jnp.where(fast, 2, 6), halving, jnp.int32(0))
            diagonal(jnp.where(fast, 4, 0))

            @pl.when(me == 0)
            def _queries():
                plgpu.copy_smem_to_gmem(a_s, place.tile(pair_o[0]))
                write_operands()

            @pl.when(me == 1)
            def _keys():
                beta = plgpu.load(rows_s.at[0], layout=COLS)
                inverse = (unit_lower_inverse(lower_s) * per_column(beta, CHUNK)).astype(BF16)
                pair_s.at[1, 0][...] = inverse
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(pair_s.at[1, 0], place.tile(pair_o[1]))

            plgpu.wait_smem_to_gmem(0)

    shape = jax.ShapeDtypeStruct
    tiles = shape((batch, value_heads, n_chunks, CHUNK, key_dim), BF16)
    square = shape((batch, value_heads, n_chunks, CHUNK, CHUNK), BF16)
    decay = shape((batch, value_heads, n_chunks, key_dim), F32)
    key_tile = lambda: tile_buffer(teams, blocks, CHUNK, BLOCK)
    out = launch(
        kernel,
        tuple(a for a in x if a is not None),
        out_type=(tiles, tiles, tiles, decay) + ((square, square) if with_pairs else ()),
        grid={"group": -(-n_chunks // teams), "head": value_heads, "sequence": batch},
        warpgroups=2 * teams,
        buffers=(
            key_tile(),
            key_tile(),
            key_tile(),
            key_tile(),
            tile_buffer(teams, 2, blocks, CHUNK, BLOCK),
            tile_buffer(teams, CHUNK, CHUNK),
            tile_buffer(teams, CHUNK, CHUNK, dtype=F16),
            plgpu.SMEM((teams, blocks, BLOCK), F32),
            plgpu.SMEM((teams, 2, CHUNK), F32),
            plgpu.SMEM((teams, 2, blocks, CHUNK), F32),
            plgpu.SMEM((teams, blocks, BLOCK), F32),
            tile_buffer(teams, 2, CHUNK, CHUNK),
        ),
        barriers=(
            plgpu.Barrier(num_arrivals=3 * blocks + 1 + packed, num_barriers=teams),
            plgpu.Barrier(num_arrivals=2, num_barriers=teams),
        ),
        name="jfla_prepare_kda",
    )
    return Operands(*out[:4]), (Pairs(*out[4:]) if with_pairs else None)
