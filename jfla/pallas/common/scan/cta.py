"""One CTA of a scan over chunks: where its arrays lie, and its producer warpgroup; its consumers are in `consumer.py`.

The producer issues TMA copies of whole chunks, as many ahead as there are pipeline stages.
"""

import functools
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jfla.pallas.common.chunk_index import TILE_V, ChunkIndex, joined_k_columns
from jfla.pallas.common.packed_rows import INPUTS, places_of
from jfla.pallas.common.scan.spec import (
    GmemOperands,
    ScanConfig,
    ScanSpec,
    SharedStorage,
)
from jfla.pallas.mgpu.branches import when
from jfla.pallas.mgpu.copies import Copies
from jfla.pallas.mgpu.overlap import NO_FLAGS, ReadyFlags
from jfla.pallas.mgpu.registers import leave_registers
from jfla.pallas.mgpu.types import Barrier, Gmem, Index

# Chunks that a ring has beyond the pipeline stages, so that there is room for copies before they are issued
ROOM_AHEAD = 4


class GridIndex(NamedTuple):
    """Which scan a CTA runs, and where; the first field is fastest.

    CTAs with neighbouring blocks of V have neighbouring numbers, because they read the same q, k and a_qk: one finds
    them in the second-level cache after the other.
    """

    v_block: Index
    scan: Index
    head: Index
    batch: Index
    time_split: Index  # of one length, or of packed segments: those that `SegmentTable.ctas` has


class StepRange(NamedTuple):
    """The chunks of a CTA's scan, which are its steps: in reverse the first step is the last chunk.

    Counted from 0 the steps would need the first chunk beside them, for which registers are too few.
    """

    first: Index
    end: Index


