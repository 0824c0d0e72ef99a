"""Kernel: everything about a chunk that needs no state, for KDA: gate, decayed dots, inverse, operands.

The decayed dots decay from the chunk's start, which takes one factor > 1, in the rows where the chunk's gates allow it;
what a row becomes depends on no later token. In the other rows they go by halving: a square between two blocks of s tokens
decays through their boundary, and both factors are <= 1, for s = 32, 16 .. 1, and last a token with itself.

Every program takes chunks until none are left, several at a time. Two warpgroups share a chunk: each makes the operands
of 64 key channels; then one multiplies the rows of q, the other those of k.
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
from jfla.pallas._keys import BLOCK, K, KeyArrays, KeyOptions, Keys, Q
from jfla.pallas._launch import launch
from jfla.pallas._operands import Operands, Pairs, Place
from jfla.pallas._patterns import FAST_RANGE
from jfla.pallas._tile import (
    BF16,
    COLS,
    F16,
    F32,
    ROWS,
    apart,
    dot,
    index,
    per_row,
    shift,
    tile_buffer,
    transposed,
    write_inverse,
    zeros,
)
from jfla.pallas._work import Work

START = (_patterns.BEFORE, _patterns.AFTER)
HALVING = (*map(_patterns.stretch, reversed(range(6))), np.zeros((CHUNK, CHUNK), bool))


class PrepareConfig(NamedTuple):
    """teams: chunks that one program works on at a time, two warpgroups each. programs: at most."""

    teams: int
    programs: int


class PrepareArrays(NamedTuple):
    """What the kernel reads: beta [B, HV, T], or None where the pairs are known; patterns for START and HALVING."""

    keys: KeyArrays
    beta: Any
    starts: Any
    halving: Any


class Team(NamedTuple):
    """The references of one warpgroup and its chunk. Tiles are [C, 64], one per block of 64 channels."""

    me: Any
    keys: Keys
    arrays: PrepareArrays
    rows: Any  # [2, blocks]: the tiles of q, and those of k
    g: Any  # float16
    back: Any  # k decayed backwards, to the chunk's start
    k_out: Any
    a_qk: Any  # one tile
    lower: Any  # one float16 tile: a pattern of HALVING, then what is inverted
    starts: Any  # the patterns of START
    bias: Any
    resets: Any
    beta: Any
    flags: Any  # [blocks, C]
    decay: Any  # [blocks, 64]
    loaded: Any
    met: Any
    window: Any

    def all(self, tiles: Any) -> list[Any]:
        """Every block's tile; traced numbers, because `dot` cannot close over a reference that a Python int indexed."""
        return [tiles.at[self.me * 0 + b] for b in range(self.keys.blocks)]

    def meet(self) -> None:
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.met)
        plgpu.barrier_wait(self.met)

    def channels(self, body: Callable[[], None], otherwise: Callable[[], None] = lambda: None) -> None:
        """Runs `body` in the warpgroups that have channels."""
        if self.keys.blocks == 2:
            body()
        else:
            lax.cond(self.me == 0, body, otherwise)


def operands(t: Team, out: Operands, pairs: bool) -> None:
    """q_in, k_in, k_out and the chunk's decay of this warpgroup's channels; and k_back for `pairs`."""
    b, keys = t.me, t.keys
    columns = pl.ds(b * BLOCK, BLOCK)
    sums = lambda pattern: dot(zeros(CHUNK, BLOCK), (pattern, t.g.at[b]))
    k = keys.read(K, b)
    t.k_out.at[b][...] = (k * jnp.exp2(sums(t.starts.at[b * 0 + 1]))).astype(BF16)
    before = sums(t.starts.at[b * 0])
    if pairs:
        t.flags.at[b][...] = jnp.min(before, axis=1)
        t.back.at[b][...] = (keys.read(K, b) * jnp.exp2(jnp.minimum(-before, FAST_RANGE))).astype(BF16)
    e = jnp.exp2(before)
    keys.k.at[b][...] = (keys.read(K, b) * e).astype(BF16)
    keys.q.at[b][...] = (keys.read(Q, b) * e).astype(BF16)
    # Column 0 of BEFORE is all ones: the sums of all tokens, channels as rows, so that no warp needs another.
    total = dot(zeros(BLOCK, CHUNK), (transposed(t.g.at[b]), t.starts.at[b * 0]))
    t.decay.at[b][...] = jnp.exp2(jnp.sum(jnp.where(index(1) == 0, total, zeros(BLOCK, CHUNK)), axis=1))
    plgpu.commit_smem()
    for source, target in zip((keys.q, keys.k, t.k_out), out[:3]):
        plgpu.copy_smem_to_gmem(source.at[b], keys.place.tile(target).at[:, columns])
    plgpu.copy_smem_to_gmem(t.decay.at[b], keys.place.tile(out.decay).at[columns])


