"""Kernel: everything about a chunk that needs no state, for KDA: gate, decayed dots, inverse, operands.

The decayed dots decay from the chunk's start, which takes one factor > 1, in the rows where the gates allow it; what a
row becomes depends on no later token. In the other rows they go by halving: a square between two blocks of s tokens
decays through their boundary, and both factors are <= 1, for s = 32, 16 .. 1, and last a token with itself.

Every program takes chunks until none are left. Two warpgroups share a chunk: each makes the operands of 64 channels,
then one multiplies the rows of q, the other those of k. A third inverts, while the two go on to the next chunk, which
is in shared memory by then.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jfla._types import CHUNK
from jfla.pallas import _patterns
from jfla.pallas._jobs import Handover, Job, Promise
from jfla.pallas._keys import BLOCK, K, KeyArrays, KeyOptions, Keys, Q
from jfla.pallas._operands import Operands, Pairs, Place
from jfla.pallas._patterns import FAST_RANGE
from jfla.pallas._tile import (
    BF16,
    COLS,
    F16,
    F32,
    ROWS,
    Inverse,
    apart,
    dot,
    index,
    load,
    per_row,
    shift,
    tile_buffer,
    transposed,
    write_inverse,
    write_lower,
    zeros,
)
from jfla.pallas._work import Turn, Work

START = (_patterns.BEFORE, _patterns.AFTER)
HALVING = (*map(_patterns.stretch, reversed(range(_patterns.LEVELS))), np.zeros((CHUNK, CHUNK), bool))


class PrepareArrays(NamedTuple):
    """What the kernel reads. roots: of beta, [B, HV, N, 2, C], unless the pairs are known; START and HALVING."""

    keys: KeyArrays
    roots: Any
    starts: Any
    halving: Any


class Tiles(NamedTuple):
    """Shared memory. Tiles are [C, 64], one per block of 64 channels where there are blocks."""

    starts: Any  # the patterns of START, float16
    rows: Any  # [2 chunks, 2, blocks]: q and k, raw and then decayed
    raw: Any  # [blocks]: g as the caller passed it
    norms: Any  # [2, blocks, C]
    g: Any  # [blocks], float16
    k_out: Any  # [blocks]
    decay: Any  # [blocks, 64]
    flags: Any  # [blocks, C]: the strongest sum of decays up to a token
    bias: Any  # [2 chunks, blocks, 64]
    resets: Any  # [2 chunks, blocks, C]
    back: Any  # [blocks]: k decayed backwards, to the chunk's start
    a_qk: Any  # one tile
    pattern: Any  # one float16 tile of HALVING
    lower: Any  # one float16 tile, what is inverted
    work: Any  # one float16 tile
    inverse: Any  # one tile
    roots: Any  # [2, 2, C]: beta's, for the second and the third warpgroup


class Barriers(NamedTuple):
    started: Any
    loaded: Any  # [2 warpgroups * 2 chunks]
    raw: Any  # [2 warpgroups]
    roots: Any  # [2]
    met: Any
    pattern: Any
    handed: Any  # what is inverted is there
    taken: Any  # and may be replaced


class Team(NamedTuple):
    """One warpgroup at one chunk."""

    me: Any
    turn: Turn
    keys: Keys
    arrays: PrepareArrays
    s: Tiles
    barriers: Barriers
    handover: Handover

    def all(self, tiles: Any) -> list[Any]:
        """Every block's tile; traced numbers, because `dot` cannot close over a reference that a Python int indexed."""
        return [tiles.at[self.turn.zero + b] for b in range(self.keys.blocks)]

    def rows_with(self, columns: Any) -> jax.Array:
        """[C, C]: this warpgroup's rows, q or k, times the columns' tiles."""
        rows = self.all(self.s.rows.at[self.turn.number & 1, self.me])
        return dot(zeros(CHUNK, CHUNK), *[(a, transposed(b)) for a, b in zip(rows, self.all(columns))])

    def anew(self, zero: Any) -> "Team":
        """The same, of which the compiler knows nothing yet.

        It would compute what both need once, before a loop that few chunks enter, and keep it in registers meanwhile.
        """
        chunk = self.keys.place.chunk + zero
        slot, rows = self.turn.number & 1, self.s.rows
        keys = self.keys._replace(
            place=self.keys.place._replace(chunk=chunk), q=rows.at[slot, zero], k=rows.at[slot, zero + 1]
        )
        return self._replace(me=self.me + zero, turn=self.turn._replace(zero=zero), keys=keys)

    def meet(self) -> None:
        """Of the two warpgroups that share the chunk."""
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.barriers.met)
        plgpu.barrier_wait(self.barriers.met)

    def channels(self, body: Callable[[], None]) -> None:
        """Runs `body` in the warpgroups that have channels."""
        if self.keys.blocks == 2:
            body()
        else:
            pl.when(self.me == 0)(body)

    def fetch(self, place: Place, number: Any) -> None:
        """q and k of this warpgroup's channels, into the slot of that chunk."""
        b, slot = self.me, number & 1
        barrier, columns = self.barriers.loaded.at[2 * b + slot], pl.ds(b * BLOCK, BLOCK)
        for which, source in ((Q, self.arrays.keys.q), (K, self.arrays.keys.k)):
            view = place.rows(source, self.keys.value_heads, columns)
            plgpu.copy_gmem_to_smem(view, self.s.rows.at[slot, which, b], barrier)
        if self.s.bias is not None:
            plgpu.copy_gmem_to_smem(self.arrays.keys.bias.at[place.head, columns], self.s.bias.at[slot, b], barrier)
        if self.s.resets is not None:
            resets = self.arrays.keys.resets.at[place.batch, place.tokens]
            plgpu.copy_gmem_to_smem(resets, self.s.resets.at[slot, b], barrier)

    def fetch_gate(self, place: Place) -> None:
        view = place.rows(self.arrays.keys.g, self.keys.value_heads, pl.ds(self.me * BLOCK, BLOCK))
        plgpu.copy_gmem_to_smem(view, self.s.raw.at[self.me], self.barriers.raw.at[self.me])

    def fetch_roots(self) -> None:
        """For the warpgroups 1 and 2."""
        place, which = self.keys.place, self.me - 1
        source = place.tile(self.arrays.roots)
        plgpu.copy_gmem_to_smem(source, self.s.roots.at[which], self.barriers.roots.at[which])


