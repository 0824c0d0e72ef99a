"""A consumer warpgroup of a scan: steps from chunk to chunk with 64 columns of the state in registers.

It waits for the producer's copies of a chunk, stores what the step leaves, and gives the pipeline stage back. Without
wgmma it is the CTA's one warpgroup, and issues the copies itself.
"""

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jfla.pallas.common.chunk_index import TILE_V
from jfla.pallas.common.packed_rows import RESULTS, SegmentTable, places_of
from jfla.pallas.common.scan.cta import ScanCta, StepRange
from jfla.pallas.common.scan.spec import ChunkTiles, is_state
from jfla.pallas.common.token_decay import TokenDecay
from jfla.pallas.machine import on_hopper
from jfla.pallas.mgpu.branches import cond, when
from jfla.pallas.mgpu.copies import (
    arrive_after_stores,
    commit_smem,
    fits_cp_async,
    load_with_layout,
    store_from_layout,
    store_tile,
    wait_for_stores,
    write,
    write_transposed,
)
from jfla.pallas.mgpu.layouts import WGMMA
from jfla.pallas.mgpu.mma import zeros
from jfla.pallas.mgpu.opaque import opaque, opaque_zero
from jfla.pallas.mgpu.registers import take_registers
from jfla.pallas.mgpu.smem import F32, transposed
from jfla.pallas.mgpu.types import Gmem, Index, Reg, Smem
from jfla.types import CHUNK


