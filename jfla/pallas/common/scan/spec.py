"""What a scan over chunks is: its step, operands, results and shared memory; `pipeline.py` runs it.

A scan keeps a state S^T [V, K] float32 from chunk to chunk. Everything is transposed with the state, so that it is the
accumulator of the tensor cores and their left operand and never leaves the registers (up to K = 128).
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from jfla.pallas.common.chunk_index import TILE_V, EqualSpans, TimeSpan
from jfla.pallas.common.packed_rows import Rows, SegmentTable
from jfla.pallas.common.token_decay import TokenDecay, decay_smem
from jfla.pallas.heuristics import HOPPER_SMEM_BYTES, Schedule
from jfla.pallas.machine import on_hopper
from jfla.pallas.mgpu.branches import int_of
from jfla.pallas.mgpu.overlap import Lead
from jfla.pallas.mgpu.registers import RegisterLimits
from jfla.pallas.mgpu.smem import F32, num_bytes, tile_smem
from jfla.pallas.mgpu.types import Barrier, Gmem, Index, MemorySpec, Reg, Smem
from jfla.stages import QK, FactoredQK, IntraChunk
from jfla.types import CHUNK

# Up to this K the state fits twice, in float32 and as a 16-bit left operand.
MAX_K_IN_REGISTERS = 128


class ScanConfig(NamedTuple):
    """v_block: columns of V per CTA, 64 for each consumer warpgroup. stages: chunks in flight, at most.

    smem_bytes: what the tiles of a CTA may take. sequences_per_group: how many are scanned at a time; a CTA goes on
    with the same place of the next group, of which the last has the rest. 0: all.
    """

    v_block: int = 128
    stages: int = 3
    smem_bytes: int = HOPPER_SMEM_BYTES
    sequences_per_group: int = 0

    @classmethod
    def of(cls, schedule: Schedule, v_block: int) -> "ScanConfig":
        """With the shared memory of the schedule's machine."""
        return cls(v_block, smem_bytes=schedule.smem_bytes)

    @property
    def num_consumer_wgs(self) -> int:
        return self.v_block // TILE_V

    @property
    def has_producer(self) -> bool:
        """Whether a warpgroup of its own issues the copies."""
        return on_hopper()


class ChunkTiles(NamedTuple):
    """A chunk in shared memory, as the step of one consumer warpgroup sees it; None for what its scan does not use.

    Tiles are bfloat16 or, if q, k and v are, float16.
    """

    decay: TokenDecay
    q_from_start: Smem  # [C, K]
    k_from_start: Smem  # [C, K]
    k_to_end: Smem  # [C, K]
    a_qk: Smem  # [C, C]
    a_inv: Smem  # [C, C]
    values: Smem  # [C, 64]: this warpgroup's columns of v or do
    # [64, K]: the left operand where registers are too few for it, else None
    state: Smem
    few_registers: bool  # too few for an accumulator that is in use over the whole step

    @property
    def dtype(self) -> DTypeLike:
        """Of all operands of matmuls."""
        return self.values.dtype


Store = Callable[[int, Reg], None]
Step = Callable[[Reg, ChunkTiles, Store], Reg]


class TmaOperands(NamedTuple):
    """What is copied of every chunk: arrays in global memory, or their pipeline stages in shared memory.

    With a gate per channel k_from_start and q_from_start are the same array in global memory: see `JoinedQK`.
    """

    k_from_start: Gmem | Smem
    decay: Gmem | Smem
    q_from_start: Gmem | Smem
    k_to_end: Gmem | Smem  # None for a scalar gate, whose one k tile serves both
    a_qk: Gmem | Smem
    a_inv: Gmem | Smem
    values: Gmem | Smem  # [B, T, HV, V]


class GmemOperands(NamedTuple):
    """Everything a scan reads."""

    chunks: TmaOperands
    initial: Gmem  # [B, HV, splits, V, K] float32, of segments [B, S, HV, K, V]; None begins from zeros
    # where given, `initial` has every span's state, or is written with the last one
    span: TimeSpan | None = None
    added: Gmem = None  # [B, HV, groups, V, K] float32: to the state where a group of chunks begins
    segments: SegmentTable | None = None  # None: time splits are of one length