def operands(t: Team, out: Operands, pairs: bool) -> None:
    """q_in, k_in, k_out and the chunk's decay of this warpgroup's channels; and k_back for `pairs`."""
    b, keys = t.me, t.keys
    columns = pl.ds(b * BLOCK, BLOCK)
    sums = lambda pattern: dot(zeros(CHUNK, BLOCK), (pattern, t.s.g.at[b]))
    k = keys.read(K, b)
    t.s.k_out.at[b][...] = (k * jnp.exp2(sums(t.s.starts.at[t.turn.zero + 1]))).astype(BF16)
    before = sums(t.s.starts.at[t.turn.zero])
    if pairs:
        t.s.flags.at[b][...] = jnp.min(before, axis=1)
        t.s.back.at[b][...] = (keys.read(K, b) * jnp.exp2(jnp.minimum(-before, FAST_RANGE))).astype(BF16)
    e = jnp.exp2(before)
    keys.k.at[b][...] = (keys.read(K, b) * e).astype(BF16)
    keys.q.at[b][...] = (keys.read(Q, b) * e).astype(BF16)
    # Column 0 of BEFORE is all ones: the sums of all tokens, channels as rows, so that no warp needs another.
    total = dot(zeros(BLOCK, CHUNK), (transposed(t.s.g.at[b]), t.s.starts.at[t.turn.zero]))
    t.s.decay.at[b][...] = jnp.exp2(jnp.sum(jnp.where(index(1) == 0, total, zeros(BLOCK, CHUNK)), axis=1))
    plgpu.commit_smem()
    for source, target in zip((keys.q, keys.k, t.s.k_out), out[:3]):
        plgpu.copy_smem_to_gmem(source.at[b], keys.place.tile(target).at[:, columns])
    plgpu.copy_smem_to_gmem(t.s.decay.at[b], keys.place.tile(out.decay).at[columns])


def pair_dots(t: Team) -> jax.Array:
    """[C, C]: q_i . k_j (this is the first warpgroup) or k_i . k_j with the decay from j to i, for j <= i."""
    x = jnp.where(index(1) <= index(0), t.rows_with(t.s.back), zeros(CHUNK, CHUNK))
    lowest = [plgpu.load(flags, layout=COLS) for flags in t.all(t.s.flags)]
    exact = jnp.min(lowest[0] if len(lowest) == 1 else jnp.minimum(*lowest)) <= -FAST_RANGE
    return lax.fori_loop(0, jnp.where(exact, len(HALVING), 0), lambda i, x: halve(t, i, x), x)


