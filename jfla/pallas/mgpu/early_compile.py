"""Kernels are compiled in threads while Python is still lowering the rest of their program.

XLA compiles a program when all of it is lowered, its kernels one after the other. A kernel that was compiled before, in
whatever program, it finds by the hash of its module. So each kernel, when its program is lowered, becomes a program of
its own, and a thread compiles that program.
"""

import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax

from jfla.pallas.context import Target
from jfla.pallas.mgpu.kernel_code import KernelCode

_THREADS = ThreadPoolExecutor(min(4, os.cpu_count() or 1), "jfla-compile")
_BEGUN: dict[bytes | bool, Future] = {}  # by the hash of the kernel's module
_BEGUN_LOCK = threading.Lock()


def begin(code: KernelCode, inputs: Sequence[Any], target: Target | None) -> None:
    """Has a thread compile a kernel for the GPU of this process, unless there is none or one was told to before.

    What is lowered for a GPU that was described may never be compiled, or by another process.
    """
    device = _device(target)
    if device is None:
        return
    here = jax.sharding.SingleDeviceSharding(device)
    described = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here) for x in inputs]

    # A failure is for the program's own compilation to report: nobody looks at the future.
    def compile_kernel() -> None:
        traced = jax.jit(code).trace(*described)
        traced.lower(lowering_platforms=("cuda",)).compile()

    with _BEGUN_LOCK:
        key = code.config["kernel_hash"]
        if key not in _BEGUN:
            _BEGUN[key] = _THREADS.submit(compile_kernel)


def _device(target: Target | None) -> jax.Device | None:
    if target is not None or jax.default_backend() != "gpu":
        return None
    return jax.local_devices(backend="gpu")[0]
