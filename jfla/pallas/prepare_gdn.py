"""Kernel: everything about a chunk that needs no state, for GDN: running sum, norms, dots, decays, inverse.

One decay per pair of tokens multiplies an ordinary dot product, and a token's decay multiplies its row afterwards, so
q and k are read as the caller passed them, here and by the scans. Every warpgroup takes chunks of its own until none
are left.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jfla._types import CHUNK
from jfla.pallas._jobs import Handover, Job, Promise
from jfla.pallas._keys import BLOCK, K, KeyOptions, Keys, Q
from jfla.pallas._launch import interpreting
from jfla.pallas._operands import Operands, Pairs
from jfla.pallas._tile import (
    BF16,
    COLS,
    F16,
    F32,
    ROWS,
    Inverse,
    dot,
    index,
    mask_buffer,
    number_buffer,
    pair_decay,
    per_column,
    per_row,
    tile_buffer,
    transposed,
    write_inverse,
    write_lower,
    write_masks,
    write_numbers,
    write_roots,
    zeros,
)
from jfla.pallas._work import Turn, Work

DECAY, BETA = range(2)  # of a token's scalars


class PrepareConfig(NamedTuple):
    """workers: warpgroups of one program. programs: at most."""

    workers: int
    programs: int


# Rows of what is known of tokens: the running sum of log2 decay; 1 / norm of q and k, under qk_norm.
BEFORE, NORMS = 0, 1


class Worker(NamedTuple):
    """The references of one warpgroup and its chunk."""

    keys: Keys
    tile: Any  # float16: what is inverted, and where
    work: Any
    masks: Any  # of the inverse
    tokens: Any  # [1 or 2, C]: log2 decay; beta, for the pairs
    known: Any  # [1 or 3, C]: see BEFORE
    roots: Any  # [2, C]
    factors: Any  # [4, C]
    numbers: Any  # [C]: see `index`
    loaded: Any
    zero: Any

    def at(self, n: int) -> Any:
        return self.zero + n  # `dot` cannot close over a reference that a Python int indexed

    def lower(self) -> jax.Array:
        """True up to the diagonal."""
        return index(1, self.numbers) <= index(0)


def load_chunk(w: Worker, q: Any, k: Any, tokens: Any) -> None:
    keys, place = w.keys, w.keys.place
    if keys.q is not None:
        for b in range(keys.blocks):
            keys.fetch(b, q, k, w.loaded)
    plgpu.copy_gmem_to_smem(place.tile(tokens), w.tokens, w.loaded)
    plgpu.barrier_wait(w.loaded)


def write_factors(w: Worker) -> None:
    """What multiplies a token's row of q and k where they meet the state, and the decay of the whole chunk."""
    keys = w.keys
    columns = lax.optimization_barrier(per_column(plgpu.load(w.tokens.at[DECAY], layout=COLS), CHUNK))
    before = jnp.sum(jnp.where(w.lower(), columns, zeros(CHUNK, CHUNK)), axis=1)
    w.known.at[BEFORE][...] = before
    if keys.options.qk_norm:
        keys.measure(0)
    if w.roots is not None:
        write_roots(w.tokens.at[BETA], w.roots)
    plgpu.commit_smem()
    last = plgpu.layout_cast(lax.broadcast_in_dim(w.known[BEFORE, CHUNK - 1], (CHUNK,), []), ROWS)
    q_in, k_in, k_out = jnp.exp2(before) * keys.options.scale, jnp.exp2(before), jnp.exp2(last - before)
    if keys.options.qk_norm:
        norms = keys.factor(Q), keys.factor(K)
        for which, norm in zip((Q, K), norms):
            w.known.at[NORMS + which][...] = norm
        q_in, k_in, k_out = q_in * norms[Q], k_in * norms[K], k_out * norms[K]
    for i, factor in enumerate((q_in, k_in, k_out, jnp.exp2(last))):
        w.factors.at[i][...] = factor


def write_pairs(w: Worker, pairs: Pairs, wait_for_masks: Callable[[], None]) -> None:
    keys, place = w.keys, w.keys.place
    blocks = [w.at(b) for b in range(keys.blocks)]

    def dots(which: int) -> jax.Array:
        rows = (keys.q, keys.k)[which]
        x = dot(zeros(CHUNK, CHUNK), *[(rows.at[b], transposed(keys.k.at[b])) for b in blocks])
        if keys.options.qk_norm:
            x = x * lax.optimization_barrier(per_row(keys.factor(which), CHUNK))
            x = x * lax.optimization_barrier(per_column(keys.factor(K), CHUNK))
        return x * pair_decay(w.known.at[BEFORE], keys.scale(which))

    # What is stored takes the place of what the dots have read.
    a_qk, inverse = keys.q.at[w.at(0)], keys.k.at[w.at(0)]
    of_q = dots(Q)  # before the mask, which would be held meanwhile
    a_qk[...] = jnp.where(w.lower(), of_q, zeros(CHUNK, CHUNK)).astype(BF16)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(a_qk, place.tile(pairs.a_qk))
    write_lower(dots(K), w.roots, w.tile, w.zero)
    wait_for_masks()
    write_inverse(Inverse(w.tile, w.work, w.zero, masks=w.masks), w.roots, inverse)
    plgpu.copy_smem_to_gmem(inverse, place.tile(pairs.inverse))


