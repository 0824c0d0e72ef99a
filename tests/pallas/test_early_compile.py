"""Kernels as programs of their own: the same bytes in every program, and compiled by threads before it is."""

import gc
import os

import jax
import jax.numpy as jnp
import pytest

import jfla
from benchmarks.h200 import H200
from jfla.pallas.mgpu import early_compile, kernel_call


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


BACKWARD = ["jfla_intra_gdn", "jfla_backward_scans", "jfla_grads_gdn"]


def _traced_gradients():
    """Of a GDN call, for an H200."""

    def loss(*main):
        output = jfla.chunk_gdn(*main, implementation="pallas").output
        return jnp.sum(output.astype(jnp.float32))

    tokens = jax.ShapeDtypeStruct((1, 128, 2, 128), jnp.bfloat16)
    gates = jax.ShapeDtypeStruct((1, 128, 2), jnp.float32)
    with jfla.pallas.compiling_for("9.0"):
        grads = jax.jit(jax.grad(loss, argnums=range(5)))
        return grads.trace(tokens, tokens, tokens, gates, gates)


@pytest.fixture
def begun(monkeypatch):
    """Names of the kernels in the order in which their code was asked for."""
    names = []
    begin = kernel_call._begin

    def noting(call, operands):
        names.append(call.name)
        return begin(call, operands)

    jax.clear_caches()
    gc.collect()
    monkeypatch.setattr(kernel_call, "_begin", noting)
    return names


def test_kernels_of_the_backward_are_lowered_before_others(begun):
    """They compile longest. The last is the first, and each is asked for again where the program has it."""
    traced = _traced_gradients()
    with jfla.pallas.compiling_for("9.0"):
        traced.lower(lowering_platforms=("cuda",))
    assert begun == [*BACKWARD[::-1], "jfla_intra_gdn", "jfla_output_scan", *BACKWARD]


def test_a_backward_that_nobody_lowers_is_forgotten(begun):
    traced = _traced_gradients()
    del traced
    jax.clear_caches()
    gc.collect()
    _lowered(7)
    assert begun
    assert "jfla_grads_gdn" not in begun


def test_a_kernel_that_cannot_be_lowered_first_fails_in_its_own_program(
    begun, monkeypatch
):
    def refuse(call, operands):
        begun.append(call.name)
        raise NotImplementedError(call.name)

    traced = _traced_gradients()
    monkeypatch.setattr(kernel_call, "_begin", refuse)
    with (
        jfla.pallas.compiling_for("9.0"),
        pytest.raises(NotImplementedError, match="jfla_intra_gdn"),
    ):
        traced.lower(lowering_platforms=("cuda",))
    assert begun == [*BACKWARD[::-1], "jfla_intra_gdn"]


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
