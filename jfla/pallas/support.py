"""Which calls the kernels take, on which device, and the reason for those that they do not."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from jfla.pallas.context import Target, interpreting, target
from jfla.pallas.heuristics import HOPPER_SMS, SUPPORTED_DIMS
from jfla.pallas.padding import kernel_size
from jfla.types import Form, Inputs, Options


def unsupported(form: Form, inputs: Inputs, options: Options) -> str | None:
    """None, or why the kernels cannot take this call here."""
    reason = unsupported_call(form, inputs, options)
    if reason is not None or interpreting():
        return reason
    return unsupported_target(target_of(inputs))


def unsupported_call(form: Form, inputs: Inputs, options: Options) -> str | None:
    """None, or why the kernels cannot take a call of this shape and dtype on any device."""
    if form == "recurrent":
        reason = _unsupported_recurrent(inputs)
    else:
        reason = _unsupported_chunk(inputs, options)
    if reason is not None:
        return reason
    for name in ("g", "beta"):
        if getattr(inputs, name).dtype == jnp.float64:
            return f"{name} is float64; the kernels compute in float32"
    if inputs.initial_state is not None and inputs.initial_state.dtype == jnp.float64:
        return "initial_state is float64; the kernels take float32 and bfloat16"
    for letter, size in (("K", inputs.q.shape[-1]), ("V", inputs.v.shape[-1])):
        if form == "chunk" and kernel_size(size) is None:
            return f"{letter} = {size}; the kernels take {letter} up to {max(SUPPORTED_DIMS)}"
        if form == "recurrent" and size not in SUPPORTED_DIMS:
            return f"{letter} = {size}; the kernels take {letter} in {SUPPORTED_DIMS}"
    return None


def _unsupported_chunk(inputs: Inputs, options: Options) -> str | None:
    if options.per_segment_state and options.sequence_axis is not None:
        return "states per segment with sequence_axis; the kernels hand one state from device to device"
    return _wrong_dtype(inputs, jnp.bfloat16, jnp.float16)


def _unsupported_recurrent(inputs: Inputs) -> str | None:
    if inputs.segment_ids is not None and inputs.state_slots is None:
        return "segment_ids; the decode kernel takes one sequence per row"
    return _wrong_dtype(inputs, jnp.bfloat16, jnp.float16, jnp.float32)


def _wrong_dtype(inputs: Inputs, *taken: Any) -> str | None:
    *others, last = (jnp.dtype(dtype).name for dtype in taken)
    for name in ("q", "k", "v"):
        dtype = getattr(inputs, name).dtype
        if dtype not in taken:
            return f"{name} is {dtype}; the kernels take {', '.join(others)} and {last}"
    return None


def target_of(inputs: Inputs) -> Target | jax.Device:
    """The GPU of `compiling_for`, or the device on which the call runs.

    That is where its data is, or the default device for what is free to move or only described. What is traced runs
    where it will be lowered for, which may be a GPU if this process has one.
    """
    placed = target() or placed_on(inputs)
    if placed is not None:
        return placed
    if is_traced(inputs):
        gpus = (device for device in jax.local_devices() if device.platform == "gpu")
        return next(gpus, jax.local_devices()[0])
    default = jax.config.jax_default_device
    if isinstance(default, jax.Device):
        return default
    return jax.local_devices(backend=default)[0]


def placed_on(inputs: Inputs) -> jax.Device | None:
    """The device of the arrays that are committed to one; None where all are traced, described or free to move."""
    for x in jax.tree.leaves(inputs):
        if isinstance(x, Tracer) or not getattr(x, "committed", False):
            continue
        devices: set[jax.Device] = x.sharding.device_set
        return min(devices, key=_device_id)
    return None


def _device_id(device: jax.Device) -> int:
    return device.id


def is_traced(inputs: Inputs) -> bool:
    """Whether some array has no place yet, so that only lowering knows the platform."""
    return any(isinstance(x, Tracer) for x in jax.tree.leaves(inputs))


def unsupported_target(device: Target | jax.Device) -> str | None:
    """None, or why there are no kernels for this device."""
    platform = getattr(device, "platform", "gpu")
    if platform != "gpu":
        return (
            f"the device is a {platform.upper()}; "
            "the kernels run on GPUs of compute capability 9.0 (Hopper)"
        )
    capability = str(getattr(device, "compute_capability", None))
    if capability != "9.0":
        return (
            f"the device has compute capability {capability}; "
            "the kernels are compiled for 9.0 (Hopper)"
        )
    return None


def num_sms(inputs: Inputs) -> int:
    """Multiprocessors of the GPU on which the call runs; those of an H200 where there is none."""
    device: Any = target_of(inputs)
    if isinstance(device, Target):
        return device.num_sms
    if device.platform != "gpu":
        return HOPPER_SMS
    return int(getattr(device, "core_count", None) or HOPPER_SMS)