def dots(t: Team) -> jax.Array:
    """[C, C]: q_i . k_j (this is the first warpgroup) or k_i . k_j with the decay from j to i, for j <= i."""
    zero = zeros(CHUNK, CHUNK)

    rows = t.all(t.rows.at[t.me])
    rows_with = lambda columns: dot(zero, *[(a, transposed(b)) for a, b in zip(rows, t.all(columns))])
    x = jnp.where(index(1) <= index(0), rows_with(t.back), zero)
    lowest = [plgpu.load(flags, layout=COLS) for flags in t.all(t.flags)]
    exact = jnp.min(lowest[0] if len(lowest) == 1 else jnp.minimum(*lowest)) <= -FAST_RANGE
    return lax.fori_loop(0, jnp.where(exact, len(HALVING), 0), lambda i, x: halve(t, i, x, rows_with), x)


def halve(t: Team, i: Any, x: jax.Array, rows_with: Callable[[Any], jax.Array]) -> jax.Array:
    """Replaces the squares of level 5 - i, and last the diagonal, in the rows that the gates are too strong for."""
    keys = t.keys
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    t.meet()  # nobody reads the tiles and the pattern any more
    pl.when(t.me == 1)(lambda: plgpu.copy_gmem_to_smem(t.arrays.halving.at[i], t.lower, t.window))
    plgpu.barrier_wait(t.window)

    @t.channels
    def _():
        b = t.me
        e = jnp.exp2(dot(zeros(CHUNK, BLOCK), (t.lower, t.g.at[b])))
        for which, tile, source in ((Q, keys.q, t.arrays.keys.q), (K, keys.k, t.arrays.keys.k)):
            tile.at[b][...] = (keys.reread(which, source, b) * e).astype(BF16)

    t.meet()
    new = rows_with(keys.k)
    level, differ = jnp.maximum(5 - i, 0), jnp.where(i < 6, 1, 0)
    late = shift(index(0), level) & differ
    square = (apart(level) == differ) & (late == differ)
    lowest = [plgpu.load(flags, layout=ROWS) for flags in t.all(t.flags)]
    lowest = lowest[0] if len(lowest) == 1 else jnp.minimum(*lowest)
    return jnp.where(square & (per_row(lowest, CHUNK) <= -FAST_RANGE), new, x)


def load_chunk(t: Team) -> None:
    """This warpgroup's channels of q, k and g, the last as decay; one warpgroup also brings beta, for itself."""
    keys, b = t.keys, t.me
    tokens = pl.ds(pl.multiple_of(keys.place.chunk * CHUNK, CHUNK), CHUNK)
    if t.beta is not None:
        beta = t.arrays.beta.at[keys.place.batch, keys.place.head, tokens]
        pl.when(b == 1)(lambda: plgpu.copy_gmem_to_smem(beta, t.beta, t.loaded))
    if t.resets is not None:
        resets = t.arrays.keys.resets.at[keys.place.batch, tokens]
        pl.when(b == 0)(lambda: plgpu.copy_gmem_to_smem(resets, t.resets, t.loaded))

    def channels() -> None:
        keys.fetch(b, t.arrays.keys.q, t.arrays.keys.k, t.loaded)
        if t.bias is not None:
            bias = t.arrays.keys.bias.at[keys.place.head, pl.ds(b * BLOCK, BLOCK)]
            plgpu.copy_gmem_to_smem(bias, t.bias.at[b], t.loaded)
        raw = keys.raw_gate(t.arrays.keys, b)
        plgpu.barrier_wait(t.loaded)
        t.g.at[b][...] = keys.gate(raw, t.arrays.keys, None if t.bias is None else t.bias.at[b], t.resets)
        if keys.options.qk_norm:
            keys.measure(b)

    t.channels(channels, otherwise=lambda: plgpu.barrier_wait(t.loaded))


