"""Records of whole models, as JSON: device, commit and versions, then what one command measured.

Kept in `benchmarks/results/<kind>/`, a file a run; the pages show the newest of a GPU.
"""

import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
from typing import Any

import jax

from benchmarks.results import FOLDER, current_commit, device_name

Record = dict[str, Any]

PACKAGES = ("jax", "jaxlib", "flax", "optax")
# Dense bfloat16 products by the maker's data sheet, TFLOP/s.
PEAKS = {"H100": 989.0, "H200": 989.0}


def head(commit: str | None) -> Record:
    """What every record begins with. `commit`: where there is no git to ask."""
    device = jax.devices()[0]
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    return {
        "device": device_name(device),
        "platform": device.platform,
        "date": datetime.date.today().isoformat(),
        "commit": commit or current_commit(),
        "versions": {"python": platform.python_version()} | versions,
    }


def continued(path: pathlib.Path, new: Record) -> Record:
    """The record at `path`, to be added to, or `new` where there is none.

    Raises `ValueError` where it is of another device, commit, version or setting.
    """
    if not path.exists():
        return new
    old = json.loads(path.read_text())
    for name, now in new.items():
        if (
            name != "date"
            and not isinstance(now, list)
            and old.get(name) != _plain(now)
        ):
            raise ValueError(f"{path} is of another {name}: {old.get(name)}, now {now}")
    return old


def write(path: pathlib.Path, record: Record) -> None:
    """Writes JSON, whole or not at all: what was there stays until then."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.part")
    temporary.write_text(_lines(record))
    os.replace(temporary, path)


def newest(
    kind: str, folder: pathlib.Path = FOLDER, platform: str = "gpu"
) -> tuple[pathlib.Path, Record] | None:
    """The newest record of a kind, of a GPU or of one that was described to the compiler, and where it is."""
    found = [
        (path, json.loads(path.read_text())) for path in (folder / kind).glob("*.json")
    ]
    there = [
        (record["date"], path, record)
        for path, record in found
        if record["platform"] == platform
    ]
    return max(there, key=lambda x: x[:2])[1:] if there else None


def peak_bytes() -> int | None:
    """Of the device's memory, since the process began; None where it is not counted."""
    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def data_sheet_peak(device: str) -> float | None:
    """TFLOP/s of a device's data sheet, where it is known here."""
    return next((peak for name, peak in PEAKS.items() if name in device), None)


def _plain(x: Any) -> Any:
    return json.loads(json.dumps(x))


def _lines(record: Record) -> str:
    """JSON with a row of a list of rows on each line."""
    parts = []
    for name, value in record.items():
        text = json.dumps(value)
        if isinstance(value, list) and value:
            rows = ",\n".join(f"  {json.dumps(row)}" for row in value)
            text = f"[\n{rows}\n ]"
        parts.append(f" {json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"
