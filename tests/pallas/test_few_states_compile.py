"""The backward with few states in memory, compiled down to machine code for Hopper on a machine without a GPU."""

import os
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from support.compile_for_h200 import compile_for_h200
from support.compile_report import facts
from support.described_calls import describe

import jfla
from jfla.pallas import heuristics, support


@pytest.mark.aot
@pytest.mark.parametrize(
    ("raw", "dtype", "beside"),
    [
        (False, jnp.bfloat16, True),
        pytest.param(True, jnp.bfloat16, True, marks=pytest.mark.slow),
        pytest.param(True, jnp.float16, True, marks=pytest.mark.slow),
        pytest.param(False, jnp.bfloat16, False, marks=pytest.mark.slow),
    ],
)
def test_scans_and_gradients_of_few_states_do_not_spill(
    raw, dtype, beside, capfd, monkeypatch
):
    """Beside each other, as on an H100, with states at both ends; or one span of time after the other.

    With norms the forward spills the addresses of two tiles.
    """
    allowed = {"jfla_intra_gdn_beside_output_scan": 8} if raw else {}
    monkeypatch.setitem(os.environ, "MOSAIC_GPU_DUMP_PTXAS", "1")
    kernels = {"jfla_backward_scans", "jfla_grads_gdn"}
    # Batches of their own: a kernel that another test compiles is reported once.
    batch, time = 17, 8192
    if beside:
        kernels = {"jfla_backward_scans_beside_grads_gdn"}
        monkeypatch.setattr(support, "bytes_per_us", lambda _: 3.03e6)
    else:
        monkeypatch.setattr(heuristics, "backward_overlap", lambda *_: None)
    arrays, static = describe("gdn", (128, 128), raw, batch, time)
    arrays |= {name: jax.ShapeDtypeStruct(arrays[name].shape, dtype) for name in "qkv"}
    if beside:
        states = (batch, 2, 128, 128)
        arrays["initial_state"] = jax.ShapeDtypeStruct(states, jnp.float32)

    def both(arrays: dict[str, Any]) -> dict[str, Any]:
        call = lambda x: jfla.chunk_gdn(**x, **static, return_final_state=True)
        out, adjoint = jax.vjp(call, arrays)
        return adjoint(out)[0]

    text = compile_for_h200(both, arrays)
    assert (" while(" in text) == (not beside)
    now = facts("".join(capfd.readouterr()), {})
    assert kernels <= set(now)
    for kernel, found in now.items():
        assert found["spilled bytes"] <= allowed.get(kernel, 0), kernel
        assert "serialized" not in found, kernel