def _key_buffers(workers: int, blocks: int) -> Any:
    """For every worker the tiles of q or k, and as many float16 ones, of which `_views` takes one.

    With more than one block they share their memory: what is inverted comes when the dots have read q and k. The race
    detector of interpret mode takes all workers' tiles for one, so there they are apart.
    """
    tiles = [tile_buffer(workers, blocks, CHUNK, BLOCK, dtype=dtype) for dtype in (BF16, F16)]
    return plgpu.RefUnion(*tiles) if blocks > 1 and not interpreting() else tuple(tiles)


def _views(tiles: Any, blocks: int, worker: Any, zero: Any) -> tuple[Any, Any]:
    """A worker's tiles of q or k; and one of float16, in the place of the last, or beside it where it is alone."""
    if tiles is None:
        return None, None
    rows, float16 = tiles
    return rows.at[worker], float16.at[worker, zero + blocks - 1]


def prepare_gdn(q: jax.Array, k: jax.Array, tokens: jax.Array, options: KeyOptions, config: PrepareConfig) -> Promise:
    """Operands: factors of every row of q and k. The Pairs of every chunk, or None.

    And what else is known of tokens, [B, HV, N, 1 or 3, C]: see BEFORE. `tokens` [B, HV, N, S, C] float32: log2 decay,
    and beta unless the pairs are known.
    """
    batch, heads, n_chunks, scalars, _ = tokens.shape
    key_dim, with_pairs = q.shape[-1], scalars > BETA
    blocks, with_keys = key_dim // BLOCK, with_pairs or options.qk_norm
    n_known = 1 + 2 * options.qk_norm
    work = Work(batch, heads, n_chunks, workers=config.workers, programs=config.programs)

    def body(refs: list[Any], scratch: Any, program: Any, handover: Handover) -> None:
        q_g, k_g, tokens_g, zero_g, factors_o, known_o, *pair_o = refs
        (masks_s, q_b, k_b, *vectors, numbers), loaded, masked = scratch
        wg = lax.axis_index("wg")

        def chunk(turn: Turn) -> None:
            place = turn.place
            here = wg + turn.zero
            (q_s, tile_s), (k_s, work_s) = (_views(tiles, blocks, here, turn.zero) for tiles in (q_b, k_b))
            norms_s, *vectors_s = (None if x is None else x.at[here] for x in (*vectors, numbers))
            keys = Keys(options, place, heads, blocks, q_s, k_s, norms_s)
            w = Worker(keys, tile_s, work_s, masks_s, *vectors_s, loaded=loaded.at[wg], zero=turn.zero)
            load_chunk(w, q_g, k_g, tokens_g)
            write_factors(w)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(w.factors, place.tile(factors_o))
            plgpu.copy_smem_to_gmem(w.known, place.tile(known_o))
            if with_pairs:
                once = lambda: pl.when(turn.number == 0)(lambda: plgpu.barrier_wait(masked))
                write_pairs(w, Pairs(*pair_o), once)
            handover.tell(place)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        @pl.when(wg < config.workers)
        def _():
            write_numbers(numbers.at[wg])
            if with_pairs:
                write_masks(masks_s, numbers.at[wg], wg, config.workers)
                plgpu.barrier_arrive(masked)
            work.each_chunk(chunk, program, wg, zero_g)

        plgpu.wait_smem_to_gmem(0)

    shape = jax.ShapeDtypeStruct
    lead = (batch, heads, n_chunks)
    square = lambda: shape((*lead, CHUNK, CHUNK), BF16)
    vector = lambda *shape: plgpu.SMEM((config.workers, *shape, CHUNK), F32)
    decay, known = shape((*lead, 4, CHUNK), F32), shape((*lead, n_known, CHUNK), F32)
    pairs = Pairs(square(), square()) if with_pairs else None
    job = Job(
        "jfla_prepare_gdn",
        (q, k, tokens, jnp.zeros(1, jnp.int32)),
        (decay, known, *(pairs or ())),
        programs=work.used,
        warpgroups=config.workers,
        buffers=(
            mask_buffer() if with_pairs else None,
            _key_buffers(config.workers, blocks) if with_keys else None,
            _key_buffers(config.workers, blocks) if with_keys else None,
            vector(2, 1),
            vector(scalars),
            vector(n_known),
            vector(2) if with_pairs else None,
            vector(4),
            number_buffer(config.workers),
        ),
        barriers=(
            plgpu.Barrier(num_arrivals=1 + 2 * blocks * with_keys, num_barriers=config.workers),
            plgpu.Barrier(num_arrivals=config.workers),
        ),
        body=body,
    )
    return Promise(job, (Operands(q, k, k, decay), pairs, known))
