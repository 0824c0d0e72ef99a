"""Kernel: the gradients of a chunk from the states and cotangents at its two ends, in closed form, for KDA and GDN.

With D_ij the decay from token j to token i, and dv (already times beta) from the reverse scan,

    W_q = tril(do v_new^T),    W_k = -stril(dv v_new^T),    dbeta = (dv . v_new) / beta^2
    dq_i = sum_j W_q_ij D_ij k_j + decay_in_i (do S^T)_i
    dk_i = sum_j (W_k_ij + W_k_ji) D k_j + sum_j W_q_ji D q_j - decay_in_i (dv S^T)_i + decay_out_i (v_new dS^T)_i

and the gate's gradient is closed: where x meets exp(a sum of decays), the cotangent of that sum is x * dx. Two
warpgroups: each has 64 of the channels, from the loads to the stores.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jfla._types import CHUNK
from jfla.pallas import _patterns
from jfla.pallas._chunk import GDN_STEPS, KDA_STEPS, LEVELS, Chunk, Ends, Gradients
from jfla.pallas._keys import BLOCK, K, KeyArrays, KeyOptions, Keys, Q
from jfla.pallas._launch import launch
from jfla.pallas._operands import Place
from jfla.pallas._patterns import FAST_RANGE, Window
from jfla.pallas._tile import (
    BF16,
    COLS,
    F16,
    F32,
    ROWS,
    apart,
    dot,
    index,
    load,
    pair_decay,
    per_column,
    per_row,
    tile_buffer,
    transposed,
    zeros,
)


def weigh(c: Chunk, written_s: Any, own_s: Any, scalar: bool) -> None:
    """W_q by one warpgroup, W_k and dv . v_new by the other; for GDN with the decays, and the pairs' part of dg.

    Both are strictly lower; the diagonal of W_q goes to `own_s`.
    """
    pairs = lambda rows: dot(zeros(CHUNK, CHUNK), *[(rows.at[n], transposed(c.v_new.at[n])) for n in c.values()])
    tile = c.weights.at[c.me]
    lower = lambda w: jnp.where(index(1) < index(0), w, zeros(CHUNK, CHUNK))
    diagonal = lambda w: jnp.sum(jnp.where(index(0) == index(1), w, zeros(CHUNK, CHUNK)), axis=1)

    def decayed(w: jax.Array, which: int) -> jax.Array:
        """w D, and what its pairs P give to dg: P_ij to every token m with i >= m > j."""
        w = w * pair_decay(c.before)
        rows, blocks = (c.keys.q, c.keys.k)[which], [c.at(b) for b in range(c.keys.blocks)]
        dots = dot(zeros(CHUNK, CHUNK), *[(rows.at[b], transposed(c.keys.k.at[b])) for b in blocks])
        p = w * dots * c.keys.scale(which)
        if c.keys.options.qk_norm:
            p = p * lax.optimization_barrier(per_row(c.keys.factor(which), CHUNK))
            p = p * lax.optimization_barrier(per_column(c.keys.factor(K, COLS), CHUNK))
        tile[...] = p.astype(BF16)
        plgpu.commit_smem()
        p = c.spread(zeros(CHUNK, CHUNK), 0, len(GDN_STEPS), [tile])
        c.rows.at[0, c.me][...] = jnp.sum(lower(p), axis=1)
        return w

    @pl.when(c.me == 0)
    def _queries():
        w = pairs(c.do)
        own_s[...] = diagonal(w)
        w = lower(w)
        tile[...] = (decayed(w, Q) if scalar else w).astype(BF16)

    @pl.when(c.me == 1)
    def _keys():
        w = pairs(c.dv)
        written_s[...] = diagonal(w)
        w = lower(-w)
        tile[...] = (decayed(w, K) if scalar else w).astype(BF16)


def meet_states(c: Chunk, values: Any, first: int) -> jax.Array:
    """values [C, V] @ the state that begins at tile `first`: [C, 64]."""
    tiles = [(values.at[n], c.states.at[c.at(first) + n]) for n in c.values()]
    return dot(zeros(CHUNK, BLOCK), *tiles)


def through_the_chunk(c: Chunk, step: int, steps: int) -> jax.Array:
    """sum_v S dS, given to every token's decay, before that decay is applied. Leaves two tiles of scratch."""
    tiles = [c.states.at[c.at(0) + n] for n in c.values()]
    for n, tile in enumerate(tiles):
        tile[...] = (load(tile).astype(F32) * load(c.states.at[c.at(2 + n)]).astype(F32)).astype(BF16)
    plgpu.commit_smem()
    return c.spread(zeros(CHUNK, BLOCK), step, steps, tiles)


