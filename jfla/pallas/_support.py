"""What the kernels can take, and the reason when they cannot."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from jfla._types import Inputs, Options
from jfla.pallas._config import DECODE_TOKENS, SUPPORTED_DIMS
from jfla.pallas._launch import interpreting


def unsupported(form: str, inputs: Inputs, options: Options) -> str | None:
    """None, or why the kernels cannot take this call of a "chunk" or "recurrent" op."""
    reason = _unsupported_recurrent(inputs) if form == "recurrent" else _unsupported_chunk(inputs, options)
    if reason is not None:
        return reason
    for name in ("g", "beta"):
        if getattr(inputs, name).dtype == jnp.float64:
            return f"{name} is float64; the kernels compute in float32"
    if inputs.initial_state is not None and inputs.initial_state.dtype != jnp.float32:
        return f"initial_state is {inputs.initial_state.dtype}; the kernels take float32"
    for letter, size in (("K", inputs.q.shape[-1]), ("V", inputs.v.shape[-1])):
        if size not in SUPPORTED_DIMS:
            return f"{letter} = {size}; the kernels take {letter} in {SUPPORTED_DIMS}"
    return None if interpreting() else _unsupported_device(inputs)


def _unsupported_chunk(inputs: Inputs, options: Options) -> str | None:
    if options.per_segment_state:
        return 'initial or final states per segment need the aligned grid of "xla"'
    key_dim, gate_dim = inputs.q.shape[-1], inputs.g.shape[-1]
    if key_dim == gate_dim == 256:
        return f"K = {key_dim} with a decay for each channel (KDA): a chunk fits into shared memory up to K = 128"
    return _wrong_dtype(inputs, jnp.bfloat16, jnp.float16)


def _unsupported_recurrent(inputs: Inputs) -> str | None:
    time = inputs.q.shape[1]
    if time > DECODE_TOKENS:
        return f"T = {time}; the decode kernel takes up to {DECODE_TOKENS} tokens a call"
    if inputs.segment_ids is not None:
        return "segment_ids; the decode kernel takes one sequence per row"
    return _wrong_dtype(inputs, jnp.bfloat16, jnp.float16, jnp.float32)


def _wrong_dtype(inputs: Inputs, *taken: Any) -> str | None:
    *others, last = (jnp.dtype(dtype).name for dtype in taken)
    for name in ("q", "k", "v"):
        dtype = getattr(inputs, name).dtype
        if dtype not in taken:
            return f"{name} is {dtype}; the kernels take {', '.join(others)} and {last}"
    return None


def _unsupported_device(inputs: Inputs) -> str | None:
    device = _device(inputs.q)
    capability = getattr(device, "compute_capability", None)
    if device.platform != "gpu":
        return f"the device is a {device.platform.upper()}; the kernels run on GPUs of compute capability 9.0 (Hopper)"
    if str(capability) != "9.0":
        return f"the device has compute capability {capability}; the kernels are compiled for 9.0 (Hopper)"
    return None


def _device(x: Any) -> jax.Device:
    """Where the call runs: where its data is, or the default device for what is traced or only described."""
    if isinstance(x, jax.Array) and not isinstance(x, Tracer) and getattr(x, "committed", False):
        return min(x.sharding.device_set, key=lambda d: d.id)
    default = jax.config.jax_default_device
    return default if isinstance(default, jax.Device) else jax.local_devices(backend=default)[0]