def halve(t: Team, i: Any, x: jax.Array) -> jax.Array:
    """Replaces the squares of level 5 - i, and last the diagonal, in the rows that the gates are too strong for."""
    t = t.anew(i & t.turn.zero)
    keys, pattern = t.keys, t.s.pattern.at[t.turn.zero]
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    t.meet()  # nobody reads the tiles and the pattern any more
    pl.when(t.me == 1)(lambda: plgpu.copy_gmem_to_smem(t.arrays.halving.at[i], pattern, t.barriers.pattern))
    plgpu.barrier_wait(t.barriers.pattern)

    @t.channels
    def _():
        b = t.me
        e = jnp.exp2(dot(zeros(CHUNK, BLOCK), (pattern, t.s.g.at[b])))
        for which, tile, source in ((Q, keys.q, t.arrays.keys.q), (K, keys.k, t.arrays.keys.k)):
            tile.at[b][...] = (keys.reread(which, source, b) * e).astype(BF16)

    t.meet()
    new = t.rows_with(keys.k)
    level, differ = jnp.maximum(5 - i, 0), jnp.where(i < 6, 1, 0)
    late = shift(index(0), level) & differ
    square = (apart(level) == differ) & (late == differ)
    lowest = [plgpu.load(flags, layout=ROWS) for flags in t.all(t.s.flags)]
    lowest = lowest[0] if len(lowest) == 1 else jnp.minimum(*lowest)
    return jnp.where(square & (per_row(lowest, CHUNK) <= -FAST_RANGE), new, x)


def load_chunk(t: Team) -> None:
    """This warpgroup's channels of q, k and g, the last as decay; and the next chunk's are under way."""
    keys, b, slot = t.keys, t.me, t.turn.number & 1
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last chunk's stores, from tiles that are filled again now
    pl.when(t.turn.has_next)(lambda: t.fetch(t.turn.next_place, t.turn.number + 1))
    plgpu.barrier_wait(t.barriers.raw.at[b])
    plgpu.barrier_wait(t.barriers.loaded.at[2 * b + slot])
    bias, resets = (None if x is None else x.at[slot, b] for x in (t.s.bias, t.s.resets))
    t.s.g.at[b][...] = keys.gate(load(t.s.raw.at[b]), t.arrays.keys, bias, resets)
    if keys.options.qk_norm:
        keys.measure(b)
    plgpu.commit_smem()
    pl.when(t.turn.has_next)(lambda: t.fetch_gate(t.turn.next_place))


def share_chunk(t: Team, out: Operands, pairs: Pairs | None) -> None:
    """What the first two warpgroups do with a chunk."""
    keys = t.keys
    if pairs is not None:
        pl.when(t.me == 1)(t.fetch_roots)
    t.channels(lambda: load_chunk(t))
    if t.handover.made is not None:
        plgpu.wait_smem_to_gmem(0)  # those of the chunk before have arrived meanwhile
    share_norms = keys.options.qk_norm and keys.blocks > 1
    if share_norms:
        t.meet()
    t.channels(lambda: operands(t, out, pairs is not None))
    if pairs is None:
        if share_norms:
            t.meet()  # the next chunk's norms take the place of these
        return
    t.meet()
    x = pair_dots(t)
    t.meet()  # from here on nobody reads a tile of the other

    @pl.when(t.me == 0)
    def _queries():
        a_qk = t.s.a_qk.at[t.turn.zero]
        a_qk[...] = x.astype(BF16)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(a_qk, keys.place.tile(pairs.a_qk))

    @pl.when(t.me == 1)
    def _keys():
        plgpu.barrier_wait(t.barriers.roots.at[0])
        plgpu.barrier_wait(t.barriers.taken)
        write_lower(x, t.s.roots.at[t.turn.zero], t.s.lower.at[t.turn.zero], t.turn.zero)
        plgpu.barrier_arrive(t.barriers.handed)


def invert(t: Team, pairs: Pairs) -> None:
    """What the third warpgroup does."""
    t.fetch_roots()
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    plgpu.barrier_wait(t.barriers.roots.at[1])
    plgpu.barrier_wait(t.barriers.handed)
    zero = t.turn.zero
    lower, work, out = (x.at[zero] for x in (t.s.lower, t.s.work, t.s.inverse))
    write_inverse(Inverse(lower, work, zero), t.s.roots.at[zero + 1], out)
    plgpu.barrier_arrive(t.barriers.taken)
    # The other two have waited for their stores of the chunk before, and met, ere this one was handed.
    pl.when(t.turn.has_last)(lambda: t.handover.tell(t.turn.last_place))
    plgpu.copy_smem_to_gmem(out, t.keys.place.tile(pairs.inverse))


