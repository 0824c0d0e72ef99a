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
from jfla.pallas._ends import PART, Ends, Gradients
from jfla.pallas._keys import BLOCK, K, KeyOptions, Q
from jfla.pallas._launch import launch
from jfla.pallas._operands import K_IN, K_OUT, Q_IN, WHOLE, Operands, Place
from jfla.pallas._tile import (
    BF16,
    COLS,
    F32,
    ROWS,
    SHARED_MEMORY,
    dots,
    index,
    load,
    pair_decay,
    per_column,
    per_row,
    tile_buffer,
    transposed,
    zeros,
)
from jfla.pallas._work import Turn, Work
from jfla.pallas.prepare_gdn import BEFORE, NORMS

COMPUTING = 2  # warpgroups
DO, DV, V_NEW = range(3)
STATE, DSTATE = range(2)
STAGES = 3  # blocks of V in flight, at most


class Sources(NamedTuple):
    """Device memory: q and k as the caller passed them, what the scans left, and what prepare_gdn knows of tokens."""

    q: Any  # [B, T, H, K]
    k: Any
    ends: Ends
    factors: Any  # [B, HV, N, 4, C]
    known: Any  # [B, HV, N, 1 or 3, C]
    later: Any  # [1] int32 or None: see Within


class Within(NamedTuple):
    """Only of a stretch of time: there are states, dS and v_new of its chunks, and `later` [1] such stretches follow.

    Everything else is of all chunks, and so is `out`, references for the results.
    """

    later: jax.Array
    out: Gradients


class Tiles(NamedTuple):
    """Shared memory. Tiles are [C, 64], vectors [C]; `blocks` counts 64 channels."""

    ends: Any  # [stages, 2, blocks] tiles: 64 rows of S^T and of dS^T
    values: Any  # [stages, 3] tiles: do, dv, v_new
    keys: Any  # [2, blocks] tiles: q and k; then dq and dk
    weights: Any  # [2] tiles: W_q without its diagonal, and W_k
    factors: Any  # [4] vectors
    known: Any  # [1 or 3] vectors
    diagonal: Any  # [2] vectors: do . v_new and dv . v_new
    along: Any  # [2, blocks] vectors: what of dq and dk lies along q and k (qk_norm)
    meeting: Any  # [3, blocks] vectors: x . dx of the decays up to a token; after it; of the whole chunk


class Barriers(NamedTuple):
    full: Any  # [stages]
    empty: Any
    keys: Any  # q, k and what belongs to tokens are there
    done: Any  # and may be replaced
    met: Any


class Shape(NamedTuple):
    """Static. `parts`: of K, 128 channels each, which lie like heads of their own in the order of work."""

    heads: int
    blocks: int
    parts: int
    value_blocks: int
    stages: int
    options: KeyOptions


class Chunk(NamedTuple):
    """One warpgroup at one chunk and part of K."""

    me: Any
    turn: Turn
    shape: Shape
    source: Sources
    s: Tiles
    barriers: Barriers

    @property
    def near(self) -> Place:
        """Of what the scans left of a stretch."""
        place = self.turn.place
        return place._replace(head=lax.div(place.head, jnp.int32(self.shape.parts)))

    @property
    def place(self) -> Place:
        """Of everything else."""
        if self.source.later is None:
            return self.near
        all_chunks, here = self.source.factors.shape[2], self.source.ends.states.shape[2]
        return self.near._replace(chunk=self.turn.place.chunk + all_chunks - (self.source.later[0] + 1) * here)

    @property
    def part(self) -> Any:
        return lax.rem(self.turn.place.head, jnp.int32(self.shape.parts))

    def columns(self, block: Any) -> Any:
        return pl.ds((self.part * self.shape.blocks + block) * BLOCK, BLOCK)

    def slot(self, n: Any) -> tuple[Any, Any]:
        """(number among all of this program's blocks of V, slot) of the chunk's block n."""
        count = self.turn.number * self.shape.value_blocks + n
        return count, lax.rem(count, jnp.int32(self.shape.stages))

    def at(self, n: int) -> Any:
        return self.turn.zero + n  # `dot` cannot close over a reference that a Python int indexed

    @property
    def block(self) -> Any:
        """This warpgroup's channels; with one block both have the same, and the first keeps its results."""
        return self.me if self.shape.blocks == COMPUTING else self.turn.zero

    def meet(self) -> None:
        """Waits for the other warpgroup."""
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.barriers.met)
        plgpu.barrier_wait(self.barriers.met)

    def factor(self, which: int) -> jax.Array:
        """[C, 64]: one of prepare_gdn's factors of rows."""
        return per_row(plgpu.load(self.s.factors.at[which], layout=ROWS), BLOCK)

    def norm(self, which: Any) -> jax.Array:
        """[C]: 1 / norm of q or k."""
        return plgpu.load(self.s.known.at[NORMS + which], layout=ROWS)

    def fetch(self) -> None:
        """Issues the copies of a chunk, each as soon as there is room."""
        for n in range(self.shape.value_blocks):
            count, slot = self.slot(n)
            pl.when(count >= self.shape.stages)(lambda slot=slot: plgpu.barrier_wait(self.barriers.empty.at[slot]))
            self.fetch_block(n, slot)
        pl.when(self.turn.number > 0)(lambda: plgpu.barrier_wait(self.barriers.done))
        place, s = self.place, self.s
        views = [(place.tile(self.source.factors), s.factors), (place.tile(self.source.known), s.known)]
        for which, source in enumerate((self.source.q, self.source.k)):
            for b in range(self.shape.blocks):
                views.append((place.rows(source, self.shape.heads, self.columns(b)), s.keys.at[which, b]))
        for source, target in views:
            plgpu.copy_gmem_to_smem(source, target, self.barriers.keys)

    def fetch_block(self, n: int, slot: Any) -> None:
        rows, ends = pl.ds(n * BLOCK, BLOCK), self.source.ends
        views = [
            (place.rows(source, self.shape.heads, rows), self.s.values.at[slot, which])
            for which, place, source in (
                (DO, self.place, ends.do),
                (DV, self.place, ends.dv),
                (V_NEW, self.near, ends.v_new),
            )
        ]
        for which, source in ((STATE, ends.states), (DSTATE, ends.dends)):
            for b in range(self.shape.blocks):
                views.append((self.near.tile(source).at[rows, self.columns(b)], self.s.ends.at[slot, which, b]))
        for source, target in views:
            plgpu.copy_gmem_to_smem(source, target, self.barriers.full.at[slot])


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
    c.s.diagonal.at[c.me][...] = jnp.sum(jnp.where(index(0) == index(1), w, none), axis=1)
    w = w * pair_decay(c.s.known.at[BEFORE]) * jnp.where(c.me == Q, options.scale, -1.0)
    if options.qk_norm:
        w = w * lax.optimization_barrier(per_row(c.norm(c.me), CHUNK))
        w = w * lax.optimization_barrier(per_column(plgpu.load(c.s.known.at[NORMS + K], layout=COLS), CHUNK))
    c.s.weights.at[c.me][...] = jnp.where(index(1) < index(0), w, none).astype(BF16)


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
    meeting = jnp.where(index(1) >= index(0), up_to, after) + whole * c.s.factors[WHOLE, 0]
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


