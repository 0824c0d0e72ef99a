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
from jfla.pallas._channels import channels_gdn, channels_kda
from jfla.pallas._chunk import (
    GDN_STEPS,
    KDA_STEPS,
    PART,
    Barriers,
    Chunk,
    Ends,
    Gradients,
    Sources,
    Tiles,
)
from jfla.pallas._keys import BLOCK, K, KeyArrays, KeyOptions, Keys, Q
from jfla.pallas._launch import launch
from jfla.pallas._operands import Place
from jfla.pallas._tile import (
    BF16,
    COLS,
    F16,
    F32,
    ROWS,
    dot,
    index,
    pair_decay,
    per_column,
    per_row,
    tile_buffer,
    transposed,
    zeros,
)


def weigh(c: Chunk, scalar: bool) -> None:
    """W_q by one warpgroup, W_k and dv . v_new by the other; for GDN with the decays, and the pairs' part of dg.

    Both are strictly lower; the diagonal of W_q goes to `own`.
    """
    pairs = lambda rows: dot(zeros(CHUNK, CHUNK), *[(rows.at[n], transposed(c.s.v_new.at[n])) for n in c.values()])
    tile = c.s.weights.at[c.me]
    lower = lambda w: jnp.where(index(1) < index(0), w, zeros(CHUNK, CHUNK))
    diagonal = lambda w: jnp.sum(jnp.where(index(0) == index(1), w, zeros(CHUNK, CHUNK)), axis=1)

    def decayed(w: jax.Array, which: int) -> jax.Array:
        """w D, and what its pairs P give to dg: P_ij to every token m with i >= m > j."""
        w = w * pair_decay(c.s.before)
        rows, blocks = (c.keys.q, c.keys.k)[which], [c.at(b) for b in range(c.keys.blocks)]
        dots = dot(zeros(CHUNK, CHUNK), *[(rows.at[b], transposed(c.keys.k.at[b])) for b in blocks])
        p = w * dots * c.keys.scale(which)
        if c.keys.options.qk_norm:
            p = p * lax.optimization_barrier(per_row(c.keys.factor(which), CHUNK))
            p = p * lax.optimization_barrier(per_column(c.keys.factor(K, COLS), CHUNK))
        tile[...] = p.astype(BF16)
        plgpu.commit_smem()
        p = c.spread(zeros(CHUNK, CHUNK), 0, len(GDN_STEPS), [tile])
        c.s.rows.at[0, c.me][...] = jnp.sum(lower(p), axis=1)
        return w

    @pl.when(c.me == 0)
    def _queries():
        w = pairs(c.s.do)
        c.s.own[...] = diagonal(w)
        w = lower(w)
        tile[...] = (decayed(w, Q) if scalar else w).astype(BF16)

    @pl.when(c.me == 1)
    def _keys():
        w = pairs(c.s.dv)
        c.s.written[...] = diagonal(w)
        w = lower(-w)
        tile[...] = (decayed(w, K) if scalar else w).astype(BF16)


def finish(c: Chunk, out: Gradients, grads: tuple[jax.Array, jax.Array, jax.Array], scalar: bool) -> None:
    """What a token gives to itself; the cotangents of what the caller passed as q and k; the stores."""
    dq, dk, dg = grads
    own = per_row(plgpu.load(c.s.own, layout=ROWS), BLOCK)
    dq, dk = dq + own * c.keys.read(K, c.me), dk + own * c.keys.read(Q, c.me)
    view = lambda ref: c.keys.view(ref, c.me)
    if scalar:
        c.s.rows.at[1, c.me][...] = jnp.sum(dg, axis=1)
    else:
        view(out.dg)[...] = dg + per_column(plgpu.load(c.s.rows.at[1, c.me], layout=COLS), CHUNK)
    for which, dx in ((Q, dq), (K, dk)):
        dx = dx * c.keys.scale(which)
        if c.keys.options.qk_norm and c.all_channels:
            # x = y / |y|, so dy = (dx - x (x . dx)) / |y|, and x . dx takes all channels.
            c.s.along.at[which, c.me][...] = jnp.sum(c.keys.unit(which, c.me) * dx, axis=1)
            c.meet_channels()
            along: Any = sum(plgpu.load(c.s.along.at[which, b], layout=ROWS) for b in range(c.keys.blocks))
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