def gmem_operands(
    qk: QK,
    intra: IntraChunk,
    values: Rows,
    initial: Gmem,
    *,
    queries: bool = True,
    span: TimeSpan | None = None,
    added: Gmem = None,
    segments: SegmentTable | None = None,
) -> GmemOperands:
    """Without `queries` the step uses neither q nor a_qk."""
    scalar_gate = isinstance(qk, FactoredQK)
    chunks = TmaOperands(
        k_from_start=qk.k if scalar_gate else qk.qk_from_start,
        decay=qk.factors if scalar_gate else qk.chunk_decay,
        q_from_start=qk.q if scalar_gate else qk.qk_from_start,
        k_to_end=None if scalar_gate else qk.k_to_end,
        a_qk=intra.a_qk,
        a_inv=intra.a_inv,
        values=values,
    )
    if not queries:
        chunks = chunks._replace(q_from_start=None, a_qk=None)
    return GmemOperands(chunks, initial, span, added, segments)


class ScanOutputs(NamedTuple):
    """What a scan writes; None for what it does not, or what references take."""

    stores: tuple[Gmem, ...]  # of every chunk
    checkpoints: Gmem  # [B, HV, checkpoints, V, K] float32
    last: Gmem  # [B, HV, splits, V, K] float32, or [B, HV, K, V] or [B, S, HV, K, V] in the caller's dtype


