"""The chunked ops by kernels: forward and backward as lists of stage calls, from validated inputs to outputs."""

import dataclasses
import functools
from collections.abc import Callable

import jax
from jax.typing import DTypeLike
from jaxtyping import Array

from jfla.pallas.arrays import (
    KernelArrays,
    by_segment,
    chunk_major,
    cotangents,
    kernel_arrays,
    log2_decays,
    operand_dtype,
    qk_options,
    qkg_operands,
    query_dtype,
    to_kernel_state,
    to_kernel_states,
    to_tokens,
    whole_chunks,
)
from jfla.pallas.common.chunk_index import TILE_V, ChunkGrid
from jfla.pallas.common.intra_gdn.kernel import intra_gdn
from jfla.pallas.common.intra_gdn.smem import IntraGdnConfig
from jfla.pallas.common.packed_rows import Rows
from jfla.pallas.common.results import ALL_CHUNKS, IntraResults, KernelGrads, RingChunks
from jfla.pallas.common.scan.spec import ScanConfig, ScanOutputs
from jfla.pallas.common.scan.split_time import split_ends, split_states, stretch_end
from jfla.pallas.common.scan.steps import backward_scans_kernel, output_scan_kernel
from jfla.pallas.context import interpreting
from jfla.pallas.cotangent_scale import cotangent_scale
from jfla.pallas.heuristics import Schedule
from jfla.pallas.machine import tracing_for
from jfla.pallas.mgpu.overlap import Lead, PendingResults, overlap, run
from jfla.pallas.mgpu.smem import F16, F32
from jfla.pallas.mma.grads_gdn import grads_gdn as mma_grads_gdn
from jfla.pallas.mma.grads_kda import grads_kda as mma_grads_kda
from jfla.pallas.mma.intra_kda import intra_kda as mma_intra_kda
from jfla.pallas.scans_and_grads import ScansAndGrads
from jfla.pallas.sm90.grads_gdn.kernel import (
    grads_gdn,
    sum_over_channel_blocks,
)
from jfla.pallas.sm90.grads_kda.kernel import (
    grads_kda,
    grads_kda_operands,
    grads_kda_over_v_new,
)
from jfla.pallas.sm90.intra_kda.kernel import intra_kda
from jfla.parallel.stretch import Entered, Stretch
from jfla.stages import QK, FactoredQK, IntraChunk, Residuals, ScanResults
from jfla.types import DeltaRuleOutput, Inputs, Options, State, Value

# From `QK`, `IntraChunk`, v, the initial state and a `ScanConfig` to the kernel, not launched yet, of `ScanOutputs`
OutputScan = Callable[..., PendingResults]

# Where the gate's shape decides: `intra_kernel` and what is kept of it, `grads_kernel`, and the scans' `TokenDecay`.


def intra_kernel(
    x: KernelArrays,
    inputs: Inputs,
    options: Options,
    schedule: Schedule,
    *,
    num_ctas: int | None = None,
    with_a: bool = True,
    ring: RingChunks = ALL_CHUNKS,
) -> PendingResults:
    """The intra-chunk kernel: IntraResults. Without `with_a` KDA leaves out a_qk and a_inv; GDN always makes them."""
    static = qk_options(x, inputs, options)
    num_ctas = num_ctas or schedule.intra_ctas
    if options.op.scalar_gate:
        tokens = chunk_major(log2_decays(x, inputs), x.beta)
        config = IntraGdnConfig(schedule.intra_wgs, num_ctas, ring)
        return intra_gdn(x.q, x.k, tokens, static, config)
    beta = chunk_major(x.beta) if with_a else None
    qk_dots = chunk_major(x.qk_dots) if with_a and x.qk_dots is not None else None
    pairs = (qkg_operands(x, inputs), beta, qk_dots, x.v.shape[2], static)
    if schedule.machine != "hopper":
        return mma_intra_kda(*pairs)
    return intra_kda(*pairs, num_ctas, ring)


def intra_for_backward(
    x: KernelArrays,
    inputs: Inputs,
    options: Options,
    schedule: Schedule,
    residuals: Residuals,
) -> IntraResults:
    """Without a_qk and a_inv, which were kept: KDA's decayed q and k are made again, GDN's factors were kept, too."""
    if residuals.factors is not None:
        qk = FactoredQK(x.q, x.k, residuals.factors)
        return IntraResults(qk, None, residuals.token_scalars)
    with jax.named_scope("jfla_intra"):
        return run(intra_kernel(x, inputs, options, schedule, with_a=False))