def prepare_chunk(t: Team, out: Operands, pairs: Pairs | None) -> None:
    """The first warpgroup is done before the second, and goes on to the next chunk while the second inverts."""
    keys = t.keys
    load_chunk(t)
    if keys.options.qk_norm and keys.blocks > 1:
        t.meet()
    else:
        plgpu.commit_smem()
    t.channels(lambda: operands(t, out, pairs is not None))
    if pairs is None:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        return
    t.meet()
    x = dots(t)
    t.meet()  # from here on nobody reads a tile of the other

    @pl.when(t.me == 0)
    def _queries():
        t.a_qk[...] = x.astype(BF16)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(t.a_qk, keys.place.tile(pairs.a_qk))

    @pl.when(t.me == 1)
    def _keys():
        tile = t.back.at[1]  # its own, or nobody's
        write_inverse(x, t.lower, t.beta, tile)
        plgpu.copy_smem_to_gmem(tile, keys.place.tile(pairs.inverse))

    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def prepare_kda(
    x: KeyArrays, beta: jax.Array | None, heads: int, options: KeyOptions, config: PrepareConfig
) -> tuple[Operands, Pairs | None]:
    """The operands of every chunk, and its pairs unless the caller has them: beta [B, HV, T], or None."""
    batch, padded, _, key_dim = x.q.shape
    n_chunks, blocks, teams = padded // CHUNK, key_dim // BLOCK, config.teams
    work = Work(batch, heads, n_chunks, workers=teams, programs=config.programs)
    packed, given, with_pairs = x.resets is not None, options.kind.name == "given", beta is not None
    sources = [x.q, x.k, x.g, x.rates, x.bias, _patterns.stack(F16, *START), _patterns.stack(F16, *HALVING)]
    sources += [jnp.zeros(1, jnp.int32)]
    sources += [a for a in (beta, x.resets) if a is not None]

    def kernel(*refs: Any) -> None:
        q_g, k_g, g_g, rates_g, bias_g, starts_g, halving_g, zero_g, *refs = refs
        beta_g = refs.pop(0) if with_pairs else None
        resets_g = refs.pop(0) if packed else None
        *outs, (buffers, loaded, met, window, ready) = refs
        out, pairs = Operands(*outs[:4]), Pairs(*outs[4:]) if with_pairs else None
        starts_s, *buffers = buffers
        wg = lax.axis_index("wg")
        team, me = lax.div(wg, jnp.int32(2)), lax.rem(wg, jnp.int32(2))
        arrays = PrepareArrays(KeyArrays(q_g, k_g, g_g, rates_g, bias_g, resets_g), beta_g, starts_g, halving_g)

        @pl.when(wg == 0)
        def _():
            for i in range(len(START)):
                plgpu.copy_gmem_to_smem(starts_g.at[i], starts_s.at[i], ready)

        plgpu.barrier_wait(ready)

        def chunk(place: Place, slot: Any) -> None:
            rows_s, norms_s, *mine = (None if buffer is None else buffer.at[slot] for buffer in buffers)
            keys = Keys(options, place, heads, blocks, rows_s.at[me * 0], rows_s.at[me * 0 + 1], norms_s)
            barriers = (barrier.at[team] for barrier in (loaded, met, window))
            prepare_chunk(Team(me, keys, arrays, rows_s, *mine[:5], starts_s, *mine[5:], *barriers), out, pairs)

        work.each_chunk(chunk, team, zero_g)
        plgpu.wait_smem_to_gmem(0)

    shape = jax.ShapeDtypeStruct
    lead = (batch, heads, n_chunks)
    square = shape((*lead, CHUNK, CHUNK), BF16)
    tiles = lambda *shape, dtype=BF16: tile_buffer(teams, *shape, CHUNK, BLOCK, dtype=dtype)
    vector = lambda *shape: plgpu.SMEM((teams, *shape, CHUNK), F32)
    out = launch(
        kernel,
        tuple(sources),
        out_type=(
            *(shape((*lead, CHUNK, key_dim), BF16) for _ in range(3)),
            shape((*lead, key_dim), F32),
            *((square, square) if with_pairs else ()),
        ),
        grid={"program": work.used},
        warpgroups=2 * teams,
        buffers=(
            tile_buffer(len(START), CHUNK, CHUNK, dtype=F16),
            tiles(2, blocks),
            vector(2, blocks),
            tiles(blocks, dtype=F16),
            tiles(2) if with_pairs else None,
            tiles(blocks),
            tiles() if with_pairs else None,
            tiles(dtype=F16) if with_pairs else None,
            None if given else vector(blocks),
            vector() if packed else None,
            vector() if with_pairs else None,
            vector(blocks),
            vector(blocks),
        ),
        barriers=(
            plgpu.Barrier(num_arrivals=blocks * (2 + (not given)) + with_pairs + packed, num_barriers=teams),
            plgpu.Barrier(num_arrivals=2, num_barriers=teams),
            plgpu.Barrier(num_arrivals=1, num_barriers=teams),
            plgpu.Barrier(num_arrivals=len(START)),
        ),
        name="jfla_prepare_kda",
    )
    return Operands(*out[:4]), (Pairs(*out[4:]) if with_pairs else None)
