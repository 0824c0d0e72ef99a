"""Parameters filled from a checkpoint by a table of tensors, and tensors collected from them."""

import math
from collections.abc import Callable, Iterable, Iterator

import numpy as np
from flax import nnx
from jax import Array

from jfla.nn.weights.safetensors_io import Checkpoint
from jfla.nn.weights.torch_layouts import (
    Parameters,
    StoredTensor,
    TensorTable,
    parameters_of,
    stack,
    stacked_shape,
    unstack,
)

_FLOATS = ("F64", "F32", "F16", "BF16")

Progress = Callable[[int], object]


def fill(
    module: nnx.Module,
    checkpoint: Checkpoint,
    tables: Iterable[TensorTable],
    prefix: str = "",
    *,
    ignored: tuple[str, ...] = (),
    keep_float32: bool = False,
    progress: Progress | None = None,
) -> TensorTable:
    """Fills every parameter of `module` from the tensors under `prefix`, by the best table.

    One tensor after another is read, laid out, and put where its parameter lives. Tensors whose
    names begin with one of `ignored` are left alone; `progress` is called with the bytes of each.

    **Returns:** the table.

    **Raises:** `ValueError` listing every missing, extra and misshapen tensor, or every one that
    holds what is not a number; the module is then untouched.
    """
    parameters = parameters_of(module)
    candidates = []
    for table in tables:
        tensors = existing(table, parameters)
        problems = _problems(tensors, parameters, checkpoint, prefix, ignored)
        candidates.append((problems, tensors))
    problems, tensors = min(candidates, key=_num_problems)
    where = f" under {prefix}" if prefix else ""
    if problems:
        raise _failure(problems, f"of {checkpoint.path}{where} do not fit the module")
    values: dict[str, Array] = {}
    broken = []
    for tensor in tensors:
        stacked = _read(checkpoint, tensor, prefix)
        parts = [parameters[name] for name in tensor.parameters]
        split = unstack(stacked, parts, tensor.groups)
        finite = True
        for name, part, x in zip(tensor.parameters, parts, split, strict=True):
            values[name], whole = part.from_torch(x, keep_float32=keep_float32)
            # Waits for the device, so that the host never holds more than one tensor.
            finite &= bool(whole)
        if not finite:
            broken += [f"not finite: {prefix}{name}" for name in tensor.names]
        if progress is not None:
            progress(stacked.nbytes)
    if broken:
        raise _failure(broken, f"of {checkpoint.path}{where} hold a NaN or an infinity")
    for name, value in values.items():
        parameters[name].parameter.set_value(value)
    return tensors


def collect(
    module: nnx.Module, table: TensorTable, prefix: str = ""
) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors that `table` names, one after another: the inverse of `fill`."""
    parameters = parameters_of(module)
    for tensor in existing(table, parameters):
        parts = [parameters[name].to_torch() for name in tensor.parameters]
        stacked = stack(parts, tensor.groups)
        if tensor.shape is not None:
            stacked = stacked.reshape(tensor.shape)
        for name, x in zip(
            tensor.names, np.split(stacked, len(tensor.names)), strict=True
        ):
            yield prefix + name, x


def _read(checkpoint: Checkpoint, tensor: StoredTensor, prefix: str) -> np.ndarray:
    pieces = [checkpoint.read(prefix + name) for name in tensor.names]
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def existing(table: TensorTable, parameters: Parameters) -> TensorTable:
    """The tensors all of whose parameters the module has."""
    return [tensor for tensor in table if parameters.keys() >= set(tensor.parameters)]


def _num_problems(candidate: tuple[list[str], TensorTable]) -> int:
    problems, _ = candidate
    return len(problems)


def _failure(problems: list[str], what: str) -> ValueError:
    lines = "\n  ".join(problems)
    return ValueError(f"{len(problems)} tensors {what}:\n  {lines}")


def _problems(
    tensors: TensorTable,
    parameters: Parameters,
    checkpoint: Checkpoint,
    prefix: str,
    ignored: tuple[str, ...],
) -> list[str]:
    expected = {}
    filled = set()
    for tensor in tensors:
        parts = [parameters[name] for name in tensor.parameters]
        rows, *rest = stacked_shape(parts)
        for name in tensor.names:
            expected[prefix + name] = (rows // len(tensor.names), *rest)
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
        if not name.startswith(ignored):
            problems.append(f"extra: {name} {list(shapes[name])}")
    for name in sorted(present & expected.keys()):
        if not _same_shape(shapes[name], expected[name]):
            wanted = f"must be {list(expected[name])}, got {list(shapes[name])}"
            problems.append(f"misshapen: {name} {wanted}")
        elif checkpoint.dtypes[name] not in _FLOATS:
            wanted = (
                f"must be one of {', '.join(_FLOATS)}, got {checkpoint.dtypes[name]}"
            )
            problems.append(f"misshapen: {name} {wanted}")
    return problems


def _same_shape(got: tuple[int, ...], expected: tuple[int, ...]) -> bool:
    """Flat parameters may have axes of length 1 around them, or not be flattened yet."""
    if got == expected:
        return True
    return len(expected) == 1 and len(got) != 1 and math.prod(got) == expected[0]
