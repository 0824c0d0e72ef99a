"""Safetensors checkpoints: one file or many behind an index, read tensor by tensor; pickles are not opened."""

import contextlib
import importlib
import json
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


class Checkpoint:
    """The tensors of an open checkpoint: their shapes and dtypes are known, their values are read on demand."""

    def __init__(self, path: pathlib.Path, files: Mapping[str, Any]):
        self.path, self._files = path, files
        slices = {name: file.get_slice(name) for name, file in files.items()}
        self.shapes = {name: tuple(x.get_shape()) for name, x in slices.items()}
        self.dtypes = {name: str(x.get_dtype()) for name, x in slices.items()}

    def read(self, name: str) -> np.ndarray:
        return self._files[name].get_tensor(name)


@contextlib.contextmanager
def open_checkpoint(path: str | os.PathLike[str]) -> Iterator[Checkpoint]:
    """Opens a `.safetensors` file, an index, or a directory that holds `model.safetensors` or its index.

    **Raises:** `ValueError` for pickles, which can run code when they are opened, and for files of another kind;
    `FileNotFoundError` when there is nothing to open, naming every missing shard; `ImportError` without safetensors.
    """
    path = pathlib.Path(path)
    files = _files(path)
    safetensors = import_safetensors("safetensors")
    with contextlib.ExitStack() as stack:
        handles = [stack.enter_context(safetensors.safe_open(file, framework="np")) for file in files]
        yield Checkpoint(path, {name: handle for handle in handles for name in handle.keys()})  # noqa: SIM118


def import_safetensors(name: str) -> Any:
    """The optional dependency, or an error that says how to get it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError('reading and writing checkpoints needs safetensors: pip install "jfla[hf]"') from error


def _files(path: pathlib.Path) -> list[pathlib.Path]:
    if path.suffix in _PICKLES:
        raise ValueError(f"{path.name} must be a safetensors file: a pickle can run any code when it is opened")
    if path.is_dir():
        names = sorted(file.name for file in path.iterdir())
        for name in (_INDEX, _SINGLE):
            if name in names:
                return _files(path / name)
        pickles = [name for name in names if name.endswith(_PICKLES)]
        if pickles:
            raise ValueError(
                f"{path} must hold {_SINGLE} or {_INDEX}, got only pickles, which can run any code when they are "
                f"opened: {', '.join(pickles)}"
            )
        raise FileNotFoundError(f"{path} must hold {_SINGLE} or {_INDEX}, got {names}")
    if not path.exists():
        raise FileNotFoundError(f"no checkpoint at {path}")
    if path.name.endswith(".index.json"):
        shards = sorted(set(json.loads(path.read_text())["weight_map"].values()))
        missing = [shard for shard in shards if not (path.parent / shard).exists()]
        if missing:
            raise FileNotFoundError(f"{path} names shards that are not there: {', '.join(missing)}")
        return [path.parent / shard for shard in shards]
    if path.suffix != ".safetensors":
        raise ValueError(f"path must be a .safetensors file, its index or a directory, got {path}")
    return [path]
