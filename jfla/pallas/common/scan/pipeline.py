"""Kernel: scans over the chunks of every sequence, pipelined: one producer and one or two consumer warpgroups.

One CTA per scan, sequence, value head, time split and block of V: see `cta.py` and `consumer.py`. Of packed segments a
CTA scans a long one or several short ones. Scans that do not depend on each other share one grid: alone, one seldom
fills the GPU.
"""

import math
from typing import Any

import jax.numpy as jnp
from jax import lax

from jfla.pallas.common.packed_rows import SegmentTable
from jfla.pallas.common.scan.consumer import ScanConsumer
from jfla.pallas.common.scan.cta import GridIndex, StepRange
from jfla.pallas.common.scan.spec import (
    MAX_K_IN_REGISTERS,
    GmemOperands,
    ScanConfig,
    ScanOutputs,
    ScanSpec,
    pipeline_barriers,
    shared_storage,
)
from jfla.pallas.mgpu.branches import when
from jfla.pallas.mgpu.overlap import Kernel, PendingResults
from jfla.pallas.mgpu.registers import leave_registers
from jfla.pallas.mgpu.types import Barrier, Gmem, Index, Smem, Tree
from jfla.types import CHUNK


def scan_kernel(
    specs: tuple[ScanSpec, ...],
    config: ScanConfig,
    name: str,
) -> PendingResults:
    """`ScanOutputs` of every scan; all are of one shape. CTAs that scan a sequence have neighbouring numbers."""
    specs = tuple(spec.with_zero_state() for spec in specs)
    batch, heads, time_splits, value_dim, key_dim = specs[0].split_states
    segments = specs[0].operands.segments
    if segments is not None:
        time_splits = segments.ctas.shape[1]
    config = config._replace(v_block=min(config.v_block, value_dim))
    stages, smem_spec = shared_storage(specs, config)
    config = config._replace(stages=stages)
    num_consumer_wgs = config.num_consumer_wgs
    grid = GridIndex(value_dim // config.v_block, len(specs), heads, batch, time_splits)
    sequences = config.sequences_per_group or batch * heads

    def body(
        inputs: Tree,
        outputs: Tree,
        smem: Smem,
        barriers: Barrier,
        cta: Index,
        flags: Any,
    ) -> None:
        if key_dim > MAX_K_IN_REGISTERS and specs[0].stores_states:
            smem = smem._replace(state=smem.staging[0])
        wg = lax.axis_index("wg")
        index = grid_index(grid, cta)

        def run_scan(i: int) -> None:
            common = (specs[i], config, index, flags)
            arrays = _in_gmem(specs[i], inputs[i], outputs[i])
            steps = _steps(specs[i], config, inputs[i].segments, index)
            scan = ScanConsumer(*common, *arrays, steps, smem, barriers[i])

            if not config.has_producer:
                scan.run(jnp.int32(0))
                return

            @when(wg < num_consumer_wgs)
            def _consumer():
                scan.run(wg if num_consumer_wgs > 1 else jnp.int32(0))

            @when(wg == num_consumer_wgs)
            def _producer():
                scan.run_producer()

        for i in range(len(specs)):

            @when(index.scan == i)
            def _(i=i):
                run_scan(i)

        if not config.has_producer:
            return

        # A launch beside another kernel may have more warpgroups.
        @when(wg > num_consumer_wgs)
        def _idle():
            leave_registers()

    kernel = Kernel(
        name=name,
        inputs=[spec.operands for spec in specs],
        outputs=[spec.outputs for spec in specs],
        num_ctas=math.prod(grid._replace(head=1, batch=sequences)),
        num_warpgroups=num_consumer_wgs + config.has_producer,
        registers=specs[0].registers.of(num_consumer_wgs)
        if config.has_producer
        else (),
        smem=smem_spec,
        barriers=[pipeline_barriers(spec, num_consumer_wgs, stages) for spec in specs],
        body=body,
    )
    return PendingResults(kernel, lambda outputs: outputs)


def _in_gmem(
    spec: ScanSpec,
    gmem: GmemOperands,
    out: ScanOutputs,
) -> tuple[GmemOperands, tuple[Gmem, ...], Gmem, Gmem, Index]:
    """`gmem`, `stores`, `checkpoints`, `last` and `chunk_offset` of a ScanCta: of a span, references take results."""
    span = gmem.span
    if span is None:
        return gmem, out.stores, out.checkpoints, out.last, 0
    stores = tuple(span.results if store is None else store for store in out.stores)
    last = None if spec.last is None else gmem.initial
    all_chunks = spec.operands.chunks.values.shape[1] // CHUNK
    return gmem, stores, out.checkpoints, last, span.offset(all_chunks, spec.n_chunks)


def _steps(
    spec: ScanSpec,
    config: ScanConfig,
    segments: SegmentTable | None,
    index: GridIndex,
) -> StepRange:
    """Of a CTA's packed segments, of its sequences of all groups, or of its time split."""
    if config.sequences_per_group:
        place = index.batch * jnp.int32(spec.value_heads) + index.head  # in every group
        count = spec.sequences_at(place, config.sequences_per_group)
        first = jnp.int32(0)
        end = jnp.int32(count * spec.n_chunks)
    elif segments is None:
        per_split = -(-spec.n_chunks // spec.time_splits)
        first = index.time_split * per_split
        end = jnp.minimum(first + per_split, spec.n_chunks)
    else:
        first = segments.ctas[index.batch, index.time_split, 2]
        end = segments.ctas[index.batch, index.time_split, 3]
    return StepRange(first, end)


def grid_index(grid: GridIndex, number: Index) -> GridIndex:
    """A number, taken apart: the first field is fastest."""
    fields: list[Index] = []
    for size in grid:
        fields.append(lax.rem(number, jnp.int32(size)))
        number = lax.div(number, jnp.int32(size))
    return GridIndex(*fields)
