"""Every kernel of the table compiled down to machine code for an H200, on a machine without a GPU: nothing spills."""

import os
import re

import jax
import jax.numpy as jnp
import pytest

import jfla
from jfla._types import Inputs, Options
from jfla.pallas import delta_rule

H200 = """
gpu_device_info {
  threads_per_block_limit: 1024  threads_per_warp: 32  shared_memory_per_block: 49152  shared_memory_per_core: 233472
  threads_per_core_limit: 2048  core_count: 132  fpus_per_core: 128  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535  block_dim_limit_z: 65535  memory_bandwidth: 4800000000000  l2_cache_size: 52428800
  clock_rate_ghz: 1.98  device_memory_size: 150000000000  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 minor: 0 }  registers_per_core_limit: 65536  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 12 }
device_description_str: "NVIDIA H200"
"""


def compile_for_h200(function, *arguments) -> None:
    from jax.experimental import topologies

    topology = topologies.get_topology_desc(
        platform="cuda", topology_name="1x1x1", target_config=H200, topology="1x1x1"
    )
    here = jax.sharding.SingleDeviceSharding(topology.devices[0])
    on_h200 = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here)
    jax.jit(function).trace(*jax.tree.map(on_h200, arguments)).lower().compile()


def describe(op: str, key_dim: int, value_dim: int, raw: bool, batch: int) -> tuple[Inputs, Options]:
    """A call's shapes; batch decides whether V is split over programs."""
    shape = jax.ShapeDtypeStruct
    time, heads = 128, 2
    gate_dim = key_dim if op == "kda" else 1
    queries, values = (shape((batch, time, heads, d), jnp.bfloat16) for d in (key_dim, value_dim))
    gate = jfla.SoftplusGate(shape((heads,), jnp.float32), None) if raw else None
    g = shape((batch, time, heads, gate_dim), jnp.bfloat16 if raw else jnp.float32)
    segment_ids = shape((batch, time), jnp.int32) if raw else None
    inputs = Inputs(queries, queries, values, g, shape((batch, time, heads), jnp.float32), gate, None, segment_ids)
    return inputs, Options(0.1, None, raw, not raw, None)


# Bytes that a kernel of KDA may spill; those of GDN spill nothing. Both have a loop that only chunks with strong gates
# enter, and the compiler keeps what that loop needs. Written down so that it does not grow.
SPILLS = {"jfla_prepare_kda": 300, "jfla_chunk_gradients": 800}


@pytest.mark.aot
@pytest.mark.parametrize(
    ("dims", "raw", "batch"),
    [((64, 64), True, 64), ((128, 128), True, 1), ((128, 128), False, 64), ((64, 128), True, 64)],
)
@pytest.mark.parametrize("op", ["kda", "gdn"])
def test_no_kernel_spills_more_than_is_known(op, dims, raw, batch, capfd, monkeypatch):
    monkeypatch.setitem(os.environ, "MOSAIC_GPU_DUMP_PTXAS", "1")
    inputs, options = describe(op, *dims, raw, batch)

    def both(inputs):
        out, pairs = delta_rule.forward(inputs, options)
        return delta_rule.backward(inputs, options, pairs, out.output, out.final_state)

    compile_for_h200(both, inputs)
    report = "".join(capfd.readouterr())
    spills = re.findall(
        r"Function properties for (jfla_[a-z_]+?)_mosaic_gpu_kernel\s+.*?(\d+) bytes spill stores", report
    )
    assert spills, f"expected a report of the kernels that no earlier test compiled, got none: {report[-2000:]}"
    allowed = SPILLS if op == "kda" else {}
    over = {name: int(stores) for name, stores in spills if int(stores) > allowed.get(name, 0)}
    assert not over, report
