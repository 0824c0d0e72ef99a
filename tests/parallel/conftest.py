"""The fixture that both files about kernels use."""

import jax
import pytest


@pytest.fixture
def standin(monkeypatch):
    """Plain JAX in the place of the kernels."""
    if jax.device_count() < 8:
        pytest.skip("needs 8 devices")
    from support.standin import Standin, gate_grads

    from jfla import chunk_op
    from jfla.pallas import gate_cotangents

    jax.clear_caches()
    standin = Standin()
    monkeypatch.setattr(chunk_op, "kernels_of_chunk", standin)
    monkeypatch.setattr(gate_cotangents, "gate_grads", gate_grads)
    return standin
