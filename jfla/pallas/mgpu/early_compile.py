"""Kernels are compiled in threads while Python is still lowering the rest of their program.

XLA compiles a program when all of it is lowered, its kernels one after the other. A kernel that was compiled before, in
whatever program, it finds by the hash of its module. So each kernel, when it is lowered, becomes a program of its own,
and a thread compiles that program.
"""

import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jax.experimental.mosaic.gpu import core
from jaxlib.mlir import ir

from jfla.pallas.context import target
from jfla.pallas.mgpu.module_name import module_name

_THREADS = ThreadPoolExecutor(min(4, os.cpu_count() or 1), "jfla-compile")
_BEGUN: dict[bytes, Future] = {}  # by the hash of the kernel's module
_LOCK = threading.Lock()
_lower = core._mosaic_gpu_lowering_rule


def lowering_rule(ctx: Any, *operands: Any, module: Any, **params: Any) -> Any:
    """Lowers a Mosaic kernel to a custom call as JAX does; if it is one of jfla's, a thread compiles that call."""
    ours = (module_name(module) or "").startswith("jfla_")
    results = _lower(ctx, *operands, module=module, **params)
    device = _device(ctx)
    if ours and device is not None:
        config = results[0].owner.attributes["mhlo.backend_config"]
        aliases = dict(params["input_output_aliases"])
        _begin(ctx, _values(ir.DictAttr(config)), aliases, device)
    return results


def _device(ctx: Any) -> jax.Device | None:
    """The GPU of this process, where the program is to be compiled for it."""
    # An exported program is compiled elsewhere, and one for a described GPU may never be.
    if ctx.is_forward_compat() or target() is not None:
        return None
    if jax.default_backend() != "gpu":
        return None
    return jax.local_devices(backend="gpu")[0]


def _begin(
    ctx: Any, config: dict[str, Any], aliases: dict[int, int], device: Any
) -> None:
    """Has a thread compile the call of the kernel that `config` holds, unless one was told to before."""
    here = jax.sharding.SingleDeviceSharding(device)
    inputs = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here) for x in ctx.avals_in
    ]
    outputs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in ctx.avals_out]

    # A failure is for the program's own compilation to report: nobody looks at the future.
    def compile_kernel() -> None:
        run = jax.ffi.ffi_call(
            "mosaic_gpu_v2",
            outputs,
            input_output_aliases=aliases,
            custom_call_api_version=4,
        )
        traced = jax.jit(lambda *x: run(*x, **config)).trace(*inputs)
        traced.lower(lowering_platforms=("cuda",)).compile()

    with _LOCK:
        if config["kernel_hash"] not in _BEGUN:
            _BEGUN[config["kernel_hash"]] = _THREADS.submit(compile_kernel)


def _values(config: ir.DictAttr) -> dict[str, bytes | np.bool_]:
    """A kernel's configuration as `jax.ffi.ffi_call` takes it: its entries are strings and booleans."""
    return {
        entry.name: entry.attr.value_bytes
        if isinstance(entry.attr, ir.StringAttr)
        else np.bool_(ir.BoolAttr(entry.attr).value)
        for entry in config
    }


core._mosaic_gpu_lowering_rule = lowering_rule
