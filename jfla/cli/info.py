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
_HEADS = 16
_DIM = 128


def show(console: Console) -> None:
    """Prints three tables."""
    for table in (versions(), devices(), implementations()):
        console.print(table)


def versions() -> Table:
    """Python, the platform, and every installed package that can matter."""
    table = _table("Versions", "package", "version")
    table.add_row("python", f"{platform.python_version()}, {platform.platform()}")
    for name in _PACKAGES:
        try:
            table.add_row(name, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            continue
    return table


def devices() -> Table:
    """What JAX sees."""
    table = _table("Devices", "device", "kind", "compute capability")
    for device in jax.devices():
        kind = cpu_name() if device.platform == "cpu" else device.device_kind
        table.add_row(str(device), kind, str(getattr(device, "compute_capability", "-")))
    return table


def implementations() -> Table:
    """The choice of `implementation=None` for each op at a usual size, and the reason for it."""
    table = _table("Implementations", "op", "dtype", "takes", "why")
    for name in _OPS:
        time = _TOKENS if name.startswith("chunk") else 1
        for dtype in (jnp.bfloat16, jnp.float32):
            choice = explain(name, 1, time, _HEADS, _DIM, dtype)
            why = choice.detail
            if choice.implementation != "pallas":
                why = f"pallas: {choice.reasons['pallas']}"
            table.add_row(name, jnp.dtype(dtype).name, choice.implementation, why)
    table.caption = (
        f"T = {_TOKENS} (recurrent: 1), H = {_HEADS}, K = V = {_DIM}. Other calls: jfla.explain."
    )
    return table


def explain(
    name: str, batch: int, time: int, heads: int, dim: int, dtype: DTypeLike
) -> jfla.Choice:
    """The choice for a call of the op of this name with K = V = dim, HV = H and a final state.

    `dtype` is that of q, k and v; the gate and beta are float32.
    """
    x = jax.ShapeDtypeStruct((batch, time, heads, dim), dtype)
    beta = jax.ShapeDtypeStruct((batch, time, heads), jnp.float32)
    g = jax.ShapeDtypeStruct(x.shape, jnp.float32) if name.endswith("kda") else beta
    return jfla.explain(_OPS[name], x, x, x, g, beta, return_final_state=True)


def _table(title: str, *columns: str) -> Table:
    table = Table(
        title=title,
        title_justify="left",
        caption_justify="left",
        header_style="bold",
    )
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