def results(dims: tuple[int, int, int, int], n_chunks: int, options: KeyOptions, dtype: Any) -> Gradients:
    """Shapes for `dims` (B, T, HV, K). dq, dk: in `dtype`, or float32 where parts of K are left to normalise.

    dg [B, HV * parts of K, N, C], see `whole`.
    """
    batch, _, heads, key_dim = dims
    parts, of = _parts(key_dim), jax.ShapeDtypeStruct
    per_head = of(dims, F32 if parts > 1 and options.qk_norm else dtype)
    by_token = lambda heads: of((batch, heads, n_chunks, CHUNK), F32)
    return Gradients(per_head, per_head, by_token(heads * parts), by_token(heads))


def whole(grads: Gradients) -> Gradients:
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
    within: Within | None = None,
) -> Gradients:
    """`op`, `known`: prepare_gdn's. The results are the references of `within`, where there is one."""
    batch, heads, n_chunks, value_dim, key_dim = ends.states.shape
    blocks, parts = min(key_dim, PART) // BLOCK, _parts(key_dim)
    stages, tiles = _buffers(blocks, known.shape[3])
    shape = Shape(heads, blocks, parts, value_dim // BLOCK, stages, options)
    work = Work(batch, heads * parts, n_chunks, workers=1, programs=programs)
    later = None if within is None else within.later
    sources, structure = jax.tree.flatten(Sources(op.q_in, op.k_in, ends, op.decay, known, later))

    def kernel(*refs: Any) -> None:
        *arrays, zero, dq, dk, dg, written, (tiles, *barriers) = refs
        source, out, s = structure.unflatten(arrays), Gradients(dq, dk, dg, written), Tiles(*tiles)
        wg, program, here = lax.axis_index("wg"), lax.axis_index("program"), Barriers(*barriers)
        chunk = lambda turn: Chunk(wg + turn.zero, turn, shape, source, s, here)

        @pl.when(wg < COMPUTING)
        def _():
            plgpu.set_max_registers(232, action="increase")
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

    shapes = results((*ends.v_new.shape[:3], key_dim), n_chunks, options, out_dtype)
    out = launch(
        kernel,
        (*sources, jnp.zeros(1, jnp.int32), *(within.out if within else ())),
        out_type=() if within else tuple(shapes),
        grid={"program": work.used},
        warpgroups=COMPUTING + 1,
        buffers=tiles,
        barriers=Barriers(
            full=plgpu.Barrier(num_arrivals=3 + 2 * blocks, num_barriers=stages),
            empty=plgpu.Barrier(num_arrivals=COMPUTING, num_barriers=stages),
            keys=plgpu.Barrier(num_arrivals=2 + 2 * blocks),
            done=plgpu.Barrier(num_arrivals=COMPUTING),
            met=plgpu.Barrier(num_arrivals=COMPUTING),
        ),
        name="jfla_gradients_gdn",
    )
    return within.out if within else Gradients(*out)


def _buffers(blocks: int, known: int) -> tuple[int, Tiles]:
    """The blocks of V in flight, as there is room for, and everything in shared memory."""
    vectors = lambda *lead: plgpu.SMEM((*lead, CHUNK), F32)
    tile, rest = 2 * CHUNK * BLOCK, 4 * CHUNK * (4 + known + 2 + 2 * blocks + 3 * blocks)
    stages = min(STAGES, (SHARED_MEMORY - rest - (2 * blocks + 2) * tile) // ((2 * blocks + 3) * tile))
    return stages, Tiles(
        ends=tile_buffer(stages, 2, blocks, CHUNK, BLOCK),
        values=tile_buffer(stages, 3, CHUNK, BLOCK),
        keys=tile_buffer(2, blocks, CHUNK, BLOCK),
        weights=tile_buffer(2, CHUNK, BLOCK),
        factors=vectors(4),
        known=vectors(known),
        diagonal=vectors(2),
        along=vectors(2, blocks),
        meeting=vectors(3, blocks),
    )
