"""A kernel's code: what Mosaic lowered it to, how XLA calls that, and where it is kept for the next program.

It is kept in memory by the kernel's fingerprint, and on disk beside JAX's compilation cache where that is on. So a
kernel is traced and lowered once; the seconds of Python that this takes are most of what a first call takes.
"""

import base64
import contextlib
import dataclasses
import hashlib
import json
import logging
import pathlib
import tempfile
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from jfla.pallas.mgpu.simplify_module import simplify_module

_LOGGER = logging.getLogger(__name__)
_TARGET = "mosaic_gpu_v2"
_FOLDER = "jfla-kernels"
_MOST_FILES = 2000  # in that folder: 13 to 153 KiB each
_KNOWN: dict[str, "KernelCode"] = {}  # by fingerprint

Described = tuple[tuple[int, ...], str]  # shape and dtype

_DTYPES = {
    "bf16": "bfloat16",
    "f16": "float16",
    "f32": "float32",
    "i8": "int8",
    "i32": "int32",
    "ui32": "uint32",
}


@dataclasses.dataclass(frozen=True, eq=False)
class KernelCode:
    """A custom call of XLA. Its operands are the kernel's, and behind them `scratch`, which starts as zeros."""

    config: dict[str, bytes | bool]
    scratch: tuple[Described, ...]
    results: tuple[Described, ...]
    # Places, among the operands and behind them the results of the call, of what the kernel returns.
    returned: tuple[int, ...]
    aliases: dict[int, int]  # the results that lie over operands, by operand

    def __call__(self, *operands: Any) -> Sequence[Any]:
        """The kernel's results."""
        run = jax.ffi.ffi_call(
            _TARGET,
            [jax.ShapeDtypeStruct(*x) for x in self.results],
            input_output_aliases=self.aliases,
            custom_call_api_version=4,
        )
        scratch = [jnp.zeros(*x) for x in self.scratch]
        config = {
            name: np.bool_(x) if isinstance(x, bool) else x
            for name, x in self.config.items()
        }
        operands = (*operands, *scratch)
        # A reference that the kernel only reads is left as it was.
        arrays = (*operands, *run(*operands, **config))
        return [arrays[i] for i in self.returned]


def code_of(
    fingerprint: str | None, lowered: Callable[[], jax.stages.Lowered]
) -> KernelCode:
    """The code of a kernel: known, on disk, or that of `lowered()`, a program that is the kernel alone."""
    if fingerprint is None:
        return extracted(lowered())
    code = _KNOWN.get(fingerprint) or _read(fingerprint)
    if code is None:
        code = extracted(lowered())
        _write(fingerprint, code)
    _KNOWN[fingerprint] = code
    return code


def extracted(lowered: jax.stages.Lowered) -> KernelCode:
    """The code of a program that does nothing but call one kernel with its arguments."""
    module: Any = lowered.compiler_ir("stablehlo")
    (function,) = module.body.operations
    (block,) = function.body.blocks
    *_, call, returned = (x.operation for x in block)
    arguments = list(block.arguments)
    operands = list(call.operands)
    if call.name != "stablehlo.custom_call" or operands[: len(arguments)] != arguments:
        raise AssertionError(f"no call of a kernel with the arguments: {call.name}")
    results = list(call.results)
    aliases = [
        stablehlo.OutputOperandAlias(x)
        for x in call.attributes["output_operand_aliases"]
    ]
    attributes = ir.DictAttr(call.attributes["mhlo.backend_config"])
    config = {entry.name: _plain(entry.attr) for entry in attributes}
    bytecode = ir.StringAttr(attributes["module"]).value_bytes
    bytecode = simplify_module(bytecode, module.context)
    config["module"] = bytecode
    config["kernel_hash"] = hashlib.sha256(bytecode).digest()
    return KernelCode(
        config=config,
        scratch=tuple(_described(x.type) for x in operands[len(arguments) :]),
        results=tuple(_described(x.type) for x in results),
        returned=tuple((operands + results).index(x) for x in returned.operands),
        # The only result has no index.
        aliases={
            x.operand_index: max(x.output_tuple_indices, default=0) for x in aliases
        },
    )


def _plain(attribute: ir.Attribute) -> bytes | bool:
    if isinstance(attribute, ir.StringAttr):
        return attribute.value_bytes
    return ir.BoolAttr(attribute).value


def _described(type_: ir.Type) -> Described:
    tensor = ir.RankedTensorType(type_)
    return tuple(tensor.shape), _DTYPES[str(tensor.element_type)]


def _file(fingerprint: str) -> pathlib.Path | None:
    """Where a kernel's code is kept; None where JAX keeps nothing on this machine's disk."""
    folder = jax.config.jax_compilation_cache_dir
    if not folder or "://" in folder or not jax.config.jax_enable_compilation_cache:
        return None
    return pathlib.Path(folder) / _FOLDER / fingerprint


def _write(fingerprint: str, code: KernelCode) -> None:
    """Keeps the code on disk if it can: whole, whoever writes the same file at the same time."""
    path = _file(fingerprint)
    if path is None:
        return
    encoded = {
        name: x if isinstance(x, bool) else base64.b64encode(x).decode()
        for name, x in code.config.items()
    }
    fields = vars(code) | {"config": encoded, "aliases": list(code.aliases.items())}
    text = zlib.compress(json.dumps(fields).encode(), level=1)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(hashlib.sha256(text).digest() + text)
        pathlib.Path(file.name).replace(path)
        _remove_oldest(path.parent)
    except OSError as error:
        _LOGGER.debug("the code of a kernel is not kept: %s", error)


def _remove_oldest(folder: pathlib.Path) -> None:
    """Leaves the files that were read or written last."""
    files = list(folder.iterdir())
    if len(files) > _MOST_FILES:
        files.sort(key=lambda path: path.stat().st_mtime)
        for path in files[:-_MOST_FILES]:
            path.unlink()


def _read(fingerprint: str) -> KernelCode | None:
    """The code on disk, if it is there and whole."""
    path = _file(fingerprint)
    if path is None:
        return None
    try:
        data = path.read_bytes()
    except OSError:
        return None
    # A folder that may only be read serves as well.
    with contextlib.suppress(OSError):
        path.touch()
    digest = data[:32]
    text = data[32:]
    if hashlib.sha256(text).digest() != digest:
        return None
    fields = json.loads(zlib.decompress(text))
    config = {
        name: x if isinstance(x, bool) else base64.b64decode(x)
        for name, x in fields["config"].items()
    }
    sizes = {
        name: tuple((tuple(shape), dtype) for shape, dtype in fields[name])
        for name in ("scratch", "results")
    }
    returned = tuple(fields["returned"])
    return KernelCode(
        config, **sizes, returned=returned, aliases=dict(fields["aliases"])
    )
