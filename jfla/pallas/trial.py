"""Kernels for GPUs on which they were never run: whether `implementation=None` takes them there.

They are compiled without such a GPU, which says nothing of the versions of JAX, driver and ptxas that meet there. So
before an op first takes them by itself, a small call of it is compiled; where that fails the op takes "xla" and says
so. Under `jit` the failure of the call itself would come too late: when XLA compiles, it is past choosing.
"""

import dataclasses
import functools
import os
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp

from jfla.pallas import support
from jfla.pallas.context import Target, interpreting
from jfla.pallas.padding import kernel_size
from jfla.types import CHUNK, Form, Inputs, Options

VARIABLE = "JFLA_UNMEASURED_KERNELS"


@dataclasses.dataclass(frozen=True)
class Trial:
    """A small call of an op on a device of a kind: what a failure to compile may depend on."""

    form: Form
    op: str
    dtype: str
    key_dim: int
    value_dim: int
    device_kind: str

    def __str__(self) -> str:
        return f"{self.form}_{self.op}, K = {self.key_dim}, V = {self.value_dim}, {self.dtype}"


_FAILED: dict[Trial, str | None] = {}  # the reason, or None where it compiled
_LOCK = threading.Lock()


def refused(form: Form, inputs: Inputs, options: Options, compiles: bool) -> str | None:
    """None, or why `implementation=None` takes no kernels that were never run on a GPU like this.

    The first call of an op compiles its trial if `compiles`, and warns where that fails; without it only what is known
    already counts.
    """
    if interpreting() or support.is_measured(inputs):
        return None
    device = support.target_of(inputs)
    if os.environ.get(VARIABLE) == "0":
        capability = support.capability_of(device)
        return f"compiled for {capability}, but not measured there, and {VARIABLE}=0"
    if isinstance(device, Target):
        return None
    trial = _trial(form, inputs, options, device)
    with _LOCK:
        if trial not in _FAILED and compiles:
            _FAILED[trial] = _failure(trial, device)
        return _FAILED.get(trial)


def _trial(form: Form, inputs: Inputs, options: Options, device: jax.Device) -> Trial:
    sizes = (inputs.q.shape[-1], inputs.v.shape[-1])
    key_dim, value_dim = (kernel_size(size) or size for size in sizes)
    dtype = jnp.dtype(inputs.q.dtype).name
    return Trial(form, options.op.name, dtype, key_dim, value_dim, device.device_kind)


def _failure(trial: Trial, device: jax.Device) -> str | None:
    """Compiles the trial in a thread of its own, which knows nothing of the trace that the call is part of."""
    with ThreadPoolExecutor(1) as pool:
        error = pool.submit(compile_trial, trial, device).exception()
    if error is None:
        return None
    first_line = str(error).strip().partition("\n")[0]
    reason = f"compiling them for {trial.device_kind} failed: {type(error).__name__}: {first_line}"
    warnings.warn(
        f'{trial.form}_{trial.op} takes "xla", not the kernels: {reason} (tried: {trial}); '
        f"{VARIABLE}=0 leaves them out, and this trial with them",
        RuntimeWarning,
        stacklevel=2,
    )
    return reason


def compile_trial(trial: Trial, device: jax.Device) -> None:
    """Compiles the op's forward, and a chunked op's backward. Raises whatever the compiler does."""
    import jfla

    op = getattr(jfla, f"{trial.form}_{trial.op}")
    call = functools.partial(op, return_final_state=True, implementation="pallas")
    placed = jax.sharding.SingleDeviceSharding(device)
    time = 2 * CHUNK if trial.form == "chunk" else 1

    def array(*shape: int, dtype: Any = "float32") -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((1, time, 1, *shape), dtype, sharding=placed)

    q = array(trial.key_dim, dtype=trial.dtype)
    v = array(trial.value_dim, dtype=trial.dtype)
    g = array(trial.key_dim) if trial.op == "kda" else array()

    def both(*arrays: jax.Array) -> Any:
        out, adjoint = jax.vjp(call, *arrays)
        return adjoint(out)

    jax.jit(both if trial.form == "chunk" else call).lower(
        q, q, v, g, array()
    ).compile()
