"""The identity of a kernel that is not traced yet: a hash of its function, of what that closes over, and of the code.

Tracing and lowering a kernel takes seconds of Python. Its function and the values that it closes over say what will be
traced, if those values are plain: numbers, names, shapes, dtypes, and tuples, dataclasses and functions of them. So a
kernel must not read what else may change while a process runs, but for context variables called jfla_: the code of
another kernel would be taken for its own.
"""

import contextvars
import dataclasses
import enum
import functools
import hashlib
import importlib.metadata
import os
import pathlib
import types
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.core import ShapedArray
from jax.experimental.mosaic.gpu import utils

import jfla


class Unknown(TypeError):
    """A value whose identity is not known."""


def fingerprint(*values: Any) -> str | None:
    """The hash of `values` and of all else that a kernel depends on; None where one of them has no known identity."""
    parts = hashlib.sha256(_surroundings())
    try:
        for part in _Encoder().parts(values):
            parts.update(part.encode() + b"\0")
    except Unknown:
        return None
    return parts.hexdigest()


def _surroundings() -> bytes:
    """What kernels are made of beside their functions: code, versions, the architecture, and settings."""
    versions = (jax.__version__, importlib.metadata.version("jaxlib"), _CODE)
    context = contextvars.copy_context().items()
    ours = {var.name: x for var, x in context if var.name.startswith("jfla_")}
    mosaic = {name: x for name, x in os.environ.items() if name.startswith("MOSAIC")}
    config = (jax.config.jax_enable_x64, jax.config.jax_default_matmul_precision)
    found = (versions, utils._infer_arch(), sorted(ours.items()), config)
    return repr((found, sorted(mosaic.items()))).encode()


def _hash_of_code() -> str:
    """Of all Python files of the library: functions call others that they do not close over."""
    found = hashlib.sha256()
    for path in sorted(pathlib.Path(jfla.__file__).parent.rglob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()


# Read when this module is imported. Read later, files that were edited since would name the code of those that run,
# and other processes would take it from the disk for theirs.
_CODE = _hash_of_code()


class _Encoder:
    """Values as text. A function that was met before stands as its number, as in a recursive one."""

    def __init__(self) -> None:
        self._met: dict[int, int] = {}

    def parts(self, x: Any) -> Iterator[str]:
        kind = type(x)
        if x is None or kind in (bool, int, float, str, bytes):
            yield repr(x)
        elif isinstance(x, enum.Enum):
            yield f"{_name(kind)}.{x.name}"
        elif isinstance(x, np.dtype | np.generic):
            yield f"{_name(kind)} {x!r}"
        elif isinstance(x, type):
            yield _name(x)
        elif isinstance(x, tuple | list):
            yield f"{_name(kind)} {len(x)}"
            for item in x:
                yield from self.parts(item)
        elif isinstance(x, Mapping):
            yield f"{_name(kind)} {len(x)}"
            for item in x.items():
                yield from self.parts(item)
        elif isinstance(x, functools.partial):
            yield "partial"
            yield from self.parts((x.func, x.args, x.keywords))
        elif isinstance(x, types.FunctionType):
            yield from self._function(x)
        elif isinstance(x, types.MethodType):
            yield "method"
            yield from self.parts((x.__func__, x.__self__))
        elif isinstance(x, types.BuiltinFunctionType | types.ModuleType):
            yield f"{_name(kind)} {getattr(x, '__module__', '')} {x.__name__}"
        elif dataclasses.is_dataclass(x):
            yield _name(kind)
            for field in dataclasses.fields(x):
                yield from self.parts((field.name, getattr(x, field.name)))
        elif isinstance(x, jax.ShapeDtypeStruct | ShapedArray):
            yield f"array {x.shape} {x.dtype}"
        elif isinstance(x, jax.Array | jax.Ref):
            # Its values cannot be in the kernel: Pallas refuses a body that captures an array.
            yield str(jax.typeof(x))
        elif isinstance(getattr(x, "__wrapped__", None), types.FunctionType):
            yield _name(kind)
            yield from self._function(x.__wrapped__)
        else:
            raise Unknown(f"{kind}: {x!r}")

    def _function(self, function: types.FunctionType) -> Iterator[str]:
        if id(function) in self._met:
            yield f"function {self._met[id(function)]}"
            return
        self._met[id(function)] = len(self._met)
        # jaxtyping's checks of shapes do nothing that a kernel depends on.
        if function.__globals__["__name__"].partition(".")[0] == "jaxtyping":
            yield from self.parts(getattr(function, "__wrapped__", object()))
            return
        yield f"{function.__module__} {function.__qualname__}"
        yield from self._code(function.__code__)
        yield from self.parts((function.__defaults__, function.__kwdefaults__))
        for cell in function.__closure__ or ():
            try:
                yield from self.parts(cell.cell_contents)
            except ValueError:
                yield "empty"

    def _code(self, code: types.CodeType) -> Iterator[str]:
        yield f"{code.co_name} {code.co_firstlineno} {code.co_code.hex()} {code.co_names}"
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                yield from self._code(constant)
            else:
                yield repr(constant)


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