class ScanConsumer(ScanCta):
    """The CTA as one of its consumer warpgroups sees it; `wg` is the warpgroup's number."""

    def run(self, wg: Index) -> None:
        """Scans all chunks of this CTA with the state in registers."""
        if self.config.has_producer:
            take_registers(self.spec.registers.consumer)
        else:
            self.start_first_copies()
        if self.gmem.segments is not None:
            self.scan_segments(wg)
        elif self.in_groups:
            self.scan_sequences(wg)
        else:
            self.scan(self.steps, wg)
        wait_for_stores()
        if self.spec.signals is not None:
            # The producer signals the last chunk.
            plgpu.barrier_arrive(self.barriers.empty.at[self.last_stored])

    def scan_segments(self, wg: Index) -> None:
        """Scans the CTA's segments one after the other; the producer need not know where one ends."""
        table = self.segments
        batch = self.index.batch

        def of_segment(rank: Index, column: int) -> Index:
            # Of an opaque zero: LLVM would keep the row's address over the scan, for which there is no register.
            return table.segments[batch + opaque_zero(), rank, column]

        def scan_one(rank: Index) -> Index:
            steps = StepRange(of_segment(rank, 1), of_segment(rank, 2))
            if self.spec.reverse:
                last = self.steps.first + self.steps.end
                steps = StepRange(last - steps.end, last - steps.first)
            self._replace(index=self.index._replace(time_split=rank)).scan(steps, wg)
            return of_segment(rank, 4 if self.spec.reverse else 3)

        first = table.ctas[batch, self.index.time_split, 1 if self.spec.reverse else 0]
        lax.while_loop(lambda rank: rank >= 0, scan_one, first)

    def scan_sequences(self, wg: Index) -> None:
        """Scans this CTA's sequence of every group; the producer goes on from one to the next."""
        n_chunks = self.spec.n_chunks

        @pl.loop(0, self.num_sequences)
        def _(group):
            first = group * n_chunks
            steps = StepRange(first, first + opaque(n_chunks))
            self._replace(index=self.index_in_group(group)).scan(steps, wg)

    def scan(self, steps: StepRange, wg: Index) -> None:
        """Scans chunks of one state."""

        def step(i: Index, state: Reg) -> Reg:
            zero = opaque_zero() if self.few_registers else 0
            if self.gmem.added is not None:
                state = self.with_added(i, state, wg + zero)
            return self.consume_chunk(i, state, wg + zero, zero)

        if self.spec.spans_from_last:
            self.scan_spans(steps, step, wg)
            return
        # Of opaque zeros: LLVM would keep addresses over the scan, for which there are no registers.
        state = self.first_state(wg + opaque_zero())
        if self.stores_groups:
            state = self.scan_groups(steps, step, state, wg)
        elif self.checkpoints is not None:
            state = self.scan_checkpointed(steps, step, state, wg)
        else:
            state = lax.fori_loop(*steps, step, state)
        if self.last is not None and not self.stores_groups:
            self.store_last(state, wg + opaque_zero())

    def first_state(self, wg: Index) -> Reg:
        """The state that the scan begins from."""

        def none() -> Reg:
            return zeros(TILE_V, self.spec.key_dim)

        initial = self.gmem.initial
        if initial is None:
            return none()
        if self.gmem.segments is None:
            return load_with_layout(initial.at[self.state_index(wg)], WGMMA)
        segment = self.segment

        def of_caller() -> Reg:
            head = self.index.head + opaque_zero()
            rows = initial.at[self.index.batch, segment, head, :, self.columns(wg)]
            state = load_with_layout(transposed(rows), plgpu.Layout.WGMMA_TRANSPOSED)
            return plgpu.layout_cast(state.astype(F32), WGMMA)

        return cond(segment < initial.shape[1], of_caller, none)

    @property
    def stores_groups(self) -> bool:
        """Whether the state goes to the caller after every group of chunks."""
        return self.spec.last == "caller" and self.spec.group_chunks is not None

    def scan_groups(self, steps: StepRange, step: Any, state: Reg, wg: Index) -> Reg:
        """Scans group by group, and stores the state after each.

        Two loops: in one over all chunks, the condition of the store spills four registers with K = 256.
        """
        group_chunks = jnp.int32(self.spec.group_chunks)

        def scan_group(group: Index, state: Reg) -> Reg:
            first = steps.first + group * group_chunks
            end = jnp.minimum(first + group_chunks, steps.end)
            state = lax.fori_loop(first, end, step, state)
            self.store_for_caller(self.last.at[self.index.batch, group], state, wg)
            return state

        return lax.fori_loop(0, opaque(self.spec.num_groups), scan_group, state)

    def scan_checkpointed(
        self, steps: StepRange, step: Any, state: Reg, wg: Index
    ) -> Reg:
        """Scans span by span, and stores the state where each begins.

        Two loops: a condition at every step takes 0.16 us of it.
        """
        num_spans = self.spec.num_checkpoints
        length = self.spec.spans(num_spans).length

        def scan_span(span: Index, state: Reg) -> Reg:
            columns = self.columns(wg + opaque_zero())
            place = (self.index.batch, self.index.head, span, columns)
            self.checkpoints.at[place][...] = state
            end = steps.end - (num_spans - 1 - span) * length
            first = jnp.maximum(end - length, steps.first)
            return lax.fori_loop(first, end, step, state)

        # With a count that LLVM knows the scan of a scalar gate spills 12 bytes; with one that it does not, the scan of
        # a gate per channel 16.
        count = opaque(num_spans) if self.spec.scalar_gate else num_spans
        return lax.fori_loop(0, count, scan_span, state)

    def scan_spans(self, steps: StepRange, step: Any, wg: Index) -> None:
        """Scans span by span, each from its own state."""
        num_spans = self.spec.spans_from_last
        length = self.spec.spans(num_spans).length

        def scan_span(spans_after: Index, carry: None) -> None:
            span = num_spans - 1 - spans_after
            at_span = self._replace(index=self.index._replace(time_split=span))
            first = steps.first + spans_after * length
            end = jnp.minimum(first + length, steps.end)
            lax.fori_loop(first, end, step, at_span.first_state(wg))

        lax.fori_loop(0, num_spans, scan_span, None)

    def with_added(self, i: Index, state: Reg, wg: Index) -> Reg:
        """In reverse: the state and what is added to it where a group of chunks ends."""
        chunk = self.span_chunk(i)
        group_chunks = jnp.int32(self.spec.group_chunks)
        after = chunk.chunk + 1
        ends = jnp.logical_or(
            lax.rem(after, group_chunks) == 0, after == self.spec.n_chunks
        )
        group = lax.div(chunk.chunk, group_chunks)
        place = (chunk.batch, chunk.head, group, self.columns(wg))

        def add(state: Reg) -> Reg:
            return state + load_with_layout(self.gmem.added.at[place], WGMMA)

        return cond(ends, add, lambda state: state, state)

    def consume_chunk(self, i: Index, state: Reg, wg: Index, zero: Index) -> Reg:
        """Waits for a step's chunk, steps, gives its stage back and starts the copies of what was stored."""
        stage = self.stage(i, zero)
        place = self.read_ahead(self.span_chunk(i), RESULTS)
        self.wait_for_chunk(i, stage)
        self.read_flags.release(self.span_chunk(i).flag)
        stored: list[int] = []

        def store(which: int, x: Reg) -> None:
            # The staging tiles still hold what was stored of the chunk before.
            if not stored:
                wait_for_stores(read_only=True)
            stored.append(which)
            tile = self.smem.staging[which].at[wg]
            spec = self.spec.stores[which]
            if is_state(spec):
                write(tile, x.astype(spec.dtype))
            else:
                write_transposed(tile, x.astype(spec.dtype))

        state = self.spec.step(state, self.tiles(stage, wg), store)
        # Orders this chunk's reads of shared memory before the copies that refill its stage, too.
        commit_smem()
        if self.spec.signals is None:
            self.refill(i, stage)
        for which in stored:
            self.store_staged(which, i, wg, place)
        if self.spec.signals is not None:
            # The producer signals the chunk before, whose stores have had this step's time to end.
            empty = self.barriers.empty.at[stage]
            arrive_after_stores(empty, started_since=len(stored))
        return state

    def refill(self, i: Index, stage: Index) -> None:
        """Gives a step's pipeline stage back to the producer; without one, starts the copies of its next chunk."""
        if self.config.has_producer:
            plgpu.barrier_arrive(self.barriers.empty.at[stage])
            return

        @when(i + self.config.stages < self.steps.end)
        def _():
            self.copy_chunk(self.global_chunk(i + self.config.stages), stage)

    def wait_for_chunk(self, i: Index, stage: Index) -> None:
        """Waits until a step's chunk is in shared memory."""
        if on_hopper() or self.config.stages == 1:
            self.full(stage).wait()
            return
        ahead = self.config.stages - 1

        @when(i + ahead < self.steps.end)
        def _():
            self.full(stage).wait(started_since=ahead * self.copies_per_chunk)

        @when(i + ahead >= self.steps.end)
        def _():
            self.full(stage).wait()

    @property
    def copies_per_chunk(self) -> int:
        """Those of `copy_chunk` that are made with cp.async, where there is no TMA.

        Of what this scan reads: in shared memory are tiles of the other scan, too, and a chunk that is waited for with
        their number in flight has not arrived.
        """
        read = zip(self.gmem.chunks._replace(values=None), self.smem.chunks)
        targets = [x.at[0] for source, x in read if source is not None]
        return sum(fits_cp_async(x) for x in targets) + self.config.num_consumer_wgs

    def start_first_copies(self) -> None:
        """Starts the copies of as many chunks as there are pipeline stages."""

        @pl.loop(
            self.steps.first,
            jnp.minimum(self.steps.first + self.config.stages, self.steps.end),
        )
        def _(i):
            self.copy_chunk(self.global_chunk(i), self.stage(i))

    def store_staged(
        self, which: int, i: Index, wg: Index, place: Index | None
    ) -> None:
        """Starts the store of what is staged of a step's chunk; `place` is that of its rows, if it was read ahead."""
        staged = self.smem.staging[which].at[wg]
        out = self.stores[which]
        columns = self.columns(wg)
        if is_state(self.spec.stores[which]):
            store_tile(staged, self.span_chunk(i).tile(out).at[columns])
            return
        in_span = self.spec.outputs.stores[which] is not None
        chunk = self.span_chunk(i) if in_span else self.global_chunk(i)
        chunk = chunk.in_ring(out.shape[1] // CHUNK)
        store = functools.partial(store_tile, staged)
        chunk.at_place(place).for_rows(out, self.spec.value_heads, columns, store)

    def store_last(self, state: Reg, wg: Index) -> None:
        """Stores the last state: of every time split, or of every segment or the last split as the caller has it."""
        if self.spec.last != "caller":
            self.last.at[self.state_index(wg)][...] = state
            return

        if self.gmem.segments is not None:
            segment = self.segment

            @when(segment < self.spec.caller_states[0])
            def _():
                self.store_for_caller(
                    self.last.at[self.index.batch, segment], state, wg
                )

            return

        @when(self.index.time_split == self.spec.time_splits - 1)
        def _():
            self.store_for_caller(self.last.at[self.index.batch], state, wg)

    def store_for_caller(self, states_gmem: Gmem, state: Reg, wg: Index) -> None:
        """Stores a state S^T as the caller has it, in [HV, K, V]."""
        rows = transposed(states_gmem.at[self.index.head, :, self.columns(wg)])
        in_rows = plgpu.layout_cast(state, plgpu.Layout.WGMMA_TRANSPOSED)
        store_from_layout(rows, in_rows.astype(self.spec.last_dtype))

    # Where things are.

    def state_index(self, wg: Index) -> tuple[Index, ...]:
        """Where the first and the last state of a warpgroup lie in [B, HV, splits, V, K]."""
        state = self.index.time_split
        if self.gmem.span is not None:
            span = lax.div(self.chunk_offset, jnp.int32(self.spec.n_chunks))
            state = lax.rem(span, jnp.int32(self.gmem.initial.shape[2]))
        return self.index.batch, self.index.head, state, self.columns(wg)

    @property
    def segments(self) -> SegmentTable:
        assert self.gmem.segments is not None
        return self.gmem.segments

    @property
    def segment(self) -> Index:
        """Read where it is used, before the loop and behind it: with K = 256 no register is left to keep it.

        Nor to keep its address, which an opaque zero has computed again.
        """
        batch = self.index.batch + opaque_zero()
        return self.segments.segments[batch, self.index.time_split, 0]

    def tiles(self, stage: Index, wg: Index) -> ChunkTiles:
        """A chunk in shared memory, for one consumer warpgroup."""
        chunks = self.smem.chunks

        def at_stage(ref: Smem) -> Smem:
            return None if ref is None else ref.at[stage]

        k_to_end = chunks.k_from_start if self.spec.scalar_gate else chunks.k_to_end
        return ChunkTiles(
            decay=TokenDecay(self.spec.scalar_gate, at_stage(chunks.decay)),
            q_from_start=at_stage(chunks.q_from_start),
            k_from_start=at_stage(chunks.k_from_start),
            k_to_end=at_stage(k_to_end),
            a_qk=at_stage(chunks.a_qk),
            a_inv=at_stage(chunks.a_inv),
            values=chunks.values.at[stage, wg],
            state=None if self.smem.state is None else self.smem.state.at[wg],
            # Places of packed rows are read ahead, and kept.
            few_registers=self.few_registers
            or places_of(self.gmem.chunks.values) is not None,
        )
