"""Limits of registers: what the warpgroups of a launch want together is there."""

import jax
import jax.numpy as jnp
import pytest

import jfla
from jfla.pallas.mgpu import launch
from jfla.pallas.mgpu.registers import RegisterLimits, check_registers


@pytest.mark.parametrize(
    ("limits", "num_warpgroups", "fits"),
    [
        (RegisterLimits(232, 40).of(2), 3, True),
        (RegisterLimits(240, 32).of(2), 3, False),
        (RegisterLimits(232, 24).of(2), 4, True),
        (RegisterLimits(232, 40).of(2), 4, False),
        (RegisterLimits(232, 40).of(1), 4, True),
    ],
)
def test_limits_beyond_what_was_launched_are_refused(limits, num_warpgroups, fits):
    if fits:
        check_registers("kernel", limits, num_warpgroups)
        return
    with pytest.raises(ValueError, match="one would wait for ever"):
        check_registers("kernel", limits, num_warpgroups)


@pytest.mark.parametrize("op", ["kda", "gdn"])
@pytest.mark.parametrize(("batch", "heads"), [(8, 6), (1, 32)])
def test_every_launch_of_a_call_is_checked(op, batch, heads, monkeypatch):
    checked = []

    def record(name, limits, num_warpgroups):
        checked.append((name, num_warpgroups))
        check_registers(name, limits, num_warpgroups)

    monkeypatch.setattr(launch, "check_registers", record)
    x = jax.ShapeDtypeStruct((batch, 1024, heads, 128), jnp.bfloat16)
    gate = x if op == "kda" else jax.ShapeDtypeStruct(x.shape[:3], jnp.bfloat16)
    beta = jax.ShapeDtypeStruct(x.shape[:3], jnp.bfloat16)
    chunk = getattr(jfla, f"chunk_{op}")
    with jfla.pallas.compiling_for("9.0"):
        jax.eval_shape(
            lambda *args: chunk(*args, implementation="pallas"), x, x, x, gate, beta
        )
    assert any("output_scan" in name for name, _ in checked)
