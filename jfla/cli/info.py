"""`jfla info`: versions, devices, and the implementation that each op takes on this machine."""

import importlib.metadata
import platform

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from jfla.cli import choice
from jfla.cli.cpu import cpu_name

_PACKAGES = (
    "jfla", "jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "flax", "numpy", "optax", "orbax-checkpoint",
    "grain", "safetensors", "jax-triton",
)  # fmt: skip
_TOKENS, _HEADS, _DIM = 4096, 16, 128


def show(console: Console) -> None:
    """Prints three tables."""
    for table in (versions(), devices(), implementations()):
        console.print(table)


def versions() -> Table:
    """Python, the platform, and every package that can matter; those that are absent are left out."""
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
    for form in ("chunk", "recurrent"):
        for op in ("kda", "gdn"):
            for dtype in (jnp.bfloat16, jnp.float32):
                time = _TOKENS if form == "chunk" else 1
                why = choice.reason(op, form, choice.shapes(op, 1, time, _HEADS, _DIM, dtype))
                name = f"{form}_{op}"
                takes = ("pallas", "a kernel for this device") if why is None else ("xla", f"pallas: {why}")
                table.add_row(name, jnp.dtype(dtype).name, *takes)
    table.caption = f"T = {_TOKENS} (recurrent: 1), H = {_HEADS}, K = V = {_DIM}. Other shapes: jfla.pallas.supported."
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", caption_justify="left", header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
