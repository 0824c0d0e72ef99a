"""Kernels of which one warpgroup looks at barriers late: it misses no phase, and no bit depends on who comes first.

A GPU waits for ever where a barrier's phase ends twice before somebody who waits for it has looked once. Interpret mode
says so, but only if the phases end in that order there.
"""

from typing import Any

import jax
import numpy as np
import pytest
from support import interpreter
from support.flags import record_flags
from support.kernel_cases import Call, inputs, results, scheduled

from jfla.pallas.backward_overlap import BackwardOverlap

APART: dict[str, Any] = {"num_sms": 1}  # one CTA for all chunks
BESIDE_THE_SCAN: dict[str, Any] = {"overlap_ctas": 1, "overlap_v_block": 64}
BESIDE = BESIDE_THE_SCAN | {
    "backward_overlap": BackwardOverlap(1, 2, 0, state_ring=0, dstate_ring=0),
}
PACKED = {"segments": 3, "segment_states": True}
MOST_WARPGROUPS = 3  # of a CTA of these kernels


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("op", "more", "kernels"),
    [
        pytest.param("kda", {"key_dim": 128}, BESIDE_THE_SCAN, id="kda-beside"),
        pytest.param("gdn", {}, BESIDE, id="gdn-beside"),
        pytest.param(
            "kda", {"key_dim": 128}, APART, id="kda-apart", marks=pytest.mark.slow
        ),
        pytest.param("gdn", {}, APART, id="gdn-apart", marks=pytest.mark.slow),
        pytest.param("kda", PACKED, APART, id="kda-packed", marks=pytest.mark.slow),
        pytest.param("gdn", PACKED, APART, id="gdn-packed", marks=pytest.mark.slow),
    ],
)
def test_a_late_warpgroup_misses_no_phase(op, more, kernels, monkeypatch):
    recorded = record_flags(monkeypatch)
    arrays, rest = inputs(Call(op, time=250, group=1, **more))
    call = scheduled(op, **kernels)
    usual = jax.tree.map(np.asarray, results(call, arrays, rest))
    has_flags = any(shape is not None for shape in recorded.signals)
    assert has_flags == (kernels is not APART)
    for warpgroup in range(MOST_WARPGROUPS):
        with interpreter.late(warpgroup):
            late = jax.tree.map(np.asarray, results(call, arrays, rest))
        jax.tree.map(np.testing.assert_array_equal, usual, late)
