"""Safetensors checkpoints, one file or shards behind an index, read by tensor; pickles refused."""

import contextlib
import importlib
import json
import math
import os
import pathlib
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import numpy as np

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")

Path = str | os.PathLike[str]


class Checkpoint:
    """An open checkpoint: shapes and dtypes of its tensors, whose values are read on demand."""

    def __init__(self, path: pathlib.Path, files: Mapping[str, Any]):
        self.path = path
        self._files = files
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        for name, file in files.items():
            tensor = file.get_slice(name)
            self.shapes[name] = tuple(tensor.get_shape())
            self.dtypes[name] = str(tensor.get_dtype())

    def read(self, name: str) -> np.ndarray:
        """The values of a tensor."""
        return self._files[name].get_tensor(name)

    def num_bytes(self) -> int:
        """The size of all tensors together, as far as their dtypes are floats."""
        sizes = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
        return sum(
            math.prod(shape) * sizes.get(self.dtypes[name], 0)
            for name, shape in self.shapes.items()
        )


@contextlib.contextmanager
def open_checkpoint(path: Path) -> Iterator[Checkpoint]:
    """Opens a `.safetensors` file, an index, or a directory with `model.safetensors` or its index.

    **Raises:** `ValueError` for pickles, which can run code when they are opened, for files of
    another kind, for damaged ones, and for an index that names anything but files beside it;
    `FileNotFoundError` when there is nothing to open, naming every missing shard; `ImportError`
    without safetensors.
    """
    path = pathlib.Path(path)
    files = _files(path)
    safetensors = import_safetensors("safetensors")
    with contextlib.ExitStack() as stack:
        tensors: dict[str, Any] = {}
        for file in files:
            try:
                handle = stack.enter_context(
                    safetensors.safe_open(file, framework="np")
                )
            except safetensors.SafetensorError as error:
                raise ValueError(
                    f"{file} is not a whole safetensors file: {error}"
                ) from error
            twice = sorted(tensors.keys() & handle.keys())
            if twice:
                raise ValueError(
                    f"{file} holds tensors of another shard: {', '.join(twice)}"
                )
            tensors |= dict.fromkeys(handle.keys(), handle)
        yield Checkpoint(path, tensors)


def config_file(path: Path) -> pathlib.Path:
    """The `config.json` in a folder, or beside a file."""
    path = pathlib.Path(path)
    folder = path if path.is_dir() else path.parent
    return folder / "config.json"


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """A JSON object, or a `ValueError` that names the file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} must be JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(found).__name__}")
    return found


def import_safetensors(name: str) -> ModuleType:
    """The optional dependency, or an error that says how to get it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            'reading and writing checkpoints needs safetensors: pip install "jfla[hf]"'
        ) from error


def _files(path: pathlib.Path) -> list[pathlib.Path]:
    """The safetensors files of a checkpoint."""
    if path.suffix in _PICKLES:
        raise ValueError(
            f"{path.name} must be a safetensors file: a pickle can run any code when it is opened"
        )
    if path.is_dir():
        return _files_in(path)
    if not path.exists():
        raise FileNotFoundError(f"no checkpoint at {path}")
    if path.name.endswith(".index.json"):
        return _shards(path)
    if path.suffix != ".safetensors":
        raise ValueError(
            f"path must be a .safetensors file, its index or a directory, got {path}"
        )
    return [path]


def _files_in(folder: pathlib.Path) -> list[pathlib.Path]:
    names = sorted(file.name for file in folder.iterdir())
    for name in (INDEX, SINGLE):
        if name in names:
            return _files(folder / name)
    pickles = [name for name in names if name.endswith(_PICKLES)]
    if pickles:
        raise ValueError(
            f"{folder} must hold {SINGLE} or {INDEX}, got only pickles, "
            f"which can run any code when they are opened: {', '.join(pickles)}"
        )
    raise FileNotFoundError(f"{folder} must hold {SINGLE} or {INDEX}, got {names}")


def _shards(index: pathlib.Path) -> list[pathlib.Path]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(
            f"{index} must have a weight_map of tensor names to file names"
        )
    # A name with a folder in it could reach any file of the machine.
    strange = {repr(name) for name in weight_map.values() if not _is_shard_name(name)}
    if strange:
        listed = ", ".join(sorted(strange))
        raise ValueError(
            f"{index} must name .safetensors files beside it, without folders, got {listed}"
        )
    shards = [index.parent / name for name in sorted(set(weight_map.values()))]
    missing = [shard.name for shard in shards if not shard.is_file()]
    if missing:
        raise FileNotFoundError(
            f"{index} names shards that are not there: {', '.join(missing)}"
        )
    return shards


def _is_shard_name(name: Any) -> bool:
    if not isinstance(name, str) or not name.endswith(".safetensors"):
        return False
    return not any(character in name for character in "/\\:\0")