def prepare_kda(x: KeyArrays, roots: jax.Array | None, heads: int, options: KeyOptions, programs: int) -> Promise:
    """The Operands of every chunk, and its Pairs, or None where the caller has them: beta's roots [B, HV, N, 2, C]."""
    batch, padded, _, key_dim = x.q.shape
    n_chunks, blocks = padded // CHUNK, key_dim // BLOCK
    work = Work(batch, heads, n_chunks, workers=1, programs=programs)
    packed, with_pairs = x.resets is not None, roots is not None
    sources = [x.q, x.k, x.g, x.rates, x.bias, _patterns.stack(F16, *START), _patterns.stack(F16, *HALVING)]
    sources += [jnp.zeros(1, jnp.int32), *(a for a in (roots, x.resets) if a is not None)]

    def body(refs: list[Any], scratch: Any, program: Any, handover: Handover) -> None:
        q_g, k_g, g_g, rates_g, bias_g, starts_g, halving_g, zero_g, *rest = refs
        roots_g = rest.pop(0) if with_pairs else None
        resets_g = rest.pop(0) if packed else None
        out, pairs = Operands(*rest[:4]), Pairs(*rest[4:]) if with_pairs else None
        buffers, *barriers = scratch
        arrays = PrepareArrays(KeyArrays(q_g, k_g, g_g, rates_g, bias_g, resets_g), roots_g, starts_g, halving_g)
        s, at, me = Tiles(*buffers), Barriers(*barriers), lax.axis_index("wg")

        def team(turn: Turn) -> Team:
            here = me + turn.zero
            slot = turn.number & 1
            q, k = s.rows.at[slot, turn.zero], s.rows.at[slot, turn.zero + 1]
            return Team(here, turn, Keys(options, turn.place, heads, blocks, q, k, s.norms), arrays, s, at, handover)

        none = jnp.int32(0)

        @pl.when(me < 2)
        def _share():
            start = team(Turn(work, program, none, none, none))

            @start.channels
            def _():
                start.fetch(start.keys.place, none)
                start.fetch_gate(start.keys.place)

            @pl.when(me == 0)
            def _():
                for i in range(len(START)):
                    plgpu.copy_gmem_to_smem(starts_g.at[i], s.starts.at[i], at.started)

            plgpu.barrier_wait(at.started)
            work.each_chunk(lambda turn: share_chunk(team(turn), out, pairs), program, 0, zero_g)
            plgpu.wait_smem_to_gmem(0)
            if pairs is not None:
                start.meet()

                @pl.when(me == 1)
                def _():  # once more, for the stores; handed twice before it is taken, the third would wait for ever
                    plgpu.barrier_wait(at.taken)
                    plgpu.barrier_arrive(at.handed)

        if pairs is not None:

            @pl.when(me == 2)
            def _invert():
                plgpu.barrier_arrive(at.taken)
                last = work.each_chunk(lambda turn: invert(team(turn), pairs), program, 0, zero_g)
                plgpu.barrier_wait(at.handed)
                handover.tell(last)

        plgpu.wait_smem_to_gmem(0)

    shape = jax.ShapeDtypeStruct
    lead = (batch, heads, n_chunks)
    operand, square = (lambda: shape((*lead, CHUNK, key_dim), BF16)), (lambda: shape((*lead, CHUNK, CHUNK), BF16))
    out = Operands(operand(), operand(), operand(), shape((*lead, key_dim), F32))
    pairs = Pairs(square(), square()) if with_pairs else None
    job = Job(
        "jfla_prepare_kda",
        tuple(sources),
        (*out, *(pairs or ())),
        programs=work.used,
        warpgroups=3 if with_pairs else 2,
        buffers=_buffers(x, options, blocks, with_pairs),
        barriers=_barriers(x, options),
        body=body,
    )
    return Promise(job, (out, pairs, None))


def _buffers(x: KeyArrays, options: KeyOptions, blocks: int, with_pairs: bool) -> Tiles:
    tiles = lambda *shape, dtype=BF16: tile_buffer(*shape, CHUNK, BLOCK, dtype=dtype)
    vectors = lambda *shape: plgpu.SMEM((*shape, CHUNK), F32)
    return Tiles(
        starts=tiles(len(START), dtype=F16),
        rows=tiles(2, 2, blocks),
        raw=tiles(blocks, dtype=x.g.dtype),
        norms=vectors(2, blocks),
        g=tiles(blocks, dtype=F16),
        k_out=tiles(blocks),
        decay=vectors(blocks),
        flags=vectors(blocks),
        bias=None if options.given else vectors(2, blocks),
        resets=vectors(2, blocks) if x.resets is not None else None,
        back=tiles(blocks) if with_pairs else None,
        a_qk=tiles(1) if with_pairs else None,
        pattern=tiles(1, dtype=F16) if with_pairs else None,
        lower=tiles(1, dtype=F16) if with_pairs else None,
        work=tiles(1, dtype=F16) if with_pairs else None,
        inverse=tiles(1) if with_pairs else None,
        roots=vectors(2, 2) if with_pairs else None,
    )


def _barriers(x: KeyArrays, options: KeyOptions) -> Barriers:
    return Barriers(
        started=plgpu.Barrier(num_arrivals=len(START)),
        loaded=plgpu.Barrier(num_arrivals=2 + (not options.given) + (x.resets is not None), num_barriers=4),
        raw=plgpu.Barrier(num_barriers=2),
        roots=plgpu.Barrier(num_barriers=2),
        met=plgpu.Barrier(num_arrivals=2),
        pattern=plgpu.Barrier(),
        handed=plgpu.Barrier(),
        taken=plgpu.Barrier(),
    )
