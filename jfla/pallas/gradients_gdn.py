"""Kernel: the gradients of a chunk from the states and cotangents at its two ends, in closed form, for GDN.

With D_ij the decay from token j to token i, q and k as the caller passed them, f their factors (1 / norm; q's times
the scale), and dv (already times beta) from the reverse scan,

    W_q = tril(f_q D f_k do v_new^T),    W_k = -stril(f_k D f_k dv v_new^T),    dbeta = (dv . v_new) / beta^2
    f_q dq_i = sum_j W_q_ij k_j + q_in_i (do S^T)_i
    f_k dk_i = sum_j (W_k_ij + W_k_ji) k_j + sum_j W_q_ji q_j - k_in_i (dv S^T)_i + k_out_i (v_new dS^T)_i

so that no normalised q and k are needed, and the gate's gradient is closed: where x meets exp(a sum of decays), the
cotangent of that sum is x . dx. Two warpgroups take 64 of the channels each; one more issues the copies, of 64 columns
of V at a time and up to a chunk ahead. Programs stay until no chunk is left.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jfla._types import CHUNK
from jfla.pallas._chunk_gdn import (
    COMPUTING,
    DO,
    DSTATE,
    DV,
    STATE,
    V_NEW,
    Barriers,
    Chunk,
    Shape,
    Sources,
    Tiles,
    barriers,
    buffers,
)
from jfla.pallas._ends import PART, Ends, Gradients
from jfla.pallas._keys import BLOCK, K, KeyOptions, Q
from jfla.pallas._launch import launch
from jfla.pallas._operands import K_IN, K_OUT, Q_IN, WHOLE, Operands, Stretch
from jfla.pallas._tile import (
    BF16,
    COLS,
    F32,
    ROWS,
    dots,
    index,
    load,
    pair_decay,
    per_column,
    per_row,
    transposed,
    write_numbers,
    zeros,
)
from jfla.pallas._work import Work
from jfla.pallas.prepare_gdn import BEFORE, NORMS


class Sums(NamedTuple):
    """What a chunk adds up over V: [C, 64] each, and `through` [64], of S dS."""

    dq: jax.Array  # do S^T
    dk: jax.Array  # dv S^T
    dk_out: jax.Array  # v_new dS^T
    w: jax.Array  # do v_new^T in the first warpgroup, dv v_new^T in the second
    through: jax.Array


def add_block(c: Chunk, n: Any, x: Sums) -> Sums:
    """64 columns of V more."""
    _, slot = c.slot(n)
    plgpu.barrier_wait(c.barriers.full.at[slot])
    do, dv, v_new = (c.s.values.at[slot, c.at(which)] for which in (DO, DV, V_NEW))
    state, dstate = (c.s.ends.at[slot, c.at(which), c.block] for which in (STATE, DSTATE))
    both = load(state).astype(F32) * load(dstate).astype(F32)
    through = x.through + jnp.sum(both, axis=1)
    dq, dk, dk_out, w = dots(
        (x.dq, (do, state)),
        (x.dk, (dv, state)),
        (x.dk_out, (v_new, dstate)),
        (x.w, (c.s.values.at[slot, c.me], transposed(v_new))),
    )
    plgpu.commit_smem()  # orders these reads before the copies that reuse the slot
    plgpu.barrier_arrive(c.barriers.empty.at[slot])
    return Sums(dq, dk, dk_out, w, through)


def weigh(c: Chunk, w: jax.Array) -> None:
    """W_q by one warpgroup, W_k by the other, strictly lower; their diagonals apart."""
    none, options = zeros(CHUNK, CHUNK), c.shape.options
    c.s.diagonal.at[c.me][...] = jnp.sum(jnp.where(index(0) == index(1, c.numbers), w, none), axis=1)
    w = w * pair_decay(c.s.known.at[BEFORE]) * jnp.where(c.me == Q, options.scale, -1.0)
    if options.qk_norm:
        w = w * lax.optimization_barrier(per_row(c.norm(c.me), CHUNK))
        w = w * lax.optimization_barrier(per_column(plgpu.load(c.s.known.at[NORMS + K], layout=COLS), CHUNK))
    c.s.weights.at[c.me][...] = jnp.where(index(1, c.numbers) < index(0), w, none).astype(BF16)


def channels(c: Chunk, x: Sums) -> tuple[jax.Array, jax.Array]:
    """f_q dq and f_k dk [C, 64]; and leaves what meets the decays."""
    q, k = (c.s.keys.at[c.at(which), c.block] for which in (Q, K))
    w_q, w_k = c.s.weights.at[c.at(Q)], c.s.weights.at[c.at(K)]
    dq, dk, back = dots(
        (c.factor(Q_IN) * x.dq, (w_q, k)),
        (-c.factor(K_IN) * x.dk, (w_k, k)),
        (zeros(CHUNK, BLOCK), (transposed(w_q), q), (transposed(w_k), k)),
    )
    dk_out = c.factor(K_OUT) * x.dk_out
    rows, columns = load(q).astype(F32), load(k).astype(F32)
    # What a pair gives to both its tokens cancels before it.
    up_to, after, whole = (c.s.meeting.at[i, c.block] for i in range(3))
    up_to[...] = jnp.sum(rows * dq + columns * (dk - back), axis=1)
    after[...] = jnp.sum(columns * dk_out, axis=1)
    whole[...] = x.through
    own = plgpu.load(c.s.diagonal.at[Q], layout=ROWS) * c.shape.options.scale
    if c.shape.options.qk_norm:
        own = own * c.norm(Q) * c.norm(K)
    own = per_row(own, BLOCK)
    return dq + own * columns, dk + back + dk_out + own * rows


def finish(c: Chunk, out: Gradients, grads: tuple[jax.Array, jax.Array]) -> None:
    """The cotangents of what the caller passed as q and k, and their stores."""
    qk_norm, whole_rows = c.shape.options.qk_norm, c.shape.parts == 1
    tiles = [c.s.keys.at[which, c.block] for which in (Q, K)]
    if qk_norm and whole_rows:
        for along, tile, dx in zip((c.s.along.at[Q], c.s.along.at[K]), tiles, grads):
            along.at[c.block][...] = jnp.sum(load(tile).astype(F32) * dx, axis=1)
    if c.shape.blocks == COMPUTING:
        c.meet()
    else:
        plgpu.commit_smem()
    for which, tile, dx, ref in zip((Q, K), tiles, grads, (out.dq, out.dk)):
        if qk_norm and whole_rows:
            # With x = f y, dy = f (dx - x (x . dx)), and x . dx takes all channels.
            norm, along = c.norm(which), c.s.along.at[which]
            total = functools.reduce(jnp.add, [plgpu.load(along.at[b], layout=ROWS) for b in range(c.shape.blocks)])
            dx = dx - load(tile).astype(F32) * per_row(norm * norm * total, BLOCK)
        elif qk_norm:
            dx = dx * per_row(1.0 / c.norm(which), BLOCK)
        view = c.place.rows(ref, c.shape.heads, c.columns(c.block))
        if view.dtype == F32:
            view[...] = dx
        else:
            tile[...] = dx.astype(BF16)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(tile, view)


def write_tokens(c: Chunk, out: Gradients) -> None:
    """dg of the chunk, of this part of K; and dv . v_new."""
    vectors = lambda i: [plgpu.load(c.s.meeting.at[i, b], layout=COLS) for b in range(c.shape.blocks)]
    up_to, after, whole = (per_column(functools.reduce(jnp.add, vectors(i)), CHUNK) for i in range(3))
    meeting = jnp.where(index(1, c.numbers) >= index(0), up_to, after) + whole * c.s.factors[WHOLE, 0]
    c.place._replace(head=c.turn.place.head).tile(out.dg)[...] = jnp.sum(meeting, axis=1)

    @pl.when(c.part == 0)
    def _():
        c.place.tile(out.written)[...] = plgpu.load(c.s.diagonal.at[K], layout=ROWS)


def compute(c: Chunk, out: Gradients) -> None:
    """What a computing warpgroup does with a chunk."""
    none = zeros(CHUNK, BLOCK)
    nothing = Sums(none, none, none, none, plgpu.layout_cast(jnp.zeros(BLOCK, F32), ROWS))
    x = lax.fori_loop(0, c.shape.value_blocks, lambda n, x: add_block(c, n, x), nothing)
    plgpu.barrier_wait(c.barriers.keys)
    weigh(c, x.w)
    c.meet()
    pl.when(c.me < c.shape.blocks)(lambda: finish(c, out, channels(c, x)))
    pl.when(c.me == 0)(lambda: write_tokens(c, out))
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    plgpu.commit_smem()
    plgpu.barrier_arrive(c.barriers.done)


def result_shapes(dims: tuple[int, int, int, int], n_chunks: int, options: KeyOptions, dtype: Any) -> Gradients:
    """Shapes for `dims` (B, T, HV, K). dq, dk: in `dtype`, or float32 where parts of K are left to normalise.

    dg [B, HV * parts of K, N, C], see `over_parts`.
    """
    batch, _, heads, key_dim = dims
    parts, of = _parts(key_dim), jax.ShapeDtypeStruct
    per_head = of(dims, F32 if parts > 1 and options.qk_norm else dtype)
    by_token = lambda heads: of((batch, heads, n_chunks, CHUNK), F32)
    return Gradients(per_head, per_head, by_token(heads * parts), by_token(heads))


def over_parts(grads: Gradients) -> Gradients:
    """With dg summed over parts of K."""
    batch, heads, n_chunks, _ = grads.written.shape
    return grads._replace(dg=jnp.sum(grads.dg.reshape(batch, heads, -1, n_chunks, CHUNK), axis=2))


def _parts(key_dim: int) -> int:
    return max(key_dim // PART, 1)


def gradients_gdn(
    op: Operands,
    known: jax.Array,
    ends: Ends,
    options: KeyOptions,
    programs: int,
    out_dtype: Any,
    stretch: Stretch | None = None,
) -> Gradients:
    """`op`, `known`: prepare_gdn's. Of a stretch of time the results are its references."""
    batch, heads, n_chunks, value_dim, key_dim = ends.states.shape
    blocks, parts = min(key_dim, PART) // BLOCK, _parts(key_dim)
    stages, tiles = buffers(blocks, known.shape[3])
    shape = Shape(heads, blocks, parts, value_dim // BLOCK, stages, options)
    work = Work(batch, heads * parts, n_chunks, workers=1, programs=programs)
    later, kept = (None, None) if stretch is None else stretch
    sources, structure = jax.tree.flatten(Sources(op.q_in, op.k_in, ends, op.decay, known, later))

    def kernel(*refs: Any) -> None:
        *arrays, zero, dq, dk, dg, written, (tiles, *barriers) = refs
        source, out, s = structure.unflatten(arrays), Gradients(dq, dk, dg, written), Tiles(*tiles)
        wg, program, here = lax.axis_index("wg"), lax.axis_index("program"), Barriers(*barriers)
        chunk = lambda turn: Chunk(wg + turn.zero, turn, shape, source, s, here)

        @pl.when(wg < COMPUTING)
        def _():
            plgpu.set_max_registers(232, action="increase")
            write_numbers(s.numbers.at[wg])
            work.each_chunk(lambda turn: compute(chunk(turn), out), program, 0, zero)
            plgpu.wait_smem_to_gmem(0)

        @pl.when(wg == COMPUTING)
        def _():
            plgpu.set_max_registers(40, action="decrease")
            work.each_chunk(lambda turn: chunk(turn).fetch(), program, 0, zero)
            # Every arrival has to be observed.
            count = work.count(program, 0) * shape.value_blocks
            pl.loop(jnp.maximum(count - stages, 0), count)(
                lambda i: plgpu.barrier_wait(here.empty.at[lax.rem(i, jnp.int32(stages))])
            )
            plgpu.barrier_wait(here.done)

    shapes = result_shapes((*ends.v_new.shape[:3], key_dim), n_chunks, options, out_dtype)
    out = launch(
        kernel,
        (*sources, jnp.zeros(1, jnp.int32), *(kept or ())),
        out_type=() if kept else tuple(shapes),
        grid={"program": work.used},
        warpgroups=COMPUTING + 1,
        buffers=tiles,
        barriers=barriers(blocks, stages),
        name="jfla_gradients_gdn",
    )
    return kept or Gradients(*out)
