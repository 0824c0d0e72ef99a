"""Kernel: everything about a chunk that needs no state, for KDA: gate, decayed dots, inverse, operands.

The decayed dots decay from the chunk's start, which takes one factor > 1, in the rows where the gates allow it; what a
row becomes depends on no later token. In the other rows they decay from the block's start inside blocks of 16 tokens,
and between blocks of s tokens through their boundary, where both factors are <= 1, for s = 32, 16; and where not even
16 tokens are in range, for s = 8 .. 1 too, and last a token with itself.

Every program takes chunks until none are left. Two warpgroups share a chunk: each makes the operands of 64 channels,
then one multiplies the rows of q, the other those of k. A third inverts, while the two go on to the next chunk, which
is in shared memory by then.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jfla._types import CHUNK
from jfla.pallas import _patterns
from jfla.pallas._jobs import Handover, Job, Promise
from jfla.pallas._keys import BLOCK, K, KeyArrays, KeyOptions, Keys, Q
from jfla.pallas._operands import Operands, Pairs
from jfla.pallas._patterns import FAST_RANGE, NEAR_STEPS, pairs_in_rows
from jfla.pallas._team import START, STRONG, Barriers, PrepareArrays, Team, Tiles, barriers, buffers
from jfla.pallas._tile import (
    BF16,
    COLS,
    F16,
    F32,
    Inverse,
    dot,
    index,
    load,
    transposed,
    write_inverse,
    write_lower,
    write_numbers,
    zeros,
)
from jfla.pallas._work import Turn, Work


def operands(t: Team, out: Operands, pairs: bool) -> None:
    """q_in, k_in, k_out and the chunk's decay of this warpgroup's channels; and k_back for `pairs`."""
    b, keys = t.me, t.keys.with_factors()
    columns = pl.ds(b * BLOCK, BLOCK)
    sums = lambda pattern: dot(zeros(CHUNK, BLOCK), (pattern, t.s.g.at[b]))
    k = keys.read(K, b)
    k_out = t.s.decayed.at[t.turn.zero]
    k_out.at[b][...] = (k * jnp.exp2(sums(t.s.starts.at[t.turn.zero + 1]))).astype(BF16)
    before = sums(t.s.starts.at[t.turn.zero])
    if pairs:
        t.s.lowest.at[b][...] = jnp.min(before, axis=1)
        t.columns.at[b][...] = (keys.read(K, b) * jnp.exp2(jnp.minimum(-before, FAST_RANGE))).astype(BF16)
    e = jnp.exp2(before)
    keys.k.at[b][...] = (keys.read(K, b) * e).astype(BF16)
    keys.q.at[b][...] = (keys.read(Q, b) * e).astype(BF16)
    # Column 0 of BEFORE is all ones: the sums of all tokens, channels as rows, so that no warp needs another.
    total = dot(zeros(BLOCK, CHUNK), (transposed(t.s.g.at[b]), t.s.starts.at[t.turn.zero]))
    t.s.decay.at[b][...] = jnp.exp2(jnp.sum(jnp.where(index(1, t.numbers) == 0, total, zeros(BLOCK, CHUNK)), axis=1))
    plgpu.commit_smem()
    for source, target in zip((keys.q, keys.k, k_out), out[:3]):
        plgpu.copy_smem_to_gmem(source.at[b], keys.place.tile(target).at[:, columns])
    plgpu.copy_smem_to_gmem(t.s.decay.at[b], keys.place.tile(out.decay).at[columns])


def pair_dots(t: Team) -> jax.Array:
    """[C, C]: q_i . k_j (this is the first warpgroup) or k_i . k_j with the decay from j to i, for j <= i."""
    x = jnp.where(index(1, t.numbers) <= index(0), t.products(t.rows, t.columns), zeros(CHUNK, CHUNK))
    return lax.cond(too_strong(t, t.s.lowest), lambda x: strong_dots(t, x), lambda x: x, x)


def too_strong(t: Team, lowest: Any) -> Any:
    """Whether the gates are for some row."""
    lowest = [plgpu.load(x, layout=COLS) for x in t.all(lowest)]
    return jnp.min(lowest[0] if len(lowest) == 1 else jnp.minimum(*lowest)) <= -FAST_RANGE


def strong_rows(t: Team, lowest: Any) -> jax.Array:
    """[C]: the rows for which they are."""
    lowest = [x[...] for x in t.all(lowest)]
    return (lowest[0] if len(lowest) == 1 else jnp.minimum(*lowest)) <= -FAST_RANGE


def strong_dots(t: Team, x: jax.Array) -> jax.Array:
    """x, with what is right in the rows that the gates are too strong for."""
    t = t.anew(t.turn.number & t.turn.zero)
    t.fetch_again()
    x = inside_blocks(t, x)
    steps = jnp.where(too_strong(t, t.s.near), len(STRONG), NEAR_STEPS)
    return lax.fori_loop(1, steps, lambda i, x: halve(t.anew(i & t.turn.zero), i, steps, x), x)


def inside_blocks(t: Team, x: jax.Array) -> jax.Array:
    """Pairs inside blocks of 16 tokens decay from the block's start, which takes one factor > 1."""
    plgpu.barrier_wait(t.barriers.pattern)

    @t.channels
    def _():
        b, keys = t.me, t.keys.with_factors()
        q, k_back, k = (t.s.decayed.at[t.turn.zero + n, b] for n in range(3))
        sums = dot(zeros(CHUNK, BLOCK), (t.s.pattern.at[t.turn.zero], t.s.g.at[b]))
        t.s.near.at[b][...] = jnp.min(sums, axis=1)
        k_back[...] = (keys.read(K, b) * jnp.exp2(jnp.minimum(-sums, FAST_RANGE))).astype(BF16)
        e = jnp.exp2(sums)
        q[...] = (keys.read(Q, b) * e).astype(BF16)
        k[...] = (keys.read(K, b) * e).astype(BF16)

    t.meet()
    pl.when(t.me == 1)(lambda: t.fetch_pattern(1))
    new = t.products(t.s.decayed.at[2 * t.me], t.columns)
    here = pairs_in_rows(0, strong_rows(t, t.s.lowest), t.numbers) & (index(1, t.numbers) <= index(0))
    t.meet()
    return jnp.where(here, new, x)


