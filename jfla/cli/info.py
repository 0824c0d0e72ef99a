"""`jfla info`: versions, devices, and the implementation that each op takes on this machine."""

import importlib.metadata
import platform

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from rich.console import Console
from rich.table import Table

import jfla
from jfla.cli.cpu import cpu_name
from jfla.nn.models.config import GDNSpec
from jfla.types import Implementation

_PACKAGES = (
    "jfla",
    "jax",
    "jaxlib",
    "jax-cuda12-plugin",
    "jax-cuda13-plugin",
    "flax",
    "numpy",
    "optax",
    "orbax-checkpoint",
    "grain",
    "safetensors",
    "jax-triton",
)
_OPS = {
    "chunk_kda": jfla.chunk_kda,
    "chunk_gdn": jfla.chunk_gdn,
    "recurrent_kda": jfla.recurrent_kda,
    "recurrent_gdn": jfla.recurrent_gdn,
}
_TOKENS = 4096
_MIXER = GDNSpec(num_heads=16, head_dim=128)


def show(console: Console) -> None:
    """Prints three tables."""
    for shown in (versions(), devices(), implementations()):
        console.print(shown)


def versions() -> Table:
    """Python, the platform, and every installed package that can matter."""
    shown = table("Versions", "package", "version")
    shown.add_row("python", f"{platform.python_version()}, {platform.platform()}")
    for name in _PACKAGES:
        try:
            shown.add_row(name, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            continue
    return shown


def devices() -> Table:
    """What JAX sees."""
    shown = table("Devices", "device", "kind", "compute capability")
    for device in jax.devices():
        kind = cpu_name() if device.platform == "cpu" else device.device_kind
        shown.add_row(
            str(device), kind, str(getattr(device, "compute_capability", "-"))
        )
    return shown


def implementations() -> Table:
    """The choice of `implementation=None` for each op at a usual size, and the reason for it."""
    shown = table("Implementations", "op", "dtype", "takes", "why")
    for name in _OPS:
        time = _TOKENS if name.startswith("chunk") else 1
        for dtype in (jnp.bfloat16, jnp.float32):
            choice = explain(name, 1, time, _MIXER, dtype)
            shown.add_row(
                name, jnp.dtype(dtype).name, choice.implementation, reason(choice)
            )
    shown.caption = (
        f"T = {_TOKENS} (recurrent: 1), H = {_MIXER.num_heads}, K = V = {_MIXER.head_dim}. "
        "Other calls: jfla.explain."
    )
    return shown


def explain(
    name: str,
    batch: int,
    time: int,
    mixer: GDNSpec,
    dtype: DTypeLike,
    packed: bool = False,
    implementation: Implementation | None = None,
) -> jfla.Choice:
    """The choice for a call of the op of this name with a layer's sizes.

    `dtype` is that of q, k and v; the gate and beta are float32. Packed sequences come with segment
    ids and leave no state, others leave one.
    """
    heads = mixer.num_value_heads or mixer.num_heads
    value_dim = mixer.value_head_dim or mixer.head_dim
    q = jax.ShapeDtypeStruct((batch, time, mixer.num_heads, mixer.head_dim), dtype)
    v = jax.ShapeDtypeStruct((batch, time, heads, value_dim), dtype)
    beta = jax.ShapeDtypeStruct((batch, time, heads), jnp.float32)
    g = beta
    if name.endswith("kda"):
        g = jax.ShapeDtypeStruct((batch, time, heads, mixer.head_dim), jnp.float32)
    segments = jax.ShapeDtypeStruct((batch, time), jnp.int32) if packed else None
    return jfla.explain(
        _OPS[name],
        q,
        q,
        v,
        g,
        beta,
        segment_ids=segments,
        return_final_state=not packed,
        implementation=implementation,
    )


def reason(choice: jfla.Choice) -> str:
    """What there is to know of the implementation, or why it is not the kernels."""
    if choice.implementation == "pallas":
        return choice.detail
    return f"pallas: {choice.reasons['pallas']}"


def table(title: str, *columns: str) -> Table:
    """An empty table in the style of the commands."""
    made = Table(
        title=title,
        title_justify="left",
        caption_justify="left",
        header_style="bold",
    )
    for column in columns:
        made.add_column(column, overflow="fold")
    return made
