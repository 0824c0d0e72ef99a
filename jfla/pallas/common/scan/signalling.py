"""The backward's scans for a launch beside the gradient kernel: their specs to specs with rings and signals."""

import jax

from jfla.pallas.backward_overlap import BackwardOverlap
from jfla.pallas.common.scan.spec import ScanConfig, ScanSpec
from jfla.pallas.context import interpreting
from jfla.pallas.mgpu.overlap import Lead
from jfla.types import CHUNK


def signalling_specs(
    reverse: ScanSpec,
    forward: ScanSpec,
    beside: BackwardOverlap,
    config: ScanConfig,
) -> tuple[ScanSpec, ScanSpec]:
    """The same, with what the gradient kernel alone reads in rings, and signals."""
    states, v_new = forward.stores
    dstates, dv = reverse.stores
    num_v_blocks = states.shape[3] // config.v_block
    of_states = lead_of_scans(beside.state_ring, num_v_blocks)
    of_dstates = lead_of_scans(beside.dstate_ring, num_v_blocks)
    forward = forward._replace(
        stores=(
            _in_ring(states, 2, of_states.tiles),
            _in_ring(v_new, 1, CHUNK * of_states.tiles),
        ),
        spans_from_last=beside.num_spans,
        time_splits=1,
        signals=of_states,
    )
    reverse = reverse._replace(
        stores=(_in_ring(dstates, 2, of_dstates.tiles), dv), signals=of_dstates
    )
    return reverse, forward


def lead_of_scans(ring_chunks: int, num_v_blocks: int) -> Lead:
    """Of both scans, each in CTAs for blocks of V, over the gradient kernel. 0 chunks: no ring.

    Interpret mode runs one CTA after the other: a scan would wait for a kernel that has not begun.
    """
    tiles = 0 if interpreting() else ring_chunks
    return Lead(tiles, num_writers=2 * num_v_blocks, descending=True)


def _in_ring(x: jax.ShapeDtypeStruct, axis: int, size: int) -> jax.ShapeDtypeStruct:
    """The array with so many elements of an axis; 0: all."""
    shape = list(x.shape)
    shape[axis] = size or shape[axis]
    return jax.ShapeDtypeStruct(shape, x.dtype)