def halve(t: Team, i: Any, steps: Any, x: jax.Array) -> jax.Array:
    """Pairs in the squares of step i of STRONG decay through the middle, both factors <= 1; last, a token with itself.

    Those inside blocks of 16 are replaced only in rows that the gates are too strong for even from the block's start.
    """
    plgpu.barrier_wait(t.barriers.pattern)

    @t.channels
    def _():
        b, keys = t.me, t.keys.with_factors()
        e = jnp.exp2(dot(zeros(CHUNK, BLOCK), (t.s.pattern.at[t.turn.zero], t.s.g.at[b])))
        for which in (Q, K):
            t.s.decayed.at[t.turn.zero + which, b][...] = (keys.read(which, b) * e).astype(BF16)

    t.meet()
    pl.when((t.me == 1) & (i + 1 < steps))(lambda: t.fetch_pattern(i + 1))
    new = t.products(t.s.decayed.at[t.me], t.columns)
    here = pairs_in_rows(i, strong_rows(t, t.s.lowest) & ((i < NEAR_STEPS) | strong_rows(t, t.s.near)), t.numbers)
    t.meet()
    return jnp.where(here, new, x)


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
        pl.when(t.me == 1)(t.fetch_beta)
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
        a_qk = t.s.decayed.at[t.turn.zero + 2, t.turn.zero]
        a_qk[...] = x.astype(BF16)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(a_qk, keys.place.tile(pairs.a_qk))

    @pl.when(t.me == 1)
    def _keys():
        roots = t.roots(0)
        plgpu.barrier_wait(t.barriers.taken)
        write_lower(x, roots, t.s.lower.at[t.turn.zero], t.turn.zero)
        plgpu.barrier_arrive(t.barriers.handed)


def invert(t: Team, pairs: Pairs) -> None:
    """What the third warpgroup does."""
    t.fetch_beta()
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    roots = t.roots(1)
    plgpu.barrier_wait(t.barriers.handed)
    zero = t.turn.zero
    lower, work, out = (x.at[zero] for x in (t.s.lower, t.s.work, t.s.inverse))
    write_inverse(Inverse(lower, work, zero, t.numbers), roots, out)
    plgpu.barrier_arrive(t.barriers.taken)
    # The other two have waited for their stores of the chunk before, and met, ere this one was handed.
    pl.when(t.turn.has_last)(lambda: t.handover.tell(t.turn.last_place))
    plgpu.copy_smem_to_gmem(out, t.keys.place.tile(pairs.inverse))


def prepare_kda(x: KeyArrays, beta: jax.Array | None, heads: int, options: KeyOptions, programs: int) -> Promise:
    """The Operands of every chunk, and its Pairs of beta [B, HV, N, 1, C], or None where the caller has them."""
    batch, padded, _, key_dim = x.q.shape
    n_chunks, blocks = padded // CHUNK, key_dim // BLOCK
    work = Work(batch, heads, n_chunks, workers=1, programs=programs)
    with_pairs = beta is not None
    patterns = _patterns.stack(F16, *START, *(STRONG if with_pairs else ()))
    sources, structure = jax.tree.flatten(PrepareArrays(x, beta, patterns))

    def body(refs: list[Any], scratch: Any, program: Any, handover: Handover) -> None:
        arrays: PrepareArrays = structure.unflatten(refs[: len(sources)])
        zero_g, *rest = refs[len(sources) :]
        out, pairs = Operands(*rest[:4]), Pairs(*rest[4:]) if with_pairs else None
        buffers, *barriers = scratch
        s, at, me = Tiles(*buffers), Barriers(*barriers), lax.axis_index("wg")

        def team(turn: Turn) -> Team:
            here = me + turn.zero
            slot = turn.number & 1
            q, k = s.rows.at[slot, turn.zero], s.rows.at[slot, turn.zero + 1]
            return Team(here, turn, Keys(options, turn.place, heads, blocks, q, k, s.norms), arrays, s, at, handover)

        none = jnp.int32(0)
        write_numbers(s.numbers.at[me])

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
                    plgpu.copy_gmem_to_smem(arrays.patterns.at[i], s.starts.at[i], at.started)

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
        (*sources, jnp.zeros(1, jnp.int32)),
        (*out, *(pairs or ())),
        programs=work.used,
        warpgroups=3 if with_pairs else 2,
        buffers=buffers(x, options, blocks, with_pairs),
        barriers=barriers(x, options, blocks),
        body=body,
    )
    return Promise(job, (out, pairs, None))