def load_chunk(c: Chunk) -> None:
    """Copies everything in; then g of this warpgroup's channels as decay, and their norms."""
    keys, x, s, at, me, place = c.keys, c.source, c.s, c.barriers, c.me, c.keys.place
    channels = lambda body: pl.when(me < keys.blocks)(body)

    def fetch_values(*pairs: tuple[Any, Any]) -> None:
        for source, target in pairs:
            for n in range(c.value_blocks):
                view = place.rows(source, keys.value_heads, pl.ds(n * BLOCK, BLOCK))
                plgpu.copy_gmem_to_smem(view, target.at[n], at.values)

    @channels
    def _():
        keys.fetch(me, x.keys.q, x.keys.k, at.keys)
        if s.bias is not None:
            plgpu.copy_gmem_to_smem(x.keys.bias.at[place.head, keys.columns(me)], s.bias.at[me], at.keys)
        if s.g is not None:
            c.sums.fetch(0)

    @pl.when(me == 0)
    def _():
        fetch_values((x.ends.do, s.do), (x.ends.v_new, s.v_new))

    @pl.when(me == 1)
    def _():
        if s.before is not None:
            plgpu.copy_gmem_to_smem(place.tile(x.before), s.before, at.keys)
        if s.resets is not None:
            plgpu.copy_gmem_to_smem(x.keys.resets.at[place.batch, place.tokens], s.resets, at.keys)
        fetch_values((x.ends.dv, s.dv))

    pl.when((s.before is not None) | (me < keys.blocks))(lambda: c.adjoints.fetch(0))

    @channels
    def _():
        for first, source in ((0, x.ends.states), (2, x.ends.dends)):
            for n in range(c.value_blocks):
                plgpu.copy_gmem_to_smem(c.state_source(source, n), c.state(first + n), at.states)

    @channels
    def _():
        raw: Any = None if s.g is None else keys.raw_gate(x.keys, me)  # under way while the copies are
        plgpu.barrier_wait(at.keys)
        if keys.options.qk_norm:
            keys.measure(me, None if c.all_channels else x.keys)
        if s.g is not None:
            s.g.at[me][...] = keys.gate(raw, x.keys, None if keys.options.given else s.bias.at[me], s.resets)

    pl.when(me >= keys.blocks)(lambda: plgpu.barrier_wait(at.keys))
    plgpu.barrier_wait(at.values)
    plgpu.barrier_wait(at.states)


