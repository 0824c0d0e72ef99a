"""Every parameter of a module as PyTorch lays it out, and the filling of parameters from a checkpoint's tensors."""

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import jax
import numpy as np
from flax import nnx

from jfla.nn.checkpoint import Checkpoint
from jfla.nn.convolution import ShortConvolution
from jfla.nn.layers import Projection

_FLOATS = ("F64", "F32", "F16", "BF16")


class Tensor(NamedTuple):
    """A tensor of a checkpoint: its name, and the parameters whose rows it stacks.

    With `groups` the rows come in that many groups, each of which stacks its share of every parameter.
    """

    name: str
    parameters: tuple[str, ...]
    groups: int = 1


class Slot(NamedTuple):
    """A parameter and its layout in PyTorch: Linear [out, in], Conv1d [channels, 1, W], Embedding as is, rest flat."""

    parameter: nnx.Param
    owner: object

    @property
    def shape(self) -> tuple[int, ...]:
        """In PyTorch."""
        own = self.parameter.shape
        if isinstance(self.owner, Projection) and len(own) > self.owner.outputs:
            inputs = len(own) - self.owner.outputs
            return math.prod(own[inputs:]), math.prod(own[:inputs])
        if isinstance(self.owner, ShortConvolution):
            return math.prod(own[1:]), 1, own[0]
        return own if isinstance(self.owner, nnx.Embed) else (math.prod(own),)

    def to_torch(self) -> np.ndarray:
        x, shape = np.asarray(self.parameter[...]), self.shape
        return np.ascontiguousarray(x.reshape(shape) if self._as_is else x.reshape(shape[::-1]).T)

    def fill(self, x: np.ndarray) -> None:
        """Puts a tensor of `shape` into the parameter, in its dtype and where it lives."""
        old = self.parameter[...]
        x = x.reshape(self.shape)
        x = x if self._as_is else x.T
        x = np.ascontiguousarray(x.reshape(old.shape).astype(old.dtype))
        self.parameter[...] = jax.device_put(x, old.sharding if old.committed else None)

    @property
    def _as_is(self) -> bool:
        return isinstance(self.owner, nnx.Embed)


def slots(module: nnx.Module) -> dict[str, Slot]:
    """Every parameter by its dotted path."""
    found = {}
    for path, node in nnx.iter_graph(module):
        if isinstance(node, nnx.Module):
            for name, value in vars(node).items():
                if isinstance(value, nnx.Param):
                    found[".".join(map(str, (*path, name)))] = Slot(value, node)
    return found


def fill(module: nnx.Module, checkpoint: Checkpoint, variants: Iterable[Iterable[Tensor]], prefix: str) -> None:
    """Fills every parameter of `module` from the tensors under `prefix`, by the variant that fits best.

    **Raises:** `ValueError` listing every missing, extra and misshapen tensor; the module is then untouched.
    """
    targets = slots(module)
    tables = [_existing(table, targets) for table in variants]
    table, problems = min(((table, _problems(table, targets, checkpoint, prefix)) for table in tables), key=_how_bad)
    if problems:
        where = f" under {prefix}" if prefix else ""
        lines = "\n  ".join(problems)
        raise ValueError(f"{len(problems)} tensors of {checkpoint.path}{where} do not fit the module:\n  {lines}")
    for tensor in table:
        parts = [targets[name] for name in tensor.parameters]
        for slot, x in zip(parts, _unstack(checkpoint.read(prefix + tensor.name), parts, tensor.groups)):
            slot.fill(x)


def collect(module: nnx.Module, table: Iterable[Tensor], prefix: str = "") -> dict[str, np.ndarray]:
    """The tensors that `table` names, from the parameters: the inverse of `fill`."""
    targets = slots(module)
    return {
        prefix + tensor.name: _stack([targets[name].to_torch() for name in tensor.parameters], tensor.groups)
        for tensor in _existing(table, targets)
    }


def _existing(table: Iterable[Tensor], targets: Mapping[str, Slot]) -> list[Tensor]:
    return [tensor for tensor in table if all(name in targets for name in tensor.parameters)]


def _how_bad(candidate: tuple[list[Tensor], list[str]]) -> int:
    return len(candidate[1])


def _problems(table: list[Tensor], targets: Mapping[str, Slot], checkpoint: Checkpoint, prefix: str) -> list[str]:
    expected = {prefix + tensor.name: _shape([targets[name] for name in tensor.parameters]) for tensor in table}
    present = {name for name in checkpoint.shapes if name.startswith(prefix)}
    filled = {name for tensor in table for name in tensor.parameters}
    problems = [f"missing: {name} {list(shape)}" for name, shape in expected.items() if name not in present]
    problems += [f"missing: a tensor for the parameter {name}" for name in targets if name not in filled]
    problems += [f"extra: {name} {list(checkpoint.shapes[name])}" for name in sorted(present - expected.keys())]
    for name in sorted(present & expected.keys()):
        if not _same(checkpoint.shapes[name], expected[name]):
            got = list(checkpoint.shapes[name])
            problems.append(f"misshapen: {name} must be {list(expected[name])}, got {got}")
        elif checkpoint.dtypes[name] not in _FLOATS:
            problems.append(f"misshapen: {name} must be one of {', '.join(_FLOATS)}, got {checkpoint.dtypes[name]}")
    return problems


def _same(got: tuple[int, ...], expected: tuple[int, ...]) -> bool:
    """Flat parameters are stored with axes of length 1 around them, or not yet flattened."""
    return got == expected or (len(expected) == 1 and len(got) != 1 and math.prod(got) == expected[0])


def _shape(parts: list[Slot]) -> tuple[int, ...]:
    return sum(part.shape[0] for part in parts), *parts[0].shape[1:]


def _stack(parts: list[np.ndarray], groups: int) -> np.ndarray:
    x = np.concatenate([part.reshape(groups, -1, *part.shape[1:]) for part in parts], axis=1)
    return x.reshape(-1, *x.shape[2:])


def _unstack(x: np.ndarray, parts: list[Slot], groups: int) -> list[np.ndarray]:
    if len(parts) == 1:
        return [x]
    rows = np.cumsum([part.shape[0] // groups for part in parts])
    split = np.split(x.reshape(groups, -1, *x.shape[1:]), rows[:-1], axis=1)
    return [part.reshape(-1, *part.shape[2:]) for part in split]
