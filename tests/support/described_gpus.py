"""GPUs as XLA's compiler is told of them, and calls compiled for them on a machine without a GPU."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

import jfla

_KIB = 1024


@dataclasses.dataclass(frozen=True)
class DescribedGpu:
    """A GPU by compute capability; `smem_per_cta` is what a CTA may have at most, in bytes."""

    name: str
    compute_capability: str
    num_sms: int
    smem_per_cta: int
    smem_per_sm: int
    memory_bandwidth: int

    def config(self) -> str:
        """For `jax.experimental.topologies`."""
        major, minor = self.compute_capability.split(".")
        # XLA finds it on a device of these: code of one architecture alone, as of sm_120a.
        feature = "feature_extension: ACCELERATED_FEATURES" if int(major) >= 9 else ""
        return f"""
gpu_device_info {{
  threads_per_block_limit: 1024  threads_per_warp: 32  shared_memory_per_block: 49152
  shared_memory_per_core: {self.smem_per_sm}  threads_per_core_limit: 1536  core_count: {self.num_sms}
  fpus_per_core: 128  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  memory_bandwidth: {self.memory_bandwidth}  l2_cache_size: 40000000  clock_rate_ghz: 1.5
  device_memory_size: 24000000000  shared_memory_per_block_optin: {self.smem_per_cta}
  cuda_compute_capability {{ major: {major} minor: {minor} {feature} }}
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 12 }}
device_description_str: "{self.name}"
"""

    def compile(self, function: Callable[..., Any], *arguments: Any) -> None:
        """`function` of arrays with these shapes, down to machine code."""
        from jax.experimental import topologies

        topology = topologies.get_topology_desc(
            platform="cuda",
            topology_name="1x1x1",
            target_config=self.config(),
            topology="1x1x1",
        )
        here = jax.sharding.SingleDeviceSharding(topology.devices[0])
        there = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here)
        with jfla.pallas.compiling_for(self.compute_capability, self.num_sms):
            jax.jit(function).trace(*jax.tree.map(there, arguments)).lower().compile()


GPUS = {
    gpu.compute_capability: gpu
    for gpu in (
        DescribedGpu("NVIDIA A100", "8.0", 108, 163 * _KIB, 164 * _KIB, 1555 * 10**9),
        DescribedGpu("NVIDIA RTX 3090", "8.6", 82, 99 * _KIB, 100 * _KIB, 936 * 10**9),
        DescribedGpu("NVIDIA L4", "8.9", 58, 99 * _KIB, 100 * _KIB, 300 * 10**9),
        DescribedGpu("NVIDIA B200", "10.0", 148, 227 * _KIB, 228 * _KIB, 8000 * 10**9),
        DescribedGpu("NVIDIA B300", "10.3", 148, 227 * _KIB, 228 * _KIB, 8000 * 10**9),
        DescribedGpu(
            "NVIDIA RTX 5090", "12.0", 170, 99 * _KIB, 100 * _KIB, 1792 * 10**9
        ),
        DescribedGpu("NVIDIA GB10", "12.1", 48, 99 * _KIB, 100 * _KIB, 273 * 10**9),
    )
}