def grads_kernel(
    x: KernelArrays,
    inputs: Inputs,
    options: Options,
    schedule: Schedule,
    intra_results: IntraResults,
    scans: ScanResults,
    out_dtype: DTypeLike | None = None,
) -> KernelGrads:
    """The gradients of every chunk, which do not depend on each other."""
    static = qk_options(x, inputs, options)
    dtype = query_dtype(inputs) if out_dtype is None else out_dtype
    if not options.op.scalar_gate:
        if schedule.machine != "hopper":
            return mma_grads_kda(qkg_operands(x, inputs), scans, static, dtype)
        inv_norms = intra_results.token_scalars
        operands = grads_kda_operands(qkg_operands(x, inputs), scans, inv_norms)
        if _writes_in_place(inputs):
            return grads_kda_over_v_new(operands, static, schedule.num_sms, dtype)
        return grads_kda(operands, static, schedule.num_sms, dtype)
    qk = intra_results.qk
    tokens = intra_results.token_scalars
    if schedule.machine != "hopper":
        return mma_grads_gdn(qk, tokens, scans, static, dtype)
    kernel = grads_gdn(qk, tokens, scans, static, schedule.num_sms, dtype)
    return sum_over_channel_blocks(run(kernel))


def forward(
    inputs: Inputs,
    options: Options,
    schedule: Schedule,
    *,
    for_backward: bool = False,
    stretch: Stretch | None = None,
) -> tuple[DeltaRuleOutput, Residuals]:
    """The output, and what the backward needs beside the inputs; of a stretch of time if other devices have more."""
    with tracing_for(schedule.machine):
        return _forward(inputs, options, schedule, for_backward, stretch)


def _forward(
    inputs: Inputs,
    options: Options,
    schedule: Schedule,
    for_backward: bool,
    stretch: Stretch | None,
) -> tuple[DeltaRuleOutput, Residuals]:
    """The intra-chunk work of every chunk, then the scan that leaves the output, or one beside the other."""
    x = kernel_arrays(
        inputs,
        options,
        row_is_segment=schedule.row_is_segment,
        segments_in_turn=schedule.segments_in_turn,
    )
    if options.chunks_per_state is not None:
        schedule = _undivided(schedule)
    keeps_states = for_backward and _writes_in_place(inputs)
    output_scan = _output_scan(x, options, schedule, keeps_states)
    entered = None
    split_r = None
    if schedule.overlap_ctas and stretch is None:
        intra_results, scanned = _intra_beside_scan(
            x, inputs, options, schedule, output_scan, for_backward
        )
    else:
        with jax.named_scope("jfla_intra"):
            intra_results = run(intra_kernel(x, inputs, options, schedule))
        scanned, entered, split_r = _scan_of_all_chunks(
            x, intra_results, schedule, output_scan, stretch
        )
    (output,) = to_tokens([scanned.stores[0]], inputs, x.grid)
    factors = intra_results.qk.factors if options.op.scalar_gate else None
    residuals = Residuals(
        intra_results.intra,
        scanned.checkpoints,
        entered,
        split_r,
        factors,
        intra_results.token_scalars,
    )
    last = scanned.last
    if last is not None and schedule.row_is_segment:
        last = last[:, 0]  # of its one segment
    return DeltaRuleOutput(output.astype(inputs.v.dtype), last), residuals


def _output_scan(
    x: KernelArrays, options: Options, schedule: Schedule, keeps_states: bool
) -> OutputScan:
    """`output_scan_kernel` with what the call wants kept of the states."""
    final_dtype = None
    if options.return_final_state:
        final_dtype = options.state_dtype or F32
    group_chunks = options.chunks_per_state
    keeps_states = keeps_states and group_chunks is None
    return functools.partial(
        output_scan_kernel,
        final_dtype=final_dtype,
        num_checkpoints=schedule.num_checkpoints if keeps_states else 0,
        group_chunks=group_chunks,
        segments=x.segments,
    )


