"""Walks a state over the chunks of a sequence, forward or in reverse: the shape that all scan kernels share.

One program per walk, sequence, value head, part of time and block of V. Each compute warpgroup owns 64 columns of V and
keeps its state transposed, [V, K], in the accumulators of the tensor cores, from where it is also the left operand (up
to K = 128): it never leaves the registers, and everything else is transposed with it. One more warpgroup issues the
copies, chunks ahead. Walks that do not depend on each other share one grid: alone, one seldom fills the GPU.
"""

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jfla._types import CHUNK
from jfla.pallas._jobs import Handover, Job, Promise
from jfla.pallas._operands import BLOCK, Decays, Operands, Place, decay_buffer
from jfla.pallas._tile import F32, SHARED_MEMORY, WGMMA, tile_buffer, transposed, zeros

MOST_IN_REGISTERS = 128  # the K up to which the state fits there twice, in float32 and as left operand


class WalkConfig(NamedTuple):
    """v_block: columns of V per program, 64 for each compute warpgroup. stages: chunks in flight, at most."""

    v_block: int = 128
    stages: int = 3


class Tiles(NamedTuple):
    """What a step sees of its chunk, in shared memory: only what its walk reads."""

    decays: Decays
    q_in: Any
    k_in: Any
    k_out: Any
    a_qk: Any
    inverse: Any
    values: Any  # [C, 64]: this warpgroup's columns of v or do
    state: Any  # [64, K]: where the matmuls read the state, for the K that registers are too few for; or None


Emit = Callable[[int, jax.Array], None]
Step = Callable[[jax.Array, Tiles, Emit], jax.Array]


class Arrays(NamedTuple):
    """What a walk reads of device memory, or its copy in shared memory; None for what its steps do not use."""

    k_in: Any
    decay: Any
    q_in: Any
    k_out: Any  # None for GDN, which has one k
    a_qk: Any
    inverse: Any
    values: Any  # [B, T, HV, V]
    initial: Any  # None: the walk begins from zeros
    zero: Any  # [1], a 0 that the compiler cannot know (see Turn); where registers are few
    stretch: Any = None  # Stretch: then `initial` is of every one, [B, HV, stretches, V, K], or takes the last state


class Walk(NamedTuple):
    """`state = step(state, tiles, emit)` over the chunks, from the first or, in reverse, from the last.

    `emit(i, x)` writes the chunk's part of emits[i]: x [V, C] into rows of [B, T, HV, V], or x [V, K] into a tile of
    [B, HV, N, V, K], which comes first and passes through `Tiles.state` if there is one. `last`: which last states are
    wanted, those of all `parts` of time, or that of the last as the caller has it, [B, HV, K, V]. `stops`: of so many
    equal stretches of time the states at the start are wanted too.
    """

    step: Step
    arrays: Arrays
    emits: tuple[jax.ShapeDtypeStruct, ...]
    reverse: bool = False
    parts: int = 1
    last: Literal["of parts", "final"] | None = "of parts"
    stops: int = 0

    @property
    def n_chunks(self) -> int:
        """Those walked."""
        time = self.arrays.values.shape[1] if self.arrays.stretch is None else self.emits[-1].shape[1]
        return time // CHUNK

    @property
    def last_states(self) -> tuple[int, int, int, int, int]:
        """[B, HV, P, V, K], also of the first ones where there are any."""
        batch, _, heads, value_dim = self.arrays.values.shape
        return batch, heads, self.parts, value_dim, self.arrays.k_in.shape[-1]

    @property
    def results(self) -> list[jax.ShapeDtypeStruct | None]:
        """What is emitted, the states at stops, the last ones; None where references take them."""
        emits, stretch = list[Any](self.emits), self.arrays.stretch
        if stretch is not None and stretch.results is not None:
            emits[-1] = None
        batch, heads, _, value_dim, key_dim = self.last_states
        shape = (batch, heads, key_dim, value_dim) if self.last == "final" else self.last_states
        last = jax.ShapeDtypeStruct(shape, F32) if self.last and stretch is None else None
        shape = batch, heads, self.stops, value_dim, key_dim
        stops = jax.ShapeDtypeStruct(shape, F32) if self.stops else None
        return [*emits, stops, last]

    @property
    def emits_states(self) -> bool:
        return any(len(e.shape) == 5 for e in self.emits[:1])

    def begun(self) -> "Walk":
        """With zeros to read where registers are few: a state made of them there would take three too many."""
        if self.arrays.initial is not None or self.last_states[-1] <= MOST_IN_REGISTERS:
            return self
        return self._replace(arrays=self.arrays._replace(initial=jnp.zeros(self.last_states, F32)))