def channels_gdn(c: Chunk) -> tuple[jax.Array, jax.Array, jax.Array]:
    """dq, dk, dg [C, 64] of this warpgroup's channels; the pairs' part of dg is in `rows` already."""
    before = plgpu.load(c.before, layout=ROWS)
    last = plgpu.layout_cast(lax.broadcast_in_dim(c.before[CHUNK - 1], (CHUNK,), []), ROWS)
    decay = lambda x: per_row(jnp.exp2(x), BLOCK)
    steps = len(GDN_STEPS)
    dq, dk = meet_states(c, c.do, 0), meet_states(c, c.dv, 0)
    c.meet()
    dg = decay(last) * through_the_chunk(c, 1, steps)
    dq, dk = decay(before) * dq, -decay(before) * dk
    dg = c.spread(dg, 2, steps, c.split(c.keys.read(Q, c.me) * dq + c.keys.read(K, c.me) * dk))
    dk_out = decay(last - before) * meet_states(c, c.v_new, 2)
    dg = c.spread(dg, 3, steps, c.split(c.keys.read(K, c.me) * dk_out))
    k, q = c.scratch(0), c.scratch(1)
    k[...] = c.keys.read(K, c.me).astype(BF16)
    q[...] = c.keys.read(Q, c.me).astype(BF16)
    plgpu.commit_smem()
    w_q, w_k = c.weights.at[c.at(0)], c.weights.at[c.at(1)]
    dk = dot(dk + dk_out, (w_k, k), (transposed(w_k), k), (transposed(w_q), q))
    return dot(dq, (w_q, k)), dk, dg


