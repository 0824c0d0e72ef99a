"""Which calls the kernels take, on which device, and the reason for those that they do not."""

import os
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from jfla.pallas.context import Target, interpreting, mma_kernels_wanted, target
from jfla.pallas.heuristics import (
    HOPPER_SMEM_BYTES,
    HOPPER_SMS,
    MAX_DIM,
    SMEM_BYTES,
    SUPPORTED_DIMS,
)
from jfla.pallas.kernel_times import BYTES_PER_US, H200_BYTES_PER_US
from jfla.pallas.machine import Machine
from jfla.pallas.padding import kernel_size
from jfla.types import Form, Inputs, Options

# By compute capability, the machine whose instructions the kernels are made of there.
MACHINES: dict[str, Machine] = {
    "8.0": "ampere",
    "8.6": "ampere",
    "8.9": "ampere",
    "9.0": "hopper",
    "10.0": "ampere",
    "10.3": "ampere",
    "12.0": "ampere",
    "12.1": "ampere",
}
SHARED_GPU = "JFLA_SHARED_GPU"
KERNELS: dict[Machine, str] = {"hopper": "Hopper kernels", "ampere": "mma.sync kernels"}
MEASURED = (
    "9.0",
)  # compute capabilities of GPUs on which kernels have run; for others they are compiled


def unsupported(form: Form, inputs: Inputs, options: Options) -> str | None:
    """None, or why the kernels cannot take this call here."""
    reason = unsupported_call(form, inputs, options)
    if reason is None and not interpreting():
        reason = unsupported_target(target_of(inputs))
    if reason is None and form == "chunk":
        reason = _unsupported_size(inputs, machine_of(inputs))
    return reason


def _unsupported_size(inputs: Inputs, machine: Machine) -> str | None:
    for letter, size in (("K", inputs.q.shape[-1]), ("V", inputs.v.shape[-1])):
        if size > MAX_DIM[machine]:
            kernels = KERNELS[machine]
            return f"{letter} = {size}; the {kernels} take {letter} up to {MAX_DIM[machine]}"
    return None


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
            f"the kernels run on GPUs of compute capability {_CAPABILITIES}"
        )
    capability = capability_of(device)
    if capability in MACHINES:
        return None
    why = _FAILS.get(capability.partition(".")[0])
    if why is None:
        return (
            f"the device has compute capability {capability}; "
            f"the kernels are compiled for {_CAPABILITIES}"
        )
    return f"the device has compute capability {capability}, {why}"


*_others, _last = MACHINES
_CAPABILITIES = f"{', '.join(_others)} and {_last}"
# By major compute capability, why there are no kernels for it.
_FAILS = {
    "7": "which has no mma.sync of bfloat16 and no cp.async",
}


def capability_of(device: Target | jax.Device) -> str:
    """The compute capability of a GPU."""
    return str(getattr(device, "compute_capability", None))


def machine_of(inputs: Inputs) -> Machine:
    """The machine whose instructions the kernels of the call are made of; Hopper where no kernels are."""
    if mma_kernels_wanted():
        return "ampere"
    if interpreting():
        return "hopper"
    return MACHINES.get(capability_of(target_of(inputs)), "hopper")


def smem_bytes(inputs: Inputs) -> int:
    """What the tiles of a CTA may take on the GPU on which the call runs."""
    room = SMEM_BYTES.get(capability_of(target_of(inputs)), HOPPER_SMEM_BYTES)
    return room if machine_of(inputs) == "hopper" else min(room, SMEM_BYTES["8.0"])


def is_measured(inputs: Inputs) -> bool:
    """Whether kernels have run on such a GPU as the call runs on."""
    return capability_of(target_of(inputs)) in MEASURED


def exclusive(inputs: Inputs) -> bool:
    """Whether a launch can count on `num_sms`.

    Not where the number is a guess; nor inside shard_map, where collectives may hold multiprocessors until all devices
    are there; nor where the environment says that other processes' kernels may run at the same time, as with NVIDIA's
    MPS.
    """
    if jax.sharding.get_abstract_mesh().manual_axes:
        return False
    device: Any = target_of(inputs)
    known = isinstance(device, Target) or (
        device.platform == "gpu" and bool(getattr(device, "core_count", None))
    )
    return known and os.environ.get(SHARED_GPU, "0") == "0"


def num_sms(inputs: Inputs) -> int:
    """Multiprocessors of the GPU on which the call runs; those of an H200 where there is none."""
    device: Any = target_of(inputs)
    if isinstance(device, Target):
        return device.num_sms
    if device.platform != "gpu":
        return HOPPER_SMS
    return int(getattr(device, "core_count", None) or HOPPER_SMS)


def bytes_per_us(inputs: Inputs) -> float:
    """What a copy moves in a microsecond on the GPU on which the call runs."""
    kind = str(getattr(target_of(inputs), "device_kind", None))
    return BYTES_PER_US.get(kind, H200_BYTES_PER_US)
