"""The H200 as XLA's compiler is told of it: programs are compiled for it on machines without a GPU."""

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