def channels_kda(c: Chunk, flags: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The same. Where the chunk's gates allow, its pairs decay from the chunk's start, which takes one factor > 1."""
    steps = len(KDA_STEPS)
    dq, dk = meet_states(c, c.do, 0), meet_states(c, c.dv, 0)
    c.meet()
    e = jnp.exp2(c.exponent(0))
    dg = e * through_the_chunk(c, 0, steps)

    before = c.exponent(1)
    flags[...] = jnp.min(before, axis=1)
    plgpu.commit_smem()
    fast = jnp.min(plgpu.load(flags, layout=COLS)) > -FAST_RANGE

    def from_start(dq: jax.Array, dk: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        q_in, k_in, k_back = (c.scratch(n) for n in range(3))
        q_in[...] = (c.keys.read(Q, c.me) * jnp.exp2(before)).astype(BF16)
        k_in[...] = (c.keys.read(K, c.me) * jnp.exp2(before)).astype(BF16)
        k_back[...] = (c.keys.read(K, c.me) * jnp.exp2(-before)).astype(BF16)
        plgpu.commit_smem()
        w_q, w_k = c.weights.at[c.at(0)], c.weights.at[c.at(1)]
        dq, dk = dot(dq, (w_q, k_back)), dot(-dk, (w_k, k_back))
        back = dot(zeros(CHUNK, BLOCK), (transposed(w_q), q_in), (transposed(w_k), k_in))
        # With the rounded factors that the matmuls saw, what a pair gives to both its tokens cancels before it.
        z = load(q_in).astype(F32) * dq + load(k_in).astype(F32) * dk - load(k_back).astype(F32) * back
        return jnp.exp2(before) * dq, jnp.exp2(before) * dk + jnp.exp2(-before) * back, z

    def states_alone(dq: jax.Array, dk: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        dq, dk = jnp.exp2(before) * dq, -jnp.exp2(before) * dk
        return dq, dk, c.keys.read(Q, c.me) * dq + c.keys.read(K, c.me) * dk

    dq, dk, z = lax.cond(fast, from_start, states_alone, dq, dk)
    dg = c.spread(dg, 1, steps, c.split(z))

    dk_out = jnp.exp2(c.exponent(2)) * meet_states(c, c.v_new, 2)
    dg = c.spread(dg, 2, steps, c.split(c.keys.read(K, c.me) * dk_out))
    return by_halving(c, jnp.where(fast, 0, LEVELS), (dq, dk + dk_out, dg))


def by_halving(
    c: Chunk, levels: Any, grads: tuple[jax.Array, jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Adds what pairs give, for any gate: from one half of a block to the other all decays through the middle."""
    k_tile, q_tile = c.scratch(0), c.scratch(1)
    none = zeros(CHUNK, CHUNK).astype(BF16)
    across = lambda tile, level: jnp.where(apart(level) == 1, load(tile), none)

    def halving(i: Any, grads: tuple[jax.Array, jax.Array, jax.Array]):
        dq, dk, dg = grads
        level, step = LEVELS - 1 - i, 3 + i
        e = jnp.exp2(c.exponent(step))
        k_tile[...] = (c.keys.read(K, c.me) * e).astype(BF16)
        q_tile[...] = (c.keys.read(Q, c.me) * e).astype(BF16)
        plgpu.commit_smem()
        w_q, w_k = c.weights.at[c.at(0)], c.weights.at[c.at(1)]
        late = dot(zeros(CHUNK, BLOCK), (across(w_q, level), k_tile))
        dq, z = dq + e * late, load(q_tile).astype(F32) * late
        both = dot(zeros(CHUNK, BLOCK), (across(w_k, level), k_tile))
        both = dot(both, (across(transposed(w_k), level), k_tile))
        both = dot(both, (across(transposed(w_q), level), q_tile))
        z = z + load(k_tile).astype(F32) * both
        return dq, dk + e * both, c.spread(dg, step, len(KDA_STEPS), c.split(z))

    pl.when(levels > 0)(lambda: c.fetch(3))
    return lax.fori_loop(0, levels, halving, grads)


def finish(
    c: Chunk, out: Gradients, own: jax.Array, grads: tuple[jax.Array, jax.Array, jax.Array], scalar: bool
) -> None:
    """What a token gives to itself; the cotangents of what the caller passed as q and k; the stores."""
    dq, dk, dg = grads
    own = per_row(own, BLOCK)
    dq, dk = dq + own * c.keys.read(K, c.me), dk + own * c.keys.read(Q, c.me)
    columns = pl.ds(c.me * BLOCK, BLOCK)
    view = lambda ref: c.keys.place.rows(ref, c.keys.value_heads, columns)
    if scalar:
        c.rows.at[1, c.me][...] = jnp.sum(dg, axis=1)
    else:
        view(out.dg)[...] = dg
    for which, dx in ((Q, dq), (K, dk)):
        dx = dx * c.keys.scale(which)
        if c.keys.options.qk_norm:
            # x = y / |y|, so dy = (dx - x (x . dx)) / |y|, and x . dx takes all channels.
            c.along.at[which, c.me][...] = jnp.sum(c.keys.unit(which, c.me) * dx, axis=1)
            c.meet()
            along: Any = sum(plgpu.load(c.along.at[which, b], layout=ROWS) for b in range(c.keys.blocks))
            dx = dx - c.keys.unit(which, c.me) * per_row(along, BLOCK)
            dx = dx * per_row(c.keys.factor(which), BLOCK)
        target = view((out.dq, out.dk)[which])
        if target.dtype == F32:
            target[...] = dx
        else:
            tile = c.scratch(which)
            tile[...] = dx.astype(BF16)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(tile, target)


def chunk_gradients(
    x: KeyArrays, before: jax.Array | None, ends: Ends, options: KeyOptions, out_dtype: Any
) -> Gradients:
    """`before` [B, HV, N, C]: GDN's running sum of log2 decay; None for KDA."""
    batch, heads, n_chunks, value_dim, key_dim = ends.states.shape
    blocks, value_blocks, scalar = key_dim // BLOCK, value_dim // BLOCK, before is not None
    steps = GDN_STEPS if scalar else KDA_STEPS
    packed = x.resets is not None and not scalar
    sources = [x.q, x.k, *ends, _patterns.stack(BF16, *steps)]
    sources += [before] if scalar else [x.g, x.rates, x.bias, _patterns.stack(F16, *steps)]
    sources += [x.resets] if packed else []

    def kernel(*refs: Any) -> None:
        q_g, k_g, *rest = refs
        ends_g, adjoints_g, rest = Ends(*rest[:5]), rest[5], rest[6:]
        before_g: Any = rest.pop(0) if scalar else None
        none: tuple[Any, ...] = (None,) * 4
        g_g, rates_g, bias_g, sums_g = none if scalar else (rest.pop(0) for _ in range(4))
        resets_g: Any = rest.pop(0) if packed else None
        *outs, (buffers, loaded, meet, windows) = rest
        out = Gradients(*outs)
        (
            q_s,
            k_s,
            norms_s,
            states_s,
            v_new_s,
            do_s,
            dv_s,
            weights_s,
            rows_s,
            along_s,
            written_s,
            own_s,
            flags_s,
            window_s,
            *buffers,
        ) = buffers
        before_s, g_s, bias_s, resets_s, sums_s = buffers
        me = lax.axis_index("wg")
        place = Place(lax.axis_index("sequence"), lax.axis_index("head"), lax.axis_index("chunk"))
        keys = Keys(options, place, heads, blocks, q_s, k_s, norms_s)
        c = Chunk(
            me=me,
            keys=keys,
            arrays=KeyArrays(q_g, k_g, g_g, rates_g, bias_g, resets_g),
            states=states_s.at[lax.rem(me, jnp.int32(blocks))],
            value_blocks=value_blocks,
            v_new=v_new_s,
            do=do_s,
            dv=dv_s,
            weights=weights_s,
            g=g_s,
            before=before_s,
            rows=rows_s,
            along=along_s,
            sums=None if scalar else Window(sums_g, sums_s.at[me], windows.at[2 + me]),
            adjoints=Window(adjoints_g, window_s.at[me], windows.at[me]),
            other=meet,
        )

        def meet_other() -> None:
            plgpu.commit_smem()
            plgpu.barrier_arrive(meet)
            plgpu.barrier_wait(meet)

        def fetch_channels() -> None:
            columns = pl.ds(me * BLOCK, BLOCK)
            keys.fetch(me, q_g, k_g, loaded)
            for first, source in ((0, ends_g.states), (2, ends_g.dends)):
                for n in range(value_blocks):
                    tile = place.tile(source).at[pl.ds(n * BLOCK, BLOCK), columns]
                    plgpu.copy_gmem_to_smem(tile, c.states.at[first + n], loaded)
            if not scalar:
                plgpu.copy_gmem_to_smem(bias_g.at[place.head, columns], bias_s.at[me], loaded)

        def fetch_values(*pairs: tuple[Any, Any]) -> None:
            for source, target in pairs:
                for n in range(value_blocks):
                    view = place.rows(source, heads, pl.ds(n * BLOCK, BLOCK))
                    plgpu.copy_gmem_to_smem(view, target.at[n], loaded)

        @pl.when(me == 0)
        def _():
            fetch_values((ends_g.do, do_s), (ends_g.v_new, v_new_s))

        @pl.when(me == 1)
        def _():
            fetch_values((ends_g.dv, dv_s))
            if scalar:
                plgpu.copy_gmem_to_smem(place.tile(before_g), before_s, loaded)
            if packed:
                tokens = pl.ds(pl.multiple_of(place.chunk * CHUNK, CHUNK), CHUNK)
                plgpu.copy_gmem_to_smem(resets_g.at[place.batch, tokens], resets_s, loaded)

        pl.when(scalar | (me < blocks))(lambda: c.adjoints.fetch(0))
        pl.when(me < blocks)(fetch_channels)
        if not scalar:
            pl.when(me < blocks)(lambda: c.sums.fetch(0))
        plgpu.barrier_wait(loaded)

        @pl.when(me < blocks)
        def _():
            if options.qk_norm:
                keys.measure(me)
            if not scalar:
                raw, bias = keys.raw_gate(c.arrays, me), None if options.kind.name == "given" else bias_s.at[me]
                g_s.at[me][...] = keys.gate(raw, c.arrays, bias, resets_s if packed else None)

        meet_other()
        weigh(c, written_s, own_s, scalar)
        meet_other()

        @pl.when(me < blocks)
        def _():
            grads = channels_gdn(c) if scalar else channels_kda(c, flags_s.at[me])
            finish(c, out, plgpu.load(own_s, layout=ROWS), grads, scalar)

        meet_other()

        @pl.when(me == 0)
        def _():
            place.tile(out.written)[...] = plgpu.load(written_s, layout=ROWS)
            if scalar:
                parts = [rows_s.at[i, w] for i in range(2) for w in range(2 if i == 0 else blocks)]
                place.tile(out.dg)[...] = sum(plgpu.load(part, layout=ROWS) for part in parts)

        plgpu.wait_smem_to_gmem(0)

    shape = jax.ShapeDtypeStruct
    per_head = (*ends.v_new.shape[:3], key_dim)
    per_token = shape((batch, heads, n_chunks, CHUNK), F32)
    tiles = lambda *lead, dtype=BF16: tile_buffer(*lead, CHUNK, BLOCK, dtype=dtype)
    vector = lambda *lead: plgpu.SMEM((*lead, BLOCK), F32)
    out = launch(
        kernel,
        tuple(sources),
        out_type=(
            shape(per_head, out_dtype),
            shape(per_head, out_dtype),
            per_token if scalar else shape(per_head, F32),
            per_token,
        ),
        grid={"chunk": n_chunks, "head": heads, "sequence": batch},
        warpgroups=2,
        buffers=(
            *(tiles(blocks) for _ in range(2)),
            vector(2, blocks),
            tiles(blocks, 4),
            *(tiles(max(value_blocks, blocks)) for _ in range(3)),
            tiles(2),
            vector(2, 2),
            vector(2, blocks),
            vector(),
            vector(),
            vector(blocks),
            tiles(2),
            vector() if scalar else None,
            None if scalar else tiles(blocks, dtype=F16),
            None if scalar else vector(blocks),
            vector() if packed else None,
            None if scalar else tiles(2, dtype=F16),
        ),
        barriers=(
            plgpu.Barrier(
                num_arrivals=blocks * (2 + 2 * value_blocks + (not scalar)) + 3 * value_blocks + scalar + packed
            ),
            plgpu.Barrier(num_arrivals=2),
            plgpu.Barrier(num_arrivals=1, num_barriers=2 if scalar else 4),
        ),
        name="jfla_chunk_gradients",
    )
    return Gradients(*out)
