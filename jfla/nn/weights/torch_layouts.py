"""Every parameter of a module as PyTorch lays it out, and parameters filled from a checkpoint."""

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import jax
import numpy as np
from flax import nnx

from jfla.nn.layers.convolution import ShortConvolution
from jfla.nn.layers.projections import Projection
from jfla.nn.weights.safetensors_io import Checkpoint

_FLOATS = ("F64", "F32", "F16", "BF16")


class StoredTensor(NamedTuple):
    """A tensor of a checkpoint: its name, and the parameters whose rows it stacks.

    With `groups` the rows come in that many groups, each of which stacks its share of every
    parameter.
    """

    name: str
    parameters: tuple[str, ...]
    groups: int = 1


class TorchParameter(NamedTuple):
    """A parameter as PyTorch lays it out, told by the module that owns it.

    Linear is [out, in], Conv1d [channels, 1, W], Embedding as here, all others are flat.
    """

    parameter: nnx.Param
    owner: nnx.Module

    @property
    def shape(self) -> tuple[int, ...]:
        """In PyTorch."""
        shape = self.parameter.shape
        if isinstance(self.owner, Projection) and len(shape) > self.owner.outputs:
            inputs = self.owner.inputs
            return math.prod(shape[inputs:]), math.prod(shape[:inputs])
        if isinstance(self.owner, ShortConvolution):
            return math.prod(shape[1:]), 1, shape[0]
        return shape if self._is_embedding else (math.prod(shape),)

    def to_torch(self) -> np.ndarray:
        """The values, in PyTorch's layout."""
        x = np.asarray(self.parameter[...])
        if self._is_embedding:
            return np.ascontiguousarray(x.reshape(self.shape))
        return np.ascontiguousarray(x.reshape(self.shape[::-1]).T)

    def fill(self, x: np.ndarray) -> None:
        """Puts a tensor of `shape` into the parameter, in its dtype and where it lives."""
        old = self.parameter[...]
        x = x.reshape(self.shape)
        if not self._is_embedding:
            x = x.T
        x = np.ascontiguousarray(x.reshape(old.shape).astype(old.dtype))
        self.parameter[...] = jax.device_put(x, old.sharding if old.committed else None)

    @property
    def _is_embedding(self) -> bool:
        return isinstance(self.owner, nnx.Embed)


Parameters = Mapping[str, TorchParameter]


def parameters_of(module: nnx.Module) -> dict[str, TorchParameter]:
    """Every parameter by its dotted path."""
    found = {}
    for path, node in nnx.iter_graph(module):
        if not isinstance(node, nnx.Module):
            continue
        for name, value in vars(node).items():
            if isinstance(value, nnx.Param):
                dotted = ".".join(map(str, (*path, name)))
                found[dotted] = TorchParameter(value, node)
    return found


def fill(
    module: nnx.Module,
    checkpoint: Checkpoint,
    tables: Iterable[Iterable[StoredTensor]],
    prefix: str,
) -> None:
    """Fills every parameter of `module` from the tensors under `prefix`, by the best table.

    **Raises:** `ValueError` listing every missing, extra and misshapen tensor; the module is then
    untouched.
    """
    parameters = parameters_of(module)
    candidates = []
    for table in tables:
        tensors = _existing(table, parameters)
        candidates.append((_problems(tensors, parameters, checkpoint, prefix), tensors))
    problems, tensors = min(candidates, key=_num_problems)
    if problems:
        where = f" under {prefix}" if prefix else ""
        lines = "\n  ".join(problems)
        raise ValueError(
            f"{len(problems)} tensors of {checkpoint.path}{where} do not fit the module:\n  {lines}"
        )
    for tensor in tensors:
        parts = [parameters[name] for name in tensor.parameters]
        values = _unstack(checkpoint.read(prefix + tensor.name), parts, tensor.groups)
        for part, x in zip(parts, values):
            part.fill(x)


def collect(
    module: nnx.Module, table: Iterable[StoredTensor], prefix: str = ""
) -> dict[str, np.ndarray]:
    """The tensors that `table` names, from the parameters: the inverse of `fill`."""
    parameters = parameters_of(module)
    tensors = {}
    for tensor in _existing(table, parameters):
        parts = [parameters[name].to_torch() for name in tensor.parameters]
        tensors[prefix + tensor.name] = _stack(parts, tensor.groups)
    return tensors


def _existing(table: Iterable[StoredTensor], parameters: Parameters) -> list[StoredTensor]:
    """The tensors all of whose parameters the module has."""
    return [tensor for tensor in table if parameters.keys() >= set(tensor.parameters)]


def _num_problems(candidate: tuple[list[str], list[StoredTensor]]) -> int:
    problems, _ = candidate
    return len(problems)


def _problems(
    tensors: list[StoredTensor], parameters: Parameters, checkpoint: Checkpoint, prefix: str
) -> list[str]:
    expected = {}
    filled = set()
    for tensor in tensors:
        parts = [parameters[name] for name in tensor.parameters]
        expected[prefix + tensor.name] = _stacked_shape(parts)
        filled |= set(tensor.parameters)
    shapes = checkpoint.shapes
    present = {name for name in shapes if name.startswith(prefix)}
    problems = []
    for name, shape in expected.items():
        if name not in present:
            problems.append(f"missing: {name} {list(shape)}")
    for name in parameters:
        if name not in filled:
            problems.append(f"missing: a tensor for the parameter {name}")
    for name in sorted(present - expected.keys()):
        problems.append(f"extra: {name} {list(shapes[name])}")
    for name in sorted(present & expected.keys()):
        if not _same_shape(shapes[name], expected[name]):
            wanted = f"must be {list(expected[name])}, got {list(shapes[name])}"
            problems.append(f"misshapen: {name} {wanted}")
        elif checkpoint.dtypes[name] not in _FLOATS:
            wanted = f"must be one of {', '.join(_FLOATS)}, got {checkpoint.dtypes[name]}"
            problems.append(f"misshapen: {name} {wanted}")
    return problems


def _same_shape(got: tuple[int, ...], expected: tuple[int, ...]) -> bool:
    """Flat parameters may have axes of length 1 around them, or not be flattened yet."""
    if got == expected:
        return True
    return len(expected) == 1 and len(got) != 1 and math.prod(got) == expected[0]


def _stacked_shape(parts: list[TorchParameter]) -> tuple[int, ...]:
    rows = sum(part.shape[0] for part in parts)
    return (rows, *parts[0].shape[1:])


def _stack(parts: list[np.ndarray], groups: int) -> np.ndarray:
    grouped = [part.reshape(groups, -1, *part.shape[1:]) for part in parts]
    x = np.concatenate(grouped, axis=1)
    return x.reshape(-1, *x.shape[2:])


def _unstack(x: np.ndarray, parts: list[TorchParameter], groups: int) -> list[np.ndarray]:
    if len(parts) == 1:
        return [x]
    ends = np.cumsum([part.shape[0] // groups for part in parts])
    grouped = x.reshape(groups, -1, *x.shape[1:])
    split = np.split(grouped, ends[:-1], axis=1)
    return [part.reshape(-1, *part.shape[2:]) for part in split]
