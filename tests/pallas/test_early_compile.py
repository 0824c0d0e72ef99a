"""Kernels as programs of their own: the same bytes in every program, and compiled by threads before it is."""

import os

import jax
import jax.numpy as jnp
import pytest

import jfla
from benchmarks.h200 import H200
from jfla.pallas.mgpu import early_compile


def _lowered(scale, sharding=None):
    """A GDN forward for an H200, in a program that `scale` makes another one."""

    def program(*main):
        return scale * jfla.chunk_gdn(*main, implementation="pallas").output

    shape = (1, 128, 2)
    tokens = jax.ShapeDtypeStruct((*shape, 128), jnp.bfloat16, sharding=sharding)
    gates = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)
    with jfla.pallas.compiling_for("9.0"):
        traced = jax.jit(program).trace(tokens, tokens, tokens, gates, gates)
        return traced.lower(lowering_platforms=("cuda",))


def test_kernels_are_the_same_bytes_whatever_was_lowered_before():
    first = _lowered(2).as_text()
    jax.clear_caches()
    again = _lowered(2).as_text()
    assert "mosaic_gpu_v2" in first
    assert again == first


def test_nothing_is_compiled_early_for_a_described_gpu(monkeypatch):
    """Also where there is a GPU, which is not that one."""
    begun = {}
    monkeypatch.setattr(early_compile, "_BEGUN", begun)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda **_: jax.devices())
    _lowered(3)
    assert begun == {}


@pytest.mark.aot
@pytest.mark.xdist_group("gdn")
def test_threads_compile_the_kernels_of_a_program(capfd, monkeypatch):
    from jax.experimental import topologies

    topology = topologies.get_topology_desc(
        platform="cuda", topology_name="1x1x1", target_config=H200, topology="1x1x1"
    )
    device = topology.devices[0]
    here = jax.sharding.SingleDeviceSharding(device)
    begun = {}
    monkeypatch.setattr(early_compile, "_BEGUN", begun)
    monkeypatch.setattr(early_compile, "_device", lambda _: device)
    monkeypatch.setitem(os.environ, "MOSAIC_GPU_DUMP_PTXAS", "1")
    program = _lowered(5, here)
    for future in begun.values():
        future.result()
    kernels = ("jfla_intra_gdn", "jfla_output_scan")
    early = capfd.readouterr()
    assert len(begun) == len(kernels)
    assert all(name in early.out + early.err for name in kernels)

    program.compile()
    late = capfd.readouterr()
    assert not any(name in late.out + late.err for name in kernels)

    _lowered(6, here)
    assert len(begun) == len(kernels)
