"""Mosaic's module of a kernel, as bytecode, to an equivalent module that compiles in less time.

Pallas emits constants and the thread index again at every use: half of a module's operations are duplicates. Mosaic's
pipeline eliminates common subexpressions late, after conversion passes over all of them, so they are eliminated here.

The module's host function passes TMA descriptors of 128 bytes, one for every array and box, to the kernel by value: as
one array of bytes, of which LLVM schedules the loads and the stores one by one, in time quadratic in their number. They
are passed as 64-bit words.
"""

import io

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm
from jaxlib.mlir.passmanager import PassManager

# XLA gets a module in a stable form, whose operations belong to a dialect that is not registered.
_READ = "builtin.module(mosaic_gpu-serde{serialize=false}, cse)"
_WRITE = "builtin.module(mosaic_gpu-serde{serialize=true})"


def simplify_module(bytecode: bytes, context: ir.Context) -> bytes:
    """The simplified module. `context` has Mosaic's passes: that of the program from which the module comes."""
    allowed = context.allow_unregistered_dialects
    context.allow_unregistered_dialects = True
    try:
        with context:
            module = ir.Module.parse(bytecode)
            _run(_READ, module)
            _pass_descriptors_as_words(module)
            _run(_WRITE, module)
    finally:
        context.allow_unregistered_dialects = allowed
    written = io.BytesIO()
    module.operation.write_bytecode(written, desired_version=0)
    return written.getvalue()


def _run(pipeline: str, module: ir.Module) -> None:
    passes = PassManager.parse(pipeline)
    passes.enable_verifier(False)  # Mosaic verifies the module when it compiles it
    passes.run(module.operation)


def _pass_descriptors_as_words(module: ir.Module) -> None:
    """The host function's array of bytes, which becomes an argument of the kernel, as one of 64-bit words."""
    byte = ir.IntegerType.get_signless(8)
    word = ir.IntegerType.get_signless(64)
    (host_function,) = (
        x.operation
        for x in module.body
        if "llvm.emit_c_interface" in x.operation.attributes
    )
    (block,) = host_function.regions[0].blocks
    for operation in block:
        for value in operation.operation.results:
            type_ = value.type
            if isinstance(type_, llvm.ArrayType) and type_.element_type == byte:
                value.set_type(llvm.ArrayType.get(word, type_.num_elements // 8))
