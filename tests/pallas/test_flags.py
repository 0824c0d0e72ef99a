"""Kernels side by side with simulated flags: signals, rings and room, in the bits of one kernel after the other."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from support import interpreter
from support.flags import simulated_flags
from support.kernel_cases import MAIN, Call, inputs, results, scheduled

from jfla.pallas.backward_overlap import BackwardOverlap
from jfla.pallas.mgpu import overlap

pytestmark = pytest.mark.interpreted

# Seven chunks in a ring of four; intra has one of them in work, the scan up to three.
RING: dict[str, Any] = {"overlap_ctas": 1, "overlap_v_block": 64, "ring_chunks": 4}
GROUPS = RING | {"ring_chunks": 3, "sequences_per_group": 1}
# Of three sequences, the last alone.
UNEVEN_GROUPS = GROUPS | {"sequences_per_group": 2}
# Twelve chunks in six spans.
BACKWARD_RINGS = {
    "overlap_ctas": 0,
    "backward_overlap": BackwardOverlap(1, 6, 0, state_ring=8, dstate_ring=6),
}


def forward(op: Callable[..., Any], arrays: dict[str, Any]) -> Any:
    return op(*(arrays[name] for name in MAIN), return_final_state=True)


def check_same_bits(found: Any, wanted: Any) -> None:
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)),
        found,
        wanted,
    )


@pytest.mark.parametrize(
    ("op", "time", "kernels"),
    [
        pytest.param("gdn", 420, RING, id="gdn-ring", marks=pytest.mark.slow),
        pytest.param("gdn", 250, GROUPS, id="gdn-groups"),
        pytest.param(
            "gdn", 250, UNEVEN_GROUPS, id="gdn-uneven-groups", marks=pytest.mark.slow
        ),
        pytest.param("kda", 420, RING, id="kda-ring", marks=pytest.mark.slow),
        pytest.param("kda", 250, GROUPS, id="kda-groups"),
    ],
)
def test_intra_in_a_ring_beside_the_scan_gives_the_same_bits(op, time, kernels):
    heads = {"heads": 3, "group": 1} if kernels == UNEVEN_GROUPS else {}
    arrays, _ = inputs(Call(op, time=time, key_dim=128, **heads))
    alone = forward(scheduled(op, overlap_ctas=0), arrays)
    with simulated_flags() as launches:
        beside = jax.block_until_ready(forward(scheduled(op, **kernels), arrays))
    assert set(launches) == {f"jfla_intra_{op}_beside_output_scan"}
    check_same_bits(beside, alone)


def test_scans_in_rings_beside_the_gradients_give_the_same_bits():
    arrays, rest = inputs(Call("gdn", time=760, group=1))
    alone = results(scheduled("gdn", overlap_ctas=0), arrays, rest)
    with simulated_flags() as launches:
        call = scheduled("gdn", **BACKWARD_RINGS)
        beside = jax.block_until_ready(results(call, arrays, rest))
    assert set(launches) == {"jfla_backward_scans_beside_grads_gdn"}
    check_same_bits(beside, alone)


def test_a_flag_that_nobody_sets_is_an_error(monkeypatch):
    """The scan does not tell what it has read, and intra waits for room."""
    monkeypatch.setattr(overlap.ReadyFlags, "release", lambda *_: None)
    arrays, _ = inputs(Call("gdn", time=420, group=1))
    error = pytest.raises(jax.errors.JaxRuntimeError, match="bounds")
    with simulated_flags(most_looks=500), error:
        jax.block_until_ready(forward(scheduled("gdn", **RING), arrays))


def test_a_ring_without_room_is_overwritten(monkeypatch):
    """The scan's producer, warpgroup 1 of CTA 1, comes to its fourth chunk when intra has made all twelve."""
    arrays, _ = inputs(Call("gdn", time=760, group=1))
    alone = forward(scheduled("gdn", overlap_ctas=0), arrays)
    monkeypatch.setattr(overlap.ReadyFlags, "wait_for_room", lambda *_: None)
    with simulated_flags(), interpreter.late(1, cta=1):
        found = jax.block_until_ready(forward(scheduled("gdn", **RING), arrays))
    with pytest.raises(AssertionError):
        check_same_bits(found, alone)