class ScanSpec(NamedTuple):
    """`state = step(state, tiles, store)` over the chunks, from the first or, in reverse, from the last.

    `store(i, x)` writes the chunk's part of stores[i]: x [V, C] into rows of [B, T, HV, V], or x [V, K] into a tile of
    [B, HV, N, V, K], which comes first and passes through `ChunkTiles.state` if there is one.
    """

    step: Step
    operands: GmemOperands
    scalar_gate: bool
    stores: tuple[jax.ShapeDtypeStruct, ...] = ()
    reverse: bool = False
    time_splits: int = 1  # spans of time that run side by side, or packed segments
    last: Literal["every split", "caller", None] = "every split"
    num_checkpoints: int = 0  # of so many `EqualSpans` the state at the start is stored
    # `EqualSpans` that are scanned from the last to the first, each from its state in `operands.initial`; 0: one
    spans_from_last: int = 0
    # where a kernel beside the scan reads what it stores: each CTA's producer signals every chunk
    signals: Lead | None = None
    last_dtype: DTypeLike = F32  # of the last state as the caller has it
    # the last state of every group of so many chunks; needs one split and no span
    group_chunks: int | None = None

    @property
    def n_chunks(self) -> int:
        """Chunks that are scanned."""
        time = self.operands.chunks.values.shape[1]
        if self.operands.span is not None:
            time = self.stores[-1].shape[1]
        return time // CHUNK

    @property
    def sequences(self) -> int:
        """Value heads of all rows of the batch."""
        batch, _, heads, _ = self.operands.chunks.values.shape
        return batch * heads

    def sequences_at(self, place: Index, sequences_per_group: int) -> Index:
        """How many sequences have this place in their group."""
        full_groups, rest = divmod(self.sequences, sequences_per_group)
        return full_groups + int_of(place < rest) if rest else full_groups

    def spans(self, num_spans: int) -> EqualSpans:
        """The chunks in so many spans."""
        return EqualSpans(self.n_chunks, num_spans)

    @property
    def num_groups(self) -> int:
        """Groups of chunks, the last of which may be shorter."""
        return -(-self.n_chunks // (self.group_chunks or self.n_chunks))

    @property
    def caller_states(self) -> tuple[int, ...]:
        """Of each row of the batch the last states that the caller gets, () for one."""
        if self.operands.segments is not None:
            return (self.time_splits - 1,)  # not of padding
        return () if self.group_chunks is None else (self.num_groups,)

    @property
    def value_heads(self) -> int:
        return self.operands.chunks.values.shape[2]

    @property
    def key_dim(self) -> int:
        chunks = self.operands.chunks
        k = chunks.k_from_start if chunks.k_to_end is None else chunks.k_to_end
        return k.shape[-1]

    @property
    def split_states(self) -> tuple[int, int, int, int, int]:
        """[B, HV, splits, V, K]: the shape of the first and of the last states."""
        batch, _, heads, value_dim = self.operands.chunks.values.shape
        return batch, heads, self.time_splits, value_dim, self.key_dim

    @property
    def outputs(self) -> ScanOutputs:
        """jax.ShapeDtypeStructs."""
        stores = list[Any](self.stores)
        span = self.operands.span
        if span is not None and span.results is not None:
            stores[-1] = None
        batch, heads, _, value_dim, key_dim = self.split_states
        checkpoints = None
        if self.num_checkpoints:
            shape = (batch, heads, self.num_checkpoints, value_dim, key_dim)
            checkpoints = jax.ShapeDtypeStruct(shape, F32)
        last = None
        if self.last is not None and span is None:
            last = jax.ShapeDtypeStruct(self.split_states, F32)
            if self.last == "caller":
                shape = (batch, *self.caller_states, heads, key_dim, value_dim)
                last = jax.ShapeDtypeStruct(shape, self.last_dtype)
        return ScanOutputs(tuple(stores), checkpoints, last)

    @property
    def registers(self) -> RegisterLimits:
        """On Hopper. Two consumers of 232 beside four warpgroups of 128 leave 24 for each of the others."""
        return (
            RegisterLimits(232, 24)
            if self.key_dim <= MAX_K_IN_REGISTERS
            else RegisterLimits(248, 80)
        )

    @property
    def stores_states(self) -> bool:
        return any(is_state(x) for x in self.stores[:1])

    def with_zero_state(self) -> "ScanSpec":
        """With zeros in global memory to begin from, where K = 256: zeros made in registers would spill three."""
        if self.operands.initial is not None or self.key_dim <= MAX_K_IN_REGISTERS:
            return self
        shape = self.split_states
        if self.operands.segments is not None:
            batch, heads, _, value_dim, key_dim = shape
            shape = (batch, *self.caller_states, heads, key_dim, value_dim)
        zeros = jnp.zeros(shape, F32)
        return self._replace(operands=self.operands._replace(initial=zeros))


def is_state(x: Gmem) -> bool:
    """Whether a store is a tile of states [B, HV, N, V, K], not rows [B, T, HV, V]."""
    return len(x.shape) == 5


class SharedStorage(NamedTuple):
    """Shared memory of a CTA."""

    chunks: TmaOperands  # with a leading axis of pipeline stages; values [stages, wgs, C, 64]
    staging: tuple[Smem, ...]  # [wgs, ..]: a tile for each store
    state: Smem  # [wgs, 64, K], or None: see ChunkTiles


class PipelineBarriers(NamedTuple):
    """mbarriers of one scan, one for each pipeline stage."""

    full: Barrier  # the chunk is in shared memory: an arrival for each copy
    # The consumers are done with it: an arrival for each warpgroup. One more where chunks are signalled: see
    # `ScanCta.last_stored`.
    empty: Barrier


def shared_storage(
    specs: tuple[ScanSpec, ...], config: ScanConfig
) -> tuple[int, SharedStorage]:
    """The number of pipeline stages that there is room for, and the shared memory that scans of one shape share."""
    spec = specs[0]
    num_wgs = config.num_consumer_wgs
    stored = [
        (TILE_V, spec.key_dim) if is_state(x) else (CHUNK, TILE_V) for x in spec.stores
    ]
    own_state = spec.key_dim > MAX_K_IN_REGISTERS and not spec.stores_states
    dtype = spec.operands.chunks.values.dtype
    staging = tuple(tile_smem(num_wgs, *shape, dtype=dtype) for shape in stored)
    state = tile_smem(num_wgs, TILE_V, spec.key_dim, dtype=dtype) if own_state else None
    room = config.smem_bytes - num_bytes((staging, state))
    stages = min(config.stages, room // num_bytes(_chunks_smem(specs, num_wgs, 1)))
    return stages, SharedStorage(_chunks_smem(specs, num_wgs, stages), staging, state)


def _chunks_smem(specs: tuple[ScanSpec, ...], num_wgs: int, stages: int) -> TmaOperands:
    """What any of the scans reads of each chunk."""
    spec = specs[0]
    used = [
        any(x is not None for x in field)
        for field in zip(*(s.operands.chunks for s in specs))
    ]
    uses = TmaOperands(*used)

    dtype = spec.operands.chunks.values.dtype

    def tile(wanted: bool, columns: int) -> MemorySpec:
        return tile_smem(stages, CHUNK, columns, dtype=dtype) if wanted else None

    return TmaOperands(
        k_from_start=tile(True, spec.key_dim),
        decay=decay_smem(spec.scalar_gate, stages, spec.key_dim),
        q_from_start=tile(uses.q_from_start, spec.key_dim),
        k_to_end=tile(uses.k_to_end, spec.key_dim),
        a_qk=tile(uses.a_qk, CHUNK),
        a_inv=tile(uses.a_inv, CHUNK),
        values=tile_smem(stages, num_wgs, CHUNK, TILE_V, dtype=dtype),
    )


def pipeline_barriers(
    spec: ScanSpec, num_wgs: int, stages: int
) -> PipelineBarriers | None:
    """One arrival for each copy of a chunk: the values come in one copy for each consumer warpgroup."""
    if not on_hopper():
        return None
    signals = spec.signals is not None
    shared = spec.operands.chunks._replace(values=None)
    num_copies = sum(x is not None for x in shared) + num_wgs
    return PipelineBarriers(
        full=plgpu.Barrier(num_arrivals=num_copies, num_barriers=stages),
        empty=plgpu.Barrier(num_arrivals=num_wgs, num_barriers=stages + signals),
    )
