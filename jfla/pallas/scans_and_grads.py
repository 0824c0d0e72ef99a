"""A scalar gate's backward from the states that the forward kept: Inputs, residuals and do to gradients, dv and dS.

The scans and the gradients side by side, one chunk after the other; or one span of time after the other, with the
states of a few chunks only in memory. Both give what `both_scans` and then `grads_kernel` of `chunk.py` give, bit for
bit.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array

from jfla.pallas.arrays import KernelArrays
from jfla.pallas.common.chunk_index import TimeSpan
from jfla.pallas.common.packed_rows import Rows
from jfla.pallas.common.qk_tiles import QkOptions
from jfla.pallas.common.results import IntraResults, KernelGrads
from jfla.pallas.common.scan.signalling import lead_of_scans
from jfla.pallas.common.scan.spec import ScanConfig
from jfla.pallas.common.scan.steps import backward_scans_kernel
from jfla.pallas.context import interpreting
from jfla.pallas.heuristics import Schedule
from jfla.pallas.mgpu.in_place import write_in_place
from jfla.pallas.mgpu.overlap import PendingResults, overlap, run
from jfla.pallas.mgpu.smem import F32
from jfla.pallas.mgpu.types import Gmem
from jfla.pallas.sm90.grads_gdn.kernel import (
    grads_gdn,
    result_shapes,
    sum_over_channel_blocks,
)
from jfla.stages import Residuals, ScanResults


class ScansAndGrads(NamedTuple):
    """What the scans and the gradients read, and how they run."""

    x: KernelArrays
    intra_results: IntraResults  # without an `IntraChunk`, which `residuals` has
    residuals: Residuals  # with checkpoints
    do: Rows
    d_last: Array | None
    static: QkOptions
    out_dtype: DTypeLike  # of dq and dk
    schedule: Schedule

    def side_by_side(self) -> tuple[KernelGrads, Rows, Array | None]:
        """The gradients, dv, and dS^T before the first chunk if a state was given. One launch.

        The gradient kernel takes the chunks that both scans have just left.
        """
        beside = self.schedule.backward_overlap
        assert beside is not None
        qk = self.intra_results.qk
        dims = self.x.dims
        config = ScanConfig.of(self.schedule, dims.value_dim)
        ends = (self.residuals.state_checkpoints, self.d_last)

        def consume(results: tuple[ScanResults, Any]) -> PendingResults:
            scans, _ = results
            return grads_gdn(
                qk,
                self.intra_results.token_scalars,
                scans,
                self.static,
                beside.grads_ctas,
                self.out_dtype,
                beside_scans=beside,
            )

        with jax.named_scope("jfla_backward_scans_overlap_grads"):
            scanning = backward_scans_kernel(
                qk,
                self.residuals.intra,
                self.x.v,
                self.do,
                ends,
                config,
                keep_dstate=self.x.initial is not None,
                beside_grads=beside,
            )
            flags_shape = (dims.batch, dims.heads, dims.n_chunks)
            num_v_blocks = dims.value_dim // config.v_block
            lead = lead_of_scans(beside.dstate_ring, num_v_blocks)
            # Interpret mode runs one CTA after the other: the scans first.
            consumer_first = not interpreting()
            (scans, d_first), grads = overlap(
                scanning, consume, flags_shape, lead, consumer_first=consumer_first
            )
        return sum_over_channel_blocks(grads), scans.dv, d_first

    def span_by_span(self) -> tuple[KernelGrads, Array, Array | None]:
        """The same, from the last span to the first. Results go into references to the whole."""
        v = self.x.v
        batch, time, heads, value_dim = v.shape
        key_dim = self.x.q.shape[-1]
        shapes = result_shapes(
            self.x.q, (batch, time, heads, key_dim), self.static, self.out_dtype
        )
        d_last = self.d_last
        if d_last is None:
            d_last = jnp.zeros((batch, heads, 1, value_dim, key_dim), F32)
        unwritten = lambda x: lax.empty(x.shape, x.dtype)
        written = (jax.tree.map(unwritten, shapes), unwritten(v), d_last)
        checkpoints = self.residuals.state_checkpoints
        assert checkpoints is not None
        every = checkpoints.shape[2] // self.schedule.num_spans
        long_spans = self.residuals._replace(
            state_checkpoints=checkpoints[:, :, ::every]
        )
        read = (v, self.intra_results, long_spans, self.do)
        config = ScanConfig.of(self.schedule, self.schedule.backward_v_block)
        write = _WriteSpans(self.static, self.schedule.num_sms, self.out_dtype, config)
        grads, dv, d_first = write_in_place(write, written, read)
        d_first = None if self.x.initial is None else d_first
        return sum_over_channel_blocks(grads), dv, d_first


class _WriteSpans(NamedTuple):
    """Writes gradients, dv and dS^T, as references, span by span."""

    static: QkOptions
    num_sms: int
    out_dtype: DTypeLike
    config: ScanConfig

    def __call__(
        self, written: tuple[KernelGrads, Gmem, Gmem], read: tuple[Any, ...]
    ) -> None:
        grads, dv, d_state = written
        v, intra_results, residuals, do = read
        qk = intra_results.qk
        checkpoints = residuals.state_checkpoints

        def one_span(i: Array, carry: None) -> None:
            spans_after = jnp.reshape(i, 1)
            with jax.named_scope("jfla_backward_scans"):
                scanning = backward_scans_kernel(
                    qk,
                    residuals.intra,
                    v,
                    do,
                    (checkpoints, d_state),
                    self.config,
                    keep_dstate=True,
                    span=TimeSpan(spans_after, dv),
                )
                scans, _ = run(scanning)
            with jax.named_scope("jfla_chunk_grads"):
                kernel = grads_gdn(
                    qk,
                    intra_results.token_scalars,
                    scans._replace(dv=dv),
                    self.static,
                    self.num_sms,
                    self.out_dtype,
                    TimeSpan(spans_after, grads),
                )
                run(kernel)

        lax.fori_loop(0, checkpoints.shape[2], one_span, None)