class ScanCta(NamedTuple):
    """One CTA of one scan, for its producer and, as `ScanConsumer`, for its consumers."""

    spec: ScanSpec
    config: ScanConfig
    index: GridIndex
    ready_flags: ReadyFlags
    gmem: GmemOperands
    stores: tuple[Gmem, ...]
    checkpoints: Gmem
    last: Gmem
    chunk_offset: Index  # chunks before the first that is scanned
    steps: StepRange
    smem: SharedStorage
    barriers: Barrier  # PipelineBarriers, or None without TMA

    @property
    def in_groups(self) -> bool:
        """Whether this CTA scans a sequence of every group, one behind the other.

        Its steps are counted over all of them.
        """
        return self.config.sequences_per_group > 0

    @property
    def num_sequences(self) -> Index:
        """That this CTA scans, where they go in groups."""
        return self.spec.sequences_at(self.place, self.config.sequences_per_group)

    @property
    def sequence(self) -> Index:
        """The number of the sequence that is scanned."""
        return self.index.batch * jnp.int32(self.spec.value_heads) + self.index.head

    @property
    def place(self) -> Index:
        """Of the sequence in its group."""
        return lax.rem(self.sequence, jnp.int32(self.config.sequences_per_group))

    def index_in_group(self, group: Index) -> GridIndex:
        """Of this CTA's sequence of a group; `index` is of its sequence of the first."""
        heads = jnp.int32(self.spec.value_heads)
        sequence = self.sequence + group * self.config.sequences_per_group
        head = lax.rem(sequence, heads)
        batch = lax.div(sequence, heads)
        return self.index._replace(head=head, batch=batch)

    def at_step(self, i: Index) -> "ScanCta":
        """The same CTA at the sequence of a step."""
        if not self.in_groups:
            return self
        group = lax.div(i, jnp.int32(self.spec.n_chunks))
        return self._replace(index=self.index_in_group(group))

    def span_chunk(self, i: Index) -> ChunkIndex:
        """The chunk of a step, in arrays that hold the scanned span alone."""
        turn = None
        if self.in_groups:
            # What the backward's scans store is kept of all groups.
            turn = None if self.spec.signals is not None else (self.place, i)
            i = lax.rem(i, jnp.int32(self.spec.n_chunks))
        chunk = i
        if self.spec.reverse:
            chunk = self.last_chunk - i
        if self.spec.spans_from_last:
            chunk = self.spec.spans(self.spec.spans_from_last).last_span_first(i)
        places = places_of(self.gmem.chunks.values)
        batch = self.index.batch
        n_chunks = self.spec.n_chunks
        return ChunkIndex(batch, self.index.head, chunk, places, n_chunks, turn=turn)

    @property
    def last_chunk(self) -> Index:
        """In reverse: the sum of a step's number and that of its chunk."""
        if self.in_groups:
            return self.spec.n_chunks - 1
        return self.steps.first + self.steps.end - 1

    def global_chunk(self, i: Index) -> ChunkIndex:
        """The same chunk in arrays that hold all of time."""
        chunk = self.span_chunk(i)
        return chunk._replace(chunk=chunk.chunk + self.chunk_offset)

    @property
    def read_flags(self) -> ReadyFlags:
        """Of the chunks that this scan reads."""
        return self.ready_flags if self.spec.signals is None else NO_FLAGS

    @property
    def written_flags(self) -> ReadyFlags:
        """Of the chunks that this scan writes."""
        if self.spec.signals is None:
            return NO_FLAGS
        return self.ready_flags._replace(lead=self.spec.signals)

    def columns(self, wg: Index) -> Index:
        """A consumer warpgroup's columns of V."""
        return pl.ds(self.index.v_block * self.config.v_block + wg * TILE_V, TILE_V)

    def stage(self, i: Index, zero: Index = 0) -> Index:
        """The pipeline stage of a step's chunk.

        Of one stage alone the number is made of an opaque zero: LLVM would compute all addresses of its tiles before
        the loop, and have no registers for them.
        """
        if self.config.stages == 1:
            return zero
        return lax.rem(i, jnp.int32(self.config.stages))

    @property
    def few_registers(self) -> bool:
        """Whether none is left to keep an address from chunk to chunk.

        With K = 256 the state takes them; without a producer this warpgroup has the addresses of the copies, too.
        """
        return self.smem.state is not None or not self.config.has_producer

    def read_ahead(self, chunk: ChunkIndex, column: int) -> Index | None:
        """`chunk.read_place`, where a register is left to keep it until it is used; else None."""
        return None if self.few_registers else chunk.read_place(column)

    # The producer.

    def run_producer(self) -> None:
        """Keeps the pipeline full: a chunk is copied as soon as it is ready and its stage is empty."""
        leave_registers(self.spec.registers.producer)
        first, end = self.steps
        stages = self.config.stages

        # A ring has room for the first chunks.
        @pl.loop(first, jnp.minimum(first + stages, end))
        def _prologue(i):
            at_step = self.at_step(i)
            self.read_flags.wait(at_step.span_chunk(i).flag)
            self.copy_chunk(at_step.global_chunk(i), self.stage(i))

        @pl.loop(first, end - stages)
        def _steady(i):
            ahead = self.at_step(i + stages)
            chunk = ahead.global_chunk(i + stages)
            chunk = chunk.at_place(self.read_ahead(chunk, INPUTS))
            # The flag first: that wait is long, and the stage is empty by then.
            flag = ahead.span_chunk(i + stages).flag
            self.read_flags.wait(flag)
            self.wait_until_consumed(i)
            if not self.signals_behind_copies:
                self.signal_before(i)
            self.written_flags.wait_for_room(flag)
            self.copy_chunk(chunk, self.stage(i))
            if self.signals_behind_copies:
                self.signal_before(i)

        # Every arrival has to be observed, or the barrier is left in the wrong phase. Where chunks are signalled, the
        # consumers arrive once more, behind the last chunk's stores.
        signals = self.spec.signals is not None

        @pl.loop(jnp.maximum(end - stages, first), end + 1 if signals else end)
        def _drain(i):
            which = self.stage(i)
            if signals:
                # In this loop: with a wait of its own behind the loop ptxas spills 12 bytes.
                which = jnp.where(i == end, self.last_stored, which)
            plgpu.barrier_wait(self.barriers.empty.at[which])
            self.signal_before(i)

    @property
    def last_stored(self) -> int:
        """Which `empty` barrier tells that the last chunk's stores have ended, where chunks are signalled.

        It is none of a stage. The consumers may end the last chunk before the producer has looked at their arrivals for
        the chunks before it. On the barrier of a stage two arrivals would then come in one phase, of which one would be
        lost, and the producer would wait for ever.
        """
        return self.config.stages

    def wait_until_consumed(self, i: Index) -> None:
        """Waits until a step's stage is empty; where chunks are signalled, the stores of the one before have ended."""
        plgpu.barrier_wait(self.barriers.empty.at[self.stage(i)])

    def signal_before(self, i: Index) -> None:
        """Signals the chunk before a step's, whose stores have ended.

        A signal's fence takes 0.7 us, for which a consumer that signalled itself would keep the next step waiting.
        """
        if self.spec.signals is not None:

            @when(i > self.steps.first)
            def _():
                before = self.at_step(i - 1).span_chunk(i - 1)
                self.written_flags.signal(before.flag)

    @property
    def signals_behind_copies(self) -> bool:
        """Whether a chunk's copies are issued before the signal of an earlier chunk, whose fence they would wait for.

        In a short ring the copies wait for room, and a signal behind them would keep the readers waiting that make it.
        """
        ring = self.written_flags.lead.tiles
        return ring == 0 or ring >= self.config.stages + ROOM_AHEAD

    def copy_chunk(self, chunk: ChunkIndex, stage: Index) -> None:
        """Starts the copies of a chunk, by its number among all chunks, into a pipeline stage."""
        gmem = self.gmem.chunks
        smem = self.smem.chunks
        full = self.full(stage)
        heads = self.spec.value_heads
        columns = pl.ds(0, self.spec.key_dim)
        k_columns = columns
        if not self.spec.scalar_gate:
            k_columns = joined_k_columns(columns, self.spec.key_dim)
        qk = [
            (gmem.k_from_start, smem.k_from_start, k_columns),
            (gmem.q_from_start, smem.q_from_start, columns),
            (gmem.k_to_end, smem.k_to_end, columns),
        ]
        tiles = [
            (gmem.decay, smem.decay),
            (gmem.a_qk, smem.a_qk),
            (gmem.a_inv, smem.a_inv),
        ]
        for source, target, source_columns in qk:
            if source is None:
                continue
            start = functools.partial(full.start, target_smem=target.at[stage])
            if self.spec.scalar_gate:
                chunk.for_rows(source, heads, source_columns, start)
            else:
                start(chunk.tile(source).at[:, source_columns])
        for source, target in tiles:
            if source is not None:
                full.start(chunk.tile(source), target.at[stage])
        for wg in range(self.config.num_consumer_wgs):
            start = functools.partial(full.start, target_smem=smem.values.at[stage, wg])
            chunk.for_rows(gmem.values, heads, self.columns(wg), start)

    def full(self, stage: Index) -> Copies:
        """The copies of a chunk into a pipeline stage."""
        if self.barriers is None:
            return Copies(None)
        return Copies(self.barriers.full.at[stage], evict_first=self.is_last_reader)

    @property
    def is_last_reader(self) -> bool:
        """Whether chunks are read from a ring, by this CTA alone, so that the second-level cache need not keep them.

        Packed rows are left out: with the place of every chunk to keep, ptxas spills some 40 bytes for the hint.
        """
        values = self.gmem.chunks.values
        has_all_columns = self.config.v_block == values.shape[-1]
        in_ring = self.read_flags.lead.tiles > 0
        return in_ring and has_all_columns and places_of(values) is None
