"""Kernel: everything about a chunk that needs no state, for GDN: norms, dots, decays, inverse. One chunk a team.

One decay per pair of tokens multiplies an ordinary dot product, and a token's decay multiplies its row afterwards, so
q and k are read as the caller passed them, here and by the scans. A team is two warpgroups: one for the rows of q, one
for those of k.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jfla._types import CHUNK
from jfla.gates import NORM_EPSILON
from jfla.pallas._launch import launch
from jfla.pallas._operands import Operands, Pairs, Place
from jfla.pallas._tile import (
    BF16,
    COLS,
    F16,
    F32,
    ROWS,
    WGMMA,
    dot,
    index,
    per_column,
    per_row,
    tile_buffer,
    transposed,
    unit_lower_inverse,
    zeros,
)

BLOCK = 64


class PrepareConfig(NamedTuple):
    """teams: chunks that one program works on, two warpgroups each."""

    teams: int = 1


class TokenDecays(NamedTuple):
    """Of every chunk, [B, HV, N, C] float32: the running sum of log2 decay, and beta."""

    before: jax.Array
    beta: jax.Array


def prepare_gdn(
    q: jax.Array, k: jax.Array, x: TokenDecays, *, scale: float, qk_norm: bool, config: PrepareConfig
) -> tuple[Operands, Pairs]:
    """The factors of every row of q and k, and the pairs of every chunk."""
    batch, _, _, key_dim = q.shape
    value_heads, n_chunks = x.before.shape[1:3]
    teams, blocks = config.teams, key_dim // BLOCK

    def kernel(q_g, k_g, before_g, beta_g, factors_o, a_o, inverse_o, scoped):
        (q_s, k_s, tokens_s, factors_s, norms_s, a_s, inverse_s, lower_s), loaded, meet = scoped
        wg = lax.axis_index("wg")
        team, me = lax.div(wg, jnp.int32(2)), lax.rem(wg, jnp.int32(2))
        chunk = lax.axis_index("group") * teams + team
        place = Place(lax.axis_index("sequence"), lax.axis_index("head"), chunk)
        q_s, k_s, tokens_s, factors_s, norms_s, a_s, inverse_s, lower_s = (
            ref.at[team] for ref in (q_s, k_s, tokens_s, factors_s, norms_s, a_s, inverse_s, lower_s)
        )
        rows = lambda ref: plgpu.load(ref, layout=ROWS)
        columns = lambda ref: plgpu.load(ref, layout=COLS)

        def load_all():
            for source, target in ((q_g, q_s), (k_g, k_s)):
                plgpu.copy_gmem_to_smem(place.rows(source, value_heads), target, loaded.at[team])
            for i, source in enumerate((before_g, beta_g)):
                plgpu.copy_gmem_to_smem(place.tile(source), tokens_s.at[i], loaded.at[team])

        def norm(tile, i):
            """1 / |row| of a tile, left where both warpgroups find it."""
            total = zeros(CHUNK, BLOCK)
            for b in range(blocks):
                y = plgpu.load(tile.at[:, pl.ds(b * BLOCK, BLOCK)], layout=WGMMA).astype(F32)
                total = total + y * y
            norms_s.at[i][...] = lax.rsqrt(jnp.sum(total, axis=1) + NORM_EPSILON)

        def pairs(tile):
            """decay_ij rows_i k_j, on and below the diagonal."""
            # The barriers keep layout inference from searching through every pair of layouts of one buffer.
            row_sums = lax.optimization_barrier(per_row(rows(tokens_s.at[0]), CHUNK))
            between = row_sums - lax.optimization_barrier(per_column(columns(tokens_s.at[0]), CHUNK))
            dots = dot(zeros(CHUNK, CHUNK), (tile, transposed(k_s)))
            if qk_norm:
                dots = dots * per_column(columns(norms_s.at[1]), CHUNK)
            # Above the diagonal the exponent is positive, and what it gives is dropped.
            return jnp.where(index(1) <= index(0), dots * jnp.exp2(jnp.minimum(between, 0.0)), zeros(CHUNK, CHUNK))

        def factors():
            before = rows(tokens_s.at[0])
            last = plgpu.layout_cast(lax.broadcast_in_dim(tokens_s[0, CHUNK - 1], (CHUNK,), []), ROWS)
            e_in, e_out = jnp.exp2(before), jnp.exp2(last - before)
            q_in, k_in, k_out = e_in * scale, e_in, e_out
            if qk_norm:
                k_norm = rows(norms_s.at[1])
                q_in, k_in, k_out = q_in * rows(norms_s.at[0]), k_in * k_norm, k_out * k_norm
            for i, factor in enumerate((q_in, k_in, k_out, jnp.exp2(last))):
                factors_s.at[i][...] = factor

        @pl.when(chunk < n_chunks)
        def _():
            pl.when(me == 0)(load_all)
            plgpu.barrier_wait(loaded.at[team])
            if qk_norm:
                pl.when(me == 0)(lambda: norm(q_s, 0))
                pl.when(me == 1)(lambda: norm(k_s, 1))
                plgpu.barrier_arrive(meet.at[team])
                plgpu.barrier_wait(meet.at[team])

            @pl.when(me == 0)
            def _queries():
                a = pairs(q_s) * scale
                if qk_norm:
                    a = a * per_row(rows(norms_s.at[0]), CHUNK)
                a_s[...] = a.astype(BF16)
                factors()
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(a_s, place.tile(a_o))
                plgpu.copy_smem_to_gmem(factors_s, place.tile(factors_o))

            @pl.when(me == 1)
            def _keys():
                lower = pairs(k_s) * per_row(rows(tokens_s.at[1]), CHUNK)
                if qk_norm:
                    lower = lower * per_row(rows(norms_s.at[1]), CHUNK)
                lower_s[...] = jnp.where(index(1) < index(0), lower, zeros(CHUNK, CHUNK)).astype(F16)
                inverse = unit_lower_inverse(lower_s) * per_column(columns(tokens_s.at[1]), CHUNK)
                inverse_s[...] = inverse.astype(BF16)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(inverse_s, place.tile(inverse_o))

            plgpu.wait_smem_to_gmem(0)

    shape = jax.ShapeDtypeStruct
    lead = (batch, value_heads, n_chunks)
    square = shape((*lead, CHUNK, CHUNK), BF16)
    decay, a_qk, inverse = launch(
        kernel,
        (q, k, *x),
        out_type=(shape((*lead, 4, CHUNK), F32), square, square),
        grid={"group": -(-n_chunks // teams), "head": value_heads, "sequence": batch},
        warpgroups=2 * teams,
        buffers=(
            tile_buffer(teams, CHUNK, key_dim),
            tile_buffer(teams, CHUNK, key_dim),
            plgpu.SMEM((teams, 2, CHUNK), F32),
            plgpu.SMEM((teams, 4, CHUNK), F32),
            plgpu.SMEM((teams, 2, CHUNK), F32),
            tile_buffer(teams, CHUNK, CHUNK),
            tile_buffer(teams, CHUNK, CHUNK),
            tile_buffer(teams, CHUNK, CHUNK, dtype=F16),
        ),
        barriers=(
            plgpu.Barrier(num_arrivals=4, num_barriers=teams),
            plgpu.Barrier(num_arrivals=2, num_barriers=teams),
        ),
        name="jfla_prepare_gdn",
    )
    return Operands(q, k, k, decay), Pairs(a_qk, inverse)
