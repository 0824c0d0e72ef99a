"""Safetensors checkpoints, one file or shards behind an index, read by tensor; pickles refused."""

import contextlib
import importlib
import json
import os
import pathlib
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import numpy as np

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
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


@contextlib.contextmanager
def open_checkpoint(path: Path) -> Iterator[Checkpoint]:
    """Opens a `.safetensors` file, an index, or a directory with `model.safetensors` or its index.

    **Raises:** `ValueError` for pickles, which can run code when they are opened, and for files of
    another kind; `FileNotFoundError` when there is nothing to open, naming every missing shard;
    `ImportError` without safetensors.
    """
    path = pathlib.Path(path)
    files = _files(path)
    safetensors = import_safetensors("safetensors")
    with contextlib.ExitStack() as stack:
        tensors = {}
        for file in files:
            handle = stack.enter_context(safetensors.safe_open(file, framework="np"))
            tensors |= dict.fromkeys(handle.keys(), handle)
        yield Checkpoint(path, tensors)


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
        raise ValueError(f"path must be a .safetensors file, its index or a directory, got {path}")
    return [path]


def _files_in(folder: pathlib.Path) -> list[pathlib.Path]:
    names = sorted(file.name for file in folder.iterdir())
    for name in (_INDEX, _SINGLE):
        if name in names:
            return _files(folder / name)
    pickles = [name for name in names if name.endswith(_PICKLES)]
    if pickles:
        raise ValueError(
            f"{folder} must hold {_SINGLE} or {_INDEX}, got only pickles, "
            f"which can run any code when they are opened: {', '.join(pickles)}"
        )
    raise FileNotFoundError(f"{folder} must hold {_SINGLE} or {_INDEX}, got {names}")


def _shards(index: pathlib.Path) -> list[pathlib.Path]:
    weight_map = json.loads(index.read_text())["weight_map"]
    shards = [index.parent / name for name in sorted(set(weight_map.values()))]
    missing = [shard.name for shard in shards if not shard.exists()]
    if missing:
        raise FileNotFoundError(f"{index} names shards that are not there: {', '.join(missing)}")
    return shards
