"""Kernel: the gradients of a chunk from the states and cotangents at its two ends, in closed form, for KDA.

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
from jfla.pallas._channels import channels
from jfla.pallas._chunk_kda import KDA_STEPS, Barriers, Chunk, Sources, Tiles
from jfla.pallas._ends import PART, Ends, Gradients
from jfla.pallas._keys import BLOCK, K, KeyArrays, KeyOptions, Keys, Q
from jfla.pallas._launch import launch
from jfla.pallas._operands import Place
from jfla.pallas._tile import (
    BF16,
    F16,
    F32,
    ROWS,
    dot,
    index,
    per_column,
    per_row,
    tile_buffer,
    transposed,
    zeros,
)


def weigh(c: Chunk) -> None:
    """W_q by one warpgroup; W_k, and dv . v_new, by the other.

    Both are strictly lower; the diagonal of W_q goes to `own`.
    """

    def pairs(values: Any, diagonal: Any, sign: int) -> None:
        none, row, column = zeros(CHUNK, CHUNK), index(0), index(1)
        w = dot(none, *[(values.at[n], transposed(c.s.v_new.at[n])) for n in c.values()])
        diagonal[...] = jnp.sum(jnp.where(row == column, w, none), axis=1)
        c.s.weights.at[c.me][...] = jnp.where(column < row, sign * w, none).astype(BF16)

    pl.when(c.me == 0)(lambda: pairs(c.s.do, c.s.own, 1))
    pl.when(c.me == 1)(lambda: pairs(c.s.dv, c.s.written, -1))


def finish(c: Chunk, out: Gradients, grads: tuple[jax.Array, jax.Array, jax.Array]) -> None:
    """What a token gives to itself; the cotangents of what the caller passed as q and k; the stores."""
    dq, dk, dg = grads
    keys = c.keys.with_factors()
    own = per_row(c.s.own[...], BLOCK)
    dq, dk = dq + own * keys.read(K, c.me), dk + own * keys.read(Q, c.me)
    view = lambda ref: keys.view(ref, c.me)
    view(out.dg)[...] = dg + per_column(c.s.whole[c.me], CHUNK)
    for which, dx in ((Q, dq), (K, dk)):
        dx = dx * keys.scale(which)
        if keys.options.qk_norm and c.all_channels:
            # x = y / |y|, so dy = (dx - x (x . dx)) / |y|, and x . dx takes all channels.
            c.s.along.at[which, c.me][...] = jnp.sum(keys.unit(which, c.me) * dx, axis=1)
            c.meet_channels()
            along: Any = sum(c.s.along[which, b] for b in range(keys.blocks))
            dx = dx - keys.unit(which, c.me) * per_row(along, BLOCK)
            dx = dx * per_row(keys.factor(which), BLOCK)
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
        @pl.loop(0, c.value_blocks)
        def _(n: Any) -> None:
            for source, target in pairs:
                view = place.rows(source, keys.value_heads, pl.ds(n * BLOCK, BLOCK))
                plgpu.copy_gmem_to_smem(view, target.at[n], at.values)

    @channels
    def _():
        keys.fetch(me, x.keys.q, x.keys.k, at.keys)
        if s.bias is not None:
            plgpu.copy_gmem_to_smem(x.keys.bias.at[place.head, keys.columns(me)], s.bias.at[me], at.keys)
        c.sums.fetch(0)

    @pl.when(me == 0)
    def _():
        fetch_values((x.ends.do, s.do), (x.ends.v_new, s.v_new))

    @pl.when(me == 1)
    def _():
        if s.resets is not None:
            plgpu.copy_gmem_to_smem(x.keys.resets.at[place.batch, place.tokens], s.resets, at.keys)
        fetch_values((x.ends.dv, s.dv))

    @channels
    def _():
        c.adjoints.fetch(0)

        @pl.loop(0, c.value_blocks)
        def _(n: Any) -> None:
            for first, source in ((0, x.ends.states), (2, x.ends.dends)):
                plgpu.copy_gmem_to_smem(c.state_source(source, n), c.state(first + n), at.states)

    @channels
    def _():
        raw = keys.raw_gate(x.keys, me)  # under way while the copies are
        plgpu.barrier_wait(at.keys)
        if keys.options.qk_norm:
            keys.measure(me, None if c.all_channels else x.keys)
        s.g.at[me][...] = keys.gate(raw, x.keys, None if keys.options.given else s.bias.at[me], s.resets)

    pl.when(me >= keys.blocks)(lambda: plgpu.barrier_wait(at.keys))
    plgpu.barrier_wait(at.values)
    plgpu.barrier_wait(at.states)


def gradients_kda(x: KeyArrays, ends: Ends, options: KeyOptions, out_dtype: Any) -> Gradients:
    """dq and dk come in `out_dtype`, or in float32 where something is left to do."""
    batch, heads, n_chunks, value_dim, key_dim = ends.states.shape
    of_key, parts = min(key_dim, PART), max(value_dim // PART, 1)  # channels of a part of K; parts of V
    blocks, value_blocks = of_key // BLOCK, value_dim // parts // BLOCK
    if parts > 1 or (of_key < key_dim and options.qk_norm):
        out_dtype = F32
    x, ends = _with_parts_as_heads(x, ends, parts)
    sums, adjoints = _patterns.stack(F16, *KDA_STEPS), _patterns.stack(BF16, *KDA_STEPS)
    sources, structure = jax.tree.flatten(Sources(x, ends, sums, adjoints))

    def kernel(*refs: Any) -> None:
        *arrays, zero, dq, dk, dg, written, (tiles, *barriers) = refs
        source, out, s = structure.unflatten(arrays), Gradients(dq, dk, dg, written), Tiles(*tiles)
        me, part = lax.axis_index("wg"), lax.axis_index("channels")
        place = Place(lax.axis_index("sequence"), lax.axis_index("head"), lax.axis_index("chunk"))
        keys = Keys(options, place, heads * parts, blocks, s.q, s.k, s.norms, part * blocks)
        c = Chunk(me, zero[0], zero[0], keys, source, s, Barriers(*barriers), value_blocks)

        load_chunk(c.anew(8))
        c.meet()
        weigh(c.anew(7))
        c.meet()
        own = c if blocks == 2 else c._replace(me=c.zero)
        pl.when(me < blocks)(lambda: finish(own.anew(2), out, channels(own)))

        @pl.when((me == 0) & (part == 0))
        def _():
            place.tile(out.written)[...] = plgpu.load(s.written, layout=ROWS)

        plgpu.wait_smem_to_gmem(0)

    shape = jax.ShapeDtypeStruct
    per_head = (*ends.v_new.shape[:3], key_dim)
    dq, dk, dg, written = launch(
        kernel,
        (*sources, jnp.zeros(1, jnp.int32)),
        out_type=(
            shape(per_head, out_dtype),
            shape(per_head, out_dtype),
            shape(per_head, F32),
            shape((batch, heads * parts, n_chunks, CHUNK), F32),
        ),
        grid={"chunk": n_chunks, "channels": key_dim // of_key, "head": heads * parts, "sequence": batch},
        warpgroups=2,
        buffers=_buffers(x, options, blocks, value_blocks),
        barriers=_barriers(x, options, blocks, value_blocks),
        name="jfla_gradients_kda",
    )
    dg = jnp.sum(dg.reshape(*x.q.shape[:2], heads, parts, -1), axis=3)
    return Gradients(dq, dk, dg, jnp.sum(written.reshape(batch, heads, parts, n_chunks, CHUNK), axis=2))


def _with_parts_as_heads(x: KeyArrays, ends: Ends, parts: int) -> tuple[KeyArrays, Ends]:
    """Every part of V is a value head of its own; of the states' copies `Chunk.state_source` takes care."""
    if parts == 1:
        return x, ends
    repeat = lambda a: None if a is None else jnp.repeat(a, parts, 0)
    x = x._replace(rates=repeat(x.rates), bias=repeat(x.bias))
    batch, time, heads, _ = ends.v_new.shape
    v_new, do, dv = (a.reshape(batch, time, heads * parts, -1) for a in (ends.v_new, ends.do, ends.dv))
    return x, ends._replace(v_new=v_new, do=do, dv=dv)