def arrays(op: Operands, values: jax.Array, initial: Any, a_qk: Any, inverse: Any, queries: bool = True) -> Arrays:
    """`initial` [B, HV, P, V, K] float32, one for each of P parts of time. `queries`: whether the steps use q."""
    k_out = None if len(op.decay.shape) == 5 else op.k_out
    zero = jnp.zeros(1, jnp.int32) if op.k_in.shape[-1] > MOST_IN_REGISTERS else None
    return Arrays(op.k_in, op.decay, op.q_in if queries else None, k_out, a_qk, inverse, values, initial, zero)


class Spot(NamedTuple):
    """Which walk a program goes, and where."""

    column: Any  # block of V
    part: Any  # of time
    walk: Any
    head: Any
    sequence: Any


class Program(NamedTuple):
    """One program at work: references in device memory, and in shared memory with a leading axis of stages."""

    walk: Walk
    config: WalkConfig
    spot: Spot
    handover: Handover
    here: Arrays  # in device memory
    emits: list[Any]
    stops: Any  # [B, HV, stops, V, K] or None
    last: Any  # or None
    offset: Any  # chunks before the first that is walked
    s: Arrays  # in shared memory; values [stages, workers, C, 64]
    staging: list[Any]
    state: Any  # [workers, 64, K]: see Tiles
    full: Any  # barriers, of every stage
    empty: Any

    @property
    def heads(self) -> int:
        return self.walk.arrays.values.shape[2]

    @property
    def workers(self) -> int:
        return self.config.v_block // BLOCK

    @property
    def chunks(self) -> tuple[Any, Any]:
        """(first, number) of the chunks in this program's part of time."""
        parts, n_chunks = self.walk.parts, self.walk.n_chunks
        per_part = -(-n_chunks // parts)
        first = self.spot.part * per_part
        return first, jnp.minimum(per_part, n_chunks - first)

    def place(self, i: Any) -> Place:
        first, length = self.chunks
        return Place(self.spot.sequence, self.spot.head, first + (length - 1 - i if self.walk.reverse else i))

    def source(self, i: Any) -> Place:
        """The same among all chunks."""
        place = self.place(i)
        return place._replace(chunk=place.chunk + self.offset)

    def columns(self, worker: Any) -> Any:
        return pl.ds(self.spot.column * self.config.v_block + worker * BLOCK, BLOCK)

    def slot(self, i: Any) -> Any:
        return lax.rem(i, jnp.int32(self.config.stages))

    def tiles(self, slot: Any, worker: Any) -> Tiles:
        at = lambda ref: None if ref is None else ref.at[slot]
        scalar = len(self.walk.arrays.decay.shape) == 5
        k_in, k_out = at(self.s.k_in), at(self.s.k_in if scalar else self.s.k_out)
        decays, state = Decays(scalar, at(self.s.decay)), None if self.state is None else self.state.at[worker]
        pairs, values = (at(self.s.a_qk), at(self.s.inverse)), self.s.values.at[slot, worker]
        return Tiles(decays, at(self.s.q_in), k_in, k_out, *pairs, values, state)

    def compute(self, worker: Any) -> None:
        """What a compute warpgroup does."""
        plgpu.set_max_registers(232 if self.state is None else 248, action="increase")
        if self.here.initial is None:
            state = zeros(BLOCK, self.walk.last_states[-1])
        else:
            state = plgpu.load(self.here.initial.at[self.state_at(worker)], layout=WGMMA, optimized=False)

        def step(i: Any, carry: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
            state, zero = carry
            if self.stops is not None:
                self.keep(i, state, worker + zero)
            return self.chunk(i, state, worker + zero), zero & i

        zero = jnp.int32(0) if self.here.zero is None else self.here.zero[0]
        state, _ = lax.fori_loop(0, self.chunks[1], step, (state, zero))
        if self.last is not None:
            self.write_last(state, worker)
        plgpu.wait_smem_to_gmem(0)

    def state_at(self, worker: Any) -> tuple[Any, ...]:
        """Where this program's first and last states lie."""
        spot, part = self.spot, self.spot.part
        if self.here.stretch is not None:
            part = lax.rem(lax.div(self.offset, jnp.int32(self.walk.n_chunks)), jnp.int32(self.here.initial.shape[2]))
        return spot.sequence, spot.head, part, self.columns(worker)

    def write_last(self, state: jax.Array, worker: Any) -> None:
        if self.walk.last != "final":
            self.last.at[self.state_at(worker)][...] = state
            return

        @pl.when(self.spot.part == self.walk.parts - 1)
        def _():
            rows = transposed(self.last.at[self.spot.sequence, self.spot.head, :, self.columns(worker)])
            rows[...] = plgpu.layout_cast(state, plgpu.Layout.WGMMA_TRANSPOSED)

    def keep(self, i: Any, state: jax.Array, worker: Any) -> None:
        """Writes the state down where a stretch of time begins."""
        place, length = self.place(i), jnp.int32(self.walk.n_chunks // self.walk.stops)

        @pl.when(lax.rem(place.chunk, length) == 0)
        def _():
            at = place.batch, place.head, lax.div(place.chunk, length), self.columns(worker)
            self.stops.at[at][...] = state

    def chunk(self, i: Any, state: jax.Array, worker: Any) -> jax.Array:
        slot, columns = self.slot(i), self.columns(worker)
        plgpu.barrier_wait(self.full.at[slot])
        emitted: list[int] = []

        def emit(which: int, x: jax.Array) -> None:
            if not emitted:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            emitted.append(which)
            buffer, out = self.staging[which].at[worker], self.walk.emits[which]
            target = buffer if len(out.shape) == 5 else transposed(buffer)
            target[...] = x.astype(out.dtype)

        state = self.walk.step(state, self.tiles(slot, worker), emit)
        plgpu.commit_smem()  # also orders this chunk's reads before the copies that reuse its slot
        plgpu.barrier_arrive(self.empty.at[slot])
        for which in emitted:
            out, is_tile = self.emits[which], len(self.walk.emits[which].shape) == 5
            place = self.place(i) if is_tile or self.walk.results[which] is not None else self.source(i)
            view = place.tile(out).at[columns] if is_tile else place.rows(out, self.heads, columns)
            plgpu.copy_smem_to_gmem(self.staging[which].at[worker], view)
        return state

    def issue(self, i: Any, slot: Any) -> None:
        """Starts the copies of chunk i."""
        place, here, s = self.source(i), self.here, self.s
        tiles = [(here.k_in, s.k_in), (here.q_in, s.q_in), (here.k_out, s.k_out)]
        views = [(place.operand(source, self.heads), target) for source, target in tiles if source is not None]
        tiles = [(here.decay, s.decay), (here.a_qk, s.a_qk), (here.inverse, s.inverse)]
        views += [(place.tile(source), target) for source, target in tiles if source is not None]
        for source, target in views:
            plgpu.copy_gmem_to_smem(source, target.at[slot], self.full.at[slot])
        for worker in range(self.workers):
            source = place.rows(here.values, self.heads, self.columns(worker))
            plgpu.copy_gmem_to_smem(source, s.values.at[slot, worker], self.full.at[slot])

    def load(self) -> None:
        """What the warpgroup that issues copies does."""
        plgpu.set_max_registers(40 if self.state is None else 80, action="decrease")
        length, stages = self.chunks[1], self.config.stages

        @pl.loop(0, jnp.minimum(length, stages))
        def _(i):
            self.handover.wait(self.place(i))
            self.issue(i, i)

        @pl.loop(0, length - stages)
        def _(i):
            self.handover.wait(self.place(i + stages))  # which takes long, before the slot is empty
            plgpu.barrier_wait(self.empty.at[self.slot(i)])
            self.issue(i + stages, self.slot(i))

        # Every arrival has to be observed.
        @pl.loop(jnp.maximum(length - stages, 0), length)
        def _(i):
            plgpu.barrier_wait(self.empty.at[self.slot(i)])


def walk(walks: tuple[Walk, ...], *, config: WalkConfig, name: str) -> Promise:
    """Of every walk its `results`, states [B, HV, P, V, K] in float32. All walks are of one shape."""
    walks = tuple(w.begun() for w in walks)
    batch, heads, parts, value_dim, key_dim = walks[0].last_states
    config = config._replace(v_block=min(config.v_block, value_dim))
    stages, buffers = _buffers(walks, config)
    config, workers = config._replace(stages=stages), config.v_block // BLOCK
    grid = Spot(value_dim // config.v_block, parts, len(walks), heads, batch)
    sources, structure = jax.tree.flatten([w.arrays for w in walks])
    out_types = [w.results for w in walks]
    outs_flat, outs_structure = jax.tree.flatten(out_types)

    def body(refs: list[Any], scratch: Any, program: Any, handover: Handover) -> None:
        arrived, *barriers = scratch
        here, outs = structure.unflatten(refs[: len(sources)]), outs_structure.unflatten(refs[len(sources) :])
        tiles, (*staging, state) = arrived[: len(Arrays._fields)], arrived[len(Arrays._fields) :]
        if key_dim > MOST_IN_REGISTERS and walks[0].emits_states:
            state = staging[0]
        wg, spot = lax.axis_index("wg"), _spot(grid, program)

        def go(i: int) -> None:
            *emits, stops, last = outs[i]
            stretch, offset = here[i].stretch, 0
            if stretch is not None:
                offset = walks[i].arrays.values.shape[1] // CHUNK - (stretch.later[0] + 1) * walks[i].n_chunks
                emits = [stretch.results if x is None else x for x in emits]
                last = here[i].initial if walks[i].last else None
            full, empty = barriers[2 * i : 2 * i + 2]
            in_memory = here[i], emits, stops, last, offset
            at_work = Program(walks[i], config, spot, handover, *in_memory, Arrays(*tiles), staging, state, full, empty)
            pl.when(wg < workers)(lambda: at_work.compute(wg if workers > 1 else jnp.int32(0)))
            pl.when(wg == workers)(at_work.load)

        for i in range(len(walks)):
            pl.when(spot.walk == i)(lambda i=i: go(i))
        # In a launch with more warpgroups these have nothing to do but to give their registers away.
        pl.when(wg > workers)(lambda: plgpu.set_max_registers(40, action="decrease"))

    def barriers(w: Walk) -> tuple[Any, Any]:
        # Everything is one copy but the last three, which are none, and the values, one for every worker.
        copies = sum(x is not None for x in w.arrays[:-3]) - 1 + workers
        full = plgpu.Barrier(num_arrivals=copies, num_barriers=stages)
        return full, plgpu.Barrier(num_arrivals=workers, num_barriers=stages)

    job = Job(
        name,
        tuple(sources),
        tuple(outs_flat),
        programs=math.prod(grid),
        warpgroups=workers + 1,
        buffers=buffers,
        barriers=tuple(b for w in walks for b in barriers(w)),
        body=body,
    )
    return Promise(job, out_types)


def _spot(grid: Spot, program: Any) -> Spot:
    """Of a program's number: the blocks of V side by side, which read the same of everything else."""
    at, rest = [], program
    for size in grid:
        at.append(lax.rem(rest, jnp.int32(size)))
        rest = lax.div(rest, jnp.int32(size))
    return Spot(*at)


def _buffers(walks: tuple[Walk, ...], config: WalkConfig) -> tuple[int, tuple[Any, ...]]:
    """The chunks in flight, as there is room for; what any of the walks reads of each; tiles for what is emitted.

    And one for the state, if it needs one of its own.
    """
    key_dim, workers = walks[0].last_states[-1], config.v_block // BLOCK
    used = Arrays(*(any(x is not None for x in field) for field in zip(*(w.arrays for w in walks))))

    def read(stages: int) -> Arrays:
        keys = lambda wanted: tile_buffer(stages, CHUNK, key_dim) if wanted else None
        pairs = lambda wanted: tile_buffer(stages, CHUNK, CHUNK) if wanted else None
        return Arrays(
            k_in=keys(True),
            decay=decay_buffer(len(walks[0].arrays.decay.shape) == 5, stages, key_dim),
            q_in=keys(used.q_in),
            k_out=keys(used.k_out),
            a_qk=pairs(used.a_qk),
            inverse=pairs(used.inverse),
            values=tile_buffer(stages, workers, CHUNK, BLOCK),
            initial=None,
            zero=None,
        )

    emitted = [(BLOCK, key_dim) if len(e.shape) == 5 else (CHUNK, BLOCK) for e in walks[0].emits]
    own = key_dim > MOST_IN_REGISTERS and not walks[0].emits_states
    staging = (
        *(tile_buffer(workers, *shape) for shape in emitted),
        tile_buffer(workers, BLOCK, key_dim) if own else None,
    )
    size = lambda buffers: sum(math.prod(b.shape) * jnp.dtype(b.dtype).itemsize for b in buffers if b is not None)
    stages = min(config.stages, (SHARED_MEMORY - size(staging)) // size(read(1)))
    return stages, (*read(stages), *staging)