def _intra_beside_scan(
    x: KernelArrays,
    inputs: Inputs,
    options: Options,
    schedule: Schedule,
    output_scan: OutputScan,
    for_backward: bool,
) -> tuple[IntraResults, ScanOutputs]:
    """Both in one launch: the scan follows the intra-chunk kernel from chunk to chunk."""
    dims = x.dims
    config = ScanConfig.of(schedule, schedule.overlap_v_block)
    config = config._replace(sequences_per_group=schedule.sequences_per_group)

    def consume(results: IntraResults) -> PendingResults:
        return output_scan(results.qk, results.intra, x.v, x.initial, config)

    with jax.named_scope("jfla_intra_overlap_output_scan"):
        # Interpret mode runs one CTA after the other: the producer would wait for a scan that has not begun.
        ring_chunks = 0 if interpreting() else schedule.ring_chunks
        lead = Lead(ring_chunks, num_readers=dims.value_dim // TILE_V)
        # The backward reads A of all chunks again.
        ring = RingChunks(
            qk=ring_chunks,
            intra=0 if for_backward else ring_chunks,
            sequences_per_group=schedule.sequences_per_group,
        )
        producing = intra_kernel(
            x, inputs, options, schedule, num_ctas=schedule.overlap_ctas, ring=ring
        )
        grid = ChunkGrid(
            dims.batch, dims.heads, dims.n_chunks, schedule.sequences_per_group
        )
        return overlap(producing, consume, grid.flags_shape, lead)


def _scan_of_all_chunks(
    x: KernelArrays,
    intra_results: IntraResults,
    schedule: Schedule,
    output_scan: OutputScan,
    stretch: Stretch | None,
) -> tuple[ScanOutputs, Entered | None, Array | None]:
    """The scan behind the intra-chunk kernel; of a stretch of time also how it is entered, and its splits' maps R."""
    config = ScanConfig.of(schedule, schedule.scan_v_block)
    initial = x.initial
    qk = intra_results.qk
    pairs = intra_results.intra
    entered = None
    split_r = None
    splits = schedule.time_splits if stretch is None else schedule.stretch_splits
    if splits > 1 or stretch is not None:
        with jax.named_scope("jfla_split_time"):
            initial, entered, split_r = split_states(
                qk, pairs, x.v, initial, config, splits, stretch
            )
    with jax.named_scope("jfla_output_scan"):
        scanned = run(output_scan(qk, pairs, x.v, initial, config))
    return scanned, entered, None if stretch is None else split_r


def backward(
    inputs: Inputs,
    options: Options,
    schedule: Schedule,
    residuals: Residuals,
    d_output: Value,
    d_final: State | None,
) -> Inputs:
    """Cotangents of the inputs; those of the results are brought into float16's range where it computes."""
    with tracing_for(schedule.machine):
        return _scaled_backward(inputs, options, schedule, residuals, d_output, d_final)


def _scaled_backward(
    inputs: Inputs,
    options: Options,
    schedule: Schedule,
    residuals: Residuals,
    d_output: Value,
    d_final: State | None,
) -> Inputs:
    if operand_dtype(inputs) != F16:
        return _backward(inputs, options, schedule, residuals, d_output, d_final)
    scale = cotangent_scale(inputs, options, d_output, d_final)
    scaled = scale.scaled(d_output, d_final)
    return scale.unscaled(_backward(inputs, options, schedule, residuals, *scaled))


def _backward(
    inputs: Inputs,
    options: Options,
    schedule: Schedule,
    residuals: Residuals,
    d_output: Value,
    d_final: State | None,
) -> Inputs:
    """The two scans, then the gradients of every chunk, then what is elementwise."""
    x = kernel_arrays(inputs, options, row_is_segment=schedule.row_is_segment)
    intra_results = intra_for_backward(x, inputs, options, schedule, residuals)
    (do,) = whole_chunks([d_output.astype(x.v.dtype)], inputs, x.grid)
    group_chunks = options.chunks_per_state
    d_last = by_segment(d_final)
    if x.grid is None:
        d_last = (to_kernel_state if group_chunks is None else to_kernel_states)(
            d_final
        )
    if group_chunks is not None:
        schedule = _undivided(schedule)
    entered = residuals.entered
    split_r = residuals.split_r
    if entered is not None and split_r is not None:
        x = x._replace(initial=to_kernel_state(entered.states[:, 0]))
        if schedule.time_splits == 1:  # else `both_scans` has the maps anyway
            config = ScanConfig.of(schedule, schedule.backward_v_block)
            with jax.named_scope("jfla_split_time"):
                qk = intra_results.qk
                d_last = stretch_end(
                    qk, residuals.intra, do, d_last, config, entered, split_r
                )
    beside = schedule.backward_overlap is not None
    if residuals.state_checkpoints is not None and (beside or schedule.num_spans):
        both = ScansAndGrads(
            x,
            intra_results,
            residuals,
            do,
            d_last,
            qk_options(x, inputs, options),
            query_dtype(inputs),
            schedule,
        )
        grads, dv, d_initial = both.side_by_side() if beside else both.span_by_span()
        return cotangents(inputs, options, x.grid, grads, dv, d_initial)
    scans, d_initial = both_scans(
        x,
        schedule,
        intra_results.qk,
        residuals.intra,
        do,
        d_last,
        entered,
        group_chunks,
    )
    with jax.named_scope("jfla_chunk_grads"):
        grads = grads_kernel(x, inputs, options, schedule, intra_results, scans)
    return cotangents(inputs, options, x.grid, grads, scans.dv, d_initial)


def both_scans(
    x: KernelArrays,
    schedule: Schedule,
    qk: QK,
    pairs: IntraChunk,
    do: Rows,
    d_last: Array | None,
    entered: Entered | None = None,
    group_chunks: int | None = None,
) -> tuple[ScanResults, Array | None]:
    """The states once more and their cotangents in reverse; and dS^T before the first chunk, if a state was given."""
    config = ScanConfig.of(schedule, schedule.backward_v_block)
    ends = (x.initial, d_last)
    if schedule.time_splits > 1:
        with jax.named_scope("jfla_split_time"):
            ends = split_ends(
                qk, pairs, x.v, do, ends, config, schedule.time_splits, entered
            )
    with jax.named_scope("jfla_backward_scans"):
        kept = {"keep_dstate": x.initial is not None, "group_chunks": group_chunks}
        kept["segments"] = x.segments
        return run(backward_scans_kernel(qk, pairs, x.v, do, ends, config, **kept))


def _undivided(schedule: Schedule) -> Schedule:
    """Without time splits, so that a state along time has the bits that the call on those tokens alone gives it."""
    return dataclasses.replace(schedule, time_splits=1)


def _writes_in_place(inputs: Inputs) -> bool:
    """Whether kernels may be handed references: not where shard_map tracks what varies over its mesh."""
    return not jax.typeof(inputs.v).manual_axis_type.varying
