"""Mosaic's module of a kernel, as bytecode, changed so that Mosaic compiles it sooner: the GPU runs the same.

Pallas writes constants and the number of a thread anew wherever they are needed: every second operation of a module
says again what another has said. Mosaic's compiler removes them, but first takes all through its other passes.

The module's function for the CPU stores the shape, strides and tile of every array that TMA copies. LLVM's vectoriser
compares all of these stores with each other, which takes a sixth of the time of compiling a kernel with a dozen arrays.
"""

import io

from jaxlib.mlir import ir
from jaxlib.mlir.passmanager import PassManager

# Between the passes by which Mosaic reads and writes a module.
_PIPELINE = """builtin.module(
    mosaic_gpu-serde{serialize=false},
    cse,
    mosaic_gpu-serde{serialize=true}
)"""


def clean_up(bytecode: bytes, context: ir.Context) -> bytes:
    """The same kernel. `context` is that of the program which calls it, where Mosaic's passes are registered."""
    allowed = context.allow_unregistered_dialects
    # Operations of a written module are of no registered dialect.
    context.allow_unregistered_dialects = True
    try:
        with context:
            module = ir.Module.parse(bytecode)
            _do_not_vectorise_cpu_code(module)
            passes = PassManager.parse(_PIPELINE)
            passes.enable_verifier(False)  # Mosaic verifies what it reads
            passes.run(module.operation)
    finally:
        context.allow_unregistered_dialects = allowed
    written = io.BytesIO()
    module.operation.write_bytecode(written, desired_version=0)
    return written.getvalue()


def _do_not_vectorise_cpu_code(module: ir.Module) -> None:
    """LLVM vectorises no function that may use floating point only where its source does."""
    for operation in module.body:
        attributes = operation.operation.attributes
        if "llvm.emit_c_interface" in attributes:
            of_llvm = [ir.StringAttr.get("noimplicitfloat")]
            attributes["llvm.passthrough"] = ir.ArrayAttr.get(of_llvm)
