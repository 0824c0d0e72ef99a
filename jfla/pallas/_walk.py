"""Walks a state over the chunks of a sequence, forward or in reverse: the shape that all scan kernels share.

One program per sequence, value head, part of time and block of V. Each compute warpgroup owns 64 columns of V and keeps
its state transposed, [V, K], in the accumulators of the tensor cores, from where it is also the left operand: it never
leaves the registers, and everything else is transposed with it. One more warpgroup issues the copies, chunks ahead.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jfla._types import CHUNK
from jfla.pallas._launch import launch
from jfla.pallas._operands import Decays, Operands, Place, decay_buffer
from jfla.pallas._tile import F32, WGMMA, tile_buffer, transposed

BLOCK = 64  # columns of V that one warpgroup owns


class WalkConfig(NamedTuple):
    """v_block: columns of V per program, 64 for each compute warpgroup. stages: chunks in flight."""

    v_block: int = 128
    stages: int = 2


class Tiles(NamedTuple):
    """What a step sees of its chunk, in shared memory: only what the walk was asked to bring."""

    decays: Decays
    q_in: Any
    k_in: Any
    k_out: Any
    a_qk: Any
    inverse: Any
    values: Any  # [C, 64]: this warpgroup's columns of v or do


class Reads(NamedTuple):
    """Which arrays a walk brings, [B, HV, N, C, C] or None, and the values [B, T, HV, V]."""

    queries: bool
    outgoing: bool
    a_qk: jax.Array | None
    inverse: jax.Array | None
    values: jax.Array


Emit = Callable[[int, jax.Array], None]
Step = Callable[[jax.Array, Tiles, Emit], jax.Array]


def walk(
    step: Step,
    op: Operands,
    reads: Reads,
    initial: jax.Array,
    emits: tuple[jax.ShapeDtypeStruct, ...],
    *,
    config: WalkConfig,
    reverse: bool,
    name: str,
) -> list[jax.Array]:
    """Runs `state = step(state, tiles, emit)` over the chunks; returns what was emitted, then the last states.

    `initial` and the last states are [B, HV, P, V, K] float32, one for each of P parts of time. `emit(i, x)` writes the
    chunk's part of output i: x [V, C] into rows of [B, T, HV, V], or x [V, K] into a tile of [B, HV, N, V, K].
    """
    batch, heads, parts, value_dim, key_dim = initial.shape
    n_chunks = reads.values.shape[1] // CHUNK
    per_part = -(-n_chunks // parts)
    v_block, stages = min(config.v_block, value_dim), config.stages
    workers = v_block // BLOCK
    scalar = len(op.decay.shape) == 5
    outgoing = reads.outgoing and not scalar  # GDN has one k
    arrays = [op.k_in, op.decay, reads.values, initial]
    arrays += [a for a, used in ((op.q_in, reads.queries), (op.k_out, outgoing)) if used]
    arrays += [a for a in (reads.a_qk, reads.inverse) if a is not None]

    def kernel(*refs: Any) -> None:
        *in_out, ((q_s, k_in_s, k_out_s, decay_s, a_s, x_s, values_s, *emit_s), full, empty) = refs
        k_in_g, decay_g, values_g, initial_g, *rest = in_out
        q_g, k_out_g, a_g, x_g = (None if s is None else rest.pop(0) for s in (q_s, k_out_s, a_s, x_s))
        *emit_g, last_g = rest
        column, part, head, sequence = (lax.axis_index(axis) for axis in ("column", "part", "head", "sequence"))
        wg = lax.axis_index("wg")
        first = part * per_part
        length = jnp.minimum(per_part, n_chunks - first)
        columns = pl.ds(column * v_block + wg * BLOCK, BLOCK)

        def place(i: Any) -> Place:
            return Place(sequence, head, first + (length - 1 - i if reverse else i))

        def compute() -> None:
            plgpu.set_max_registers(232, action="increase")

            def chunk(i: Any, state: jax.Array) -> jax.Array:
                slot = lax.rem(i, jnp.int32(stages))
                plgpu.barrier_wait(full.at[slot])
                at = lambda ref: None if ref is None else ref.at[slot]
                k_out = k_in_s if scalar else k_out_s
                decays, values = Decays(scalar, at(decay_s)), values_s.at[slot, wg]
                tiles = Tiles(decays, at(q_s), at(k_in_s), at(k_out), at(a_s), at(x_s), values)
                emitted: list[int] = []

                def emit(which: int, x: jax.Array) -> None:
                    if not emitted:
                        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    emitted.append(which)
                    buffer = emit_s[which].at[wg]
                    target = buffer if len(emits[which].shape) == 5 else transposed(buffer)
                    target[...] = x.astype(emits[which].dtype)

                state = step(state, tiles, emit)
                plgpu.commit_smem()  # also orders this chunk's reads before the copies that reuse its slot
                plgpu.barrier_arrive(empty.at[slot])
                for which in emitted:
                    source, target = emit_s[which].at[wg], emit_g[which]
                    is_tile = len(emits[which].shape) == 5
                    view = place(i).tile(target).at[columns] if is_tile else place(i).rows(target, heads, columns)
                    plgpu.copy_smem_to_gmem(source, view)
                return state

            at = (sequence, head, part, columns)
            state = lax.fori_loop(0, length, chunk, plgpu.load(initial_g.at[at], layout=WGMMA, optimized=False))
            last_g.at[at][...] = state
            plgpu.wait_smem_to_gmem(0)

        def load() -> None:
            plgpu.set_max_registers(40, action="decrease")

            def issue(i: Any, slot: Any) -> None:
                here = place(i)
                tiles = [(here.operand(k_in_g, heads), k_in_s), (here.tile(decay_g), decay_s)]
                tiles += [(here.operand(g, heads), s) for g, s in ((q_g, q_s), (k_out_g, k_out_s)) if s is not None]
                tiles += [(here.tile(g), s) for g, s in ((a_g, a_s), (x_g, x_s)) if s is not None]
                for source, target in tiles:
                    plgpu.copy_gmem_to_smem(source, target.at[slot], full.at[slot])
                for w in range(workers):
                    source = here.rows(values_g, heads, pl.ds(column * v_block + w * BLOCK, BLOCK))
                    plgpu.copy_gmem_to_smem(source, values_s.at[slot, w], full.at[slot])

            for i in range(stages):
                pl.when(i < length)(lambda i=i: issue(i, i))

            @pl.loop(0, length - stages)
            def _(i):
                slot = lax.rem(i, jnp.int32(stages))
                plgpu.barrier_wait(empty.at[slot])
                issue(i + stages, slot)

            # Every arrival has to be observed.
            @pl.loop(jnp.maximum(length - stages, 0), length)
            def _(i):
                plgpu.barrier_wait(empty.at[lax.rem(i, jnp.int32(stages))])

        pl.when(wg < workers)(compute)
        pl.when(wg == workers)(load)

    key_tiles = lambda used: tile_buffer(stages, CHUNK, key_dim) if used else None
    pair_tiles = lambda used: tile_buffer(stages, CHUNK, CHUNK) if used else None
    staging = [(BLOCK, key_dim) if len(e.shape) == 5 else (CHUNK, BLOCK) for e in emits]
    out = launch(
        kernel,
        tuple(arrays),
        out_type=(*emits, jax.ShapeDtypeStruct(initial.shape, F32)),
        grid={"column": value_dim // v_block, "part": parts, "head": heads, "sequence": batch},
        warpgroups=workers + 1,
        buffers=(
            key_tiles(reads.queries),
            key_tiles(True),
            key_tiles(outgoing),
            decay_buffer(scalar, stages, key_dim),
            pair_tiles(reads.a_qk is not None),
            pair_tiles(reads.inverse is not None),
            tile_buffer(stages, workers, CHUNK, BLOCK),
            *(tile_buffer(workers, *shape) for shape in staging),
        ),
        barriers=(
            plgpu.Barrier(num_arrivals=len(arrays) - 2 + workers, num_barriers=stages),
            plgpu.Barrier(num_arrivals=workers, num_barriers=stages),
        ),
        name=name,
    )
    return list(out)