def chunk_gradients(
    x: KeyArrays, before: jax.Array | None, ends: Ends, options: KeyOptions, out_dtype: Any
) -> Gradients:
    """`before` [B, HV, N, C]: GDN's running sum of log2 decay; None for KDA.

    dq and dk come in `out_dtype`, or in float32 where something is left to do.
    """
    batch, heads, n_chunks, value_dim, key_dim = ends.states.shape
    channels, parts = min(key_dim, PART), max(value_dim // PART, 1)  # of K; of V
    blocks, value_blocks, scalar = channels // BLOCK, value_dim // parts // BLOCK, before is not None
    steps = GDN_STEPS if scalar else KDA_STEPS
    if scalar:
        x = KeyArrays(x.q, x.k, None, None, None, None)
    if parts > 1 or (channels < key_dim and options.qk_norm):
        out_dtype = F32
    x, before, ends = _with_parts_as_heads(x, before, ends, parts)
    sums = None if scalar else _patterns.stack(F16, *steps)
    sources, structure = jax.tree.flatten(Sources(x, ends, before, sums, _patterns.stack(BF16, *steps)))

    def kernel(*refs: Any) -> None:
        *arrays, zero, dq, dk, dg, written, (tiles, *barriers) = refs
        source, out, s = structure.unflatten(arrays), Gradients(dq, dk, dg, written), Tiles(*tiles)
        me, part = lax.axis_index("wg"), lax.axis_index("channels")
        place = Place(lax.axis_index("sequence"), lax.axis_index("head"), lax.axis_index("chunk"))
        keys = Keys(options, place, heads * parts, blocks, s.q, s.k, s.norms, part * blocks)
        c = Chunk(me, zero[0], zero[0], keys, source, s, Barriers(*barriers), value_blocks)

        load_chunk(c.anew(0))
        c.meet()
        weigh(c.anew(1), scalar)
        c.meet()
        own = c if blocks == 2 else c._replace(me=c.zero)
        pl.when(me < blocks)(lambda: finish(own.anew(2), out, (channels_gdn if scalar else channels_kda)(own), scalar))
        c.meet()

        @pl.when(me == 0)
        def _():
            here = place._replace(head=place.head * (key_dim // channels) + part)
            here.tile(out.written)[...] = plgpu.load(s.written, layout=ROWS)
            if scalar:
                pieces = [s.rows.at[i, w] for i in range(2) for w in range(2 if i == 0 else blocks)]
                here.tile(out.dg)[...] = sum(plgpu.load(piece, layout=ROWS) for piece in pieces)

        plgpu.wait_smem_to_gmem(0)

    shape = jax.ShapeDtypeStruct
    per_head = (*ends.v_new.shape[:3], key_dim)
    per_token = shape((batch, heads * parts * (key_dim // channels), n_chunks, CHUNK), F32)
    dq, dk, dg, written = launch(
        kernel,
        (*sources, jnp.zeros(1, jnp.int32)),
        out_type=(
            shape(per_head, out_dtype),
            shape(per_head, out_dtype),
            per_token if scalar else shape(per_head, F32),
            per_token,
        ),
        grid={"chunk": n_chunks, "channels": key_dim // channels, "head": heads * parts, "sequence": batch},
        warpgroups=2,
        buffers=_buffers(x, options, blocks, value_blocks),
        barriers=_barriers(x, options, blocks, value_blocks),
        name="jfla_chunk_gradients",
    )
    by_parts = lambda x: x.reshape(batch, heads, parts, -1, n_chunks, CHUNK)
    dg = jnp.sum(by_parts(dg), axis=(2, 3)) if scalar else jnp.sum(dg.reshape(*x.q.shape[:2], heads, parts, -1), axis=3)
    return Gradients(dq, dk, dg, jnp.sum(by_parts(written)[:, :, :, 0], axis=2))


def _with_parts_as_heads(
    x: KeyArrays, before: jax.Array | None, ends: Ends, parts: int
) -> tuple[KeyArrays, jax.Array | None, Ends]:
    """Every part of V is a value head of its own; of the states' copies `Chunk.state_source` takes care."""
    if parts == 1:
        return x, before, ends
    repeat = lambda a, axis: None if a is None else jnp.repeat(a, parts, axis)
    x = x._replace(rates=repeat(x.rates, 0), bias=repeat(x.bias, 0))
    batch, time, heads, _ = ends.v_new.shape
    v_new, do, dv = (a.reshape(batch, time, heads * parts, -1) for a in (ends.v_new, ends.do, ends.dv))
    return x, repeat(before, 1), ends._replace(v_new=v_new, do=do, dv=dv)


def _buffers(x: KeyArrays, options: KeyOptions, blocks: int, value_blocks: int) -> Tiles:
    tiles = lambda *lead, dtype=BF16: tile_buffer(*lead, CHUNK, BLOCK, dtype=dtype)
    vectors = lambda *lead: plgpu.SMEM((*lead, BLOCK), F32)
    scalar = x.g is None
    return Tiles(
        q=tiles(blocks),
        k=tiles(blocks),
        norms=vectors(2, blocks),
        states=tiles(blocks, 4),
        v_new=tiles(value_blocks),
        do=tiles(max(value_blocks, blocks)),
        dv=tiles(max(value_blocks, blocks)),
        weights=tiles(2),
        rows=vectors(2, 2),
        along=vectors(2, blocks),
        written=vectors(),
        own=vectors(),
        flags=vectors(blocks),
        adjoints=tiles(2),
        before=vectors() if scalar else None,
        g=None if scalar else tiles(blocks, dtype=F16),
        bias=None if scalar or options.given else vectors(blocks),
        resets=None if x.resets is None else vectors(),
        sums=None if scalar else tiles(2, dtype=F16),
    )


def _barriers(x: KeyArrays, options: KeyOptions, blocks: int, value_blocks: int) -> Barriers:
    scalar, packed = x.g is None, x.resets is not None
    return Barriers(
        keys=plgpu.Barrier(num_arrivals=blocks * (2 + (not options.given and not scalar)) + scalar + packed),
        values=plgpu.Barrier(num_arrivals=3 * value_blocks),
        states=plgpu.Barrier(num_arrivals=2 * blocks * value_blocks),
        met=plgpu.Barrier(num_arrivals=2),
        sums=plgpu.Barrier(num_barriers=2),
        adjoints=plgpu.Barrier(num_barriers=2),
    )