def _buffers(x: KeyArrays, options: KeyOptions, blocks: int, value_blocks: int) -> Tiles:
    tiles = lambda *lead, dtype=BF16: tile_buffer(*lead, CHUNK, BLOCK, dtype=dtype)
    vectors = lambda *lead: plgpu.SMEM((*lead, BLOCK), F32)
    return Tiles(
        q=tiles(blocks),
        k=tiles(blocks),
        norms=vectors(2, blocks),
        states=tiles(blocks, 4),
        v_new=tiles(value_blocks),
        do=tiles(max(value_blocks, blocks)),
        dv=tiles(max(value_blocks, blocks)),
        weights=tiles(2),
        whole=vectors(blocks),
        along=vectors(2, blocks),
        written=vectors(),
        own=vectors(),
        flags=vectors(blocks),
        adjoints=tiles(2),
        g=tiles(blocks, dtype=F16),
        bias=None if options.given else vectors(blocks),
        resets=None if x.resets is None else vectors(),
        sums=tiles(2, dtype=F16),
    )


def _barriers(x: KeyArrays, options: KeyOptions, blocks: int, value_blocks: int) -> Barriers:
    packed = x.resets is not None
    return Barriers(
        keys=plgpu.Barrier(num_arrivals=blocks * (2 + (not options.given)) + packed),
        values=plgpu.Barrier(num_arrivals=3 * value_blocks),
        states=plgpu.Barrier(num_arrivals=2 * blocks * value_blocks),
        met=plgpu.Barrier(num_arrivals=2),
        sums=plgpu.Barrier(num_barriers=2),
        adjoints=plgpu.Barrier(num_barriers=2),
    )
