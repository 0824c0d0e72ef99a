"""Mosaic's module of a kernel, as bytecode, to an equivalent module that compiles in less time.

Pallas emits constants and the thread index again at every use: half of a module's operations are duplicates. Mosaic's
pipeline eliminates common subexpressions late, after conversion passes over all of them, so they are eliminated here.

The module's host function encodes a TMA descriptor for every array, from sizes, strides and a box that it stores on the
stack. LLVM's SLP vectorizer compares these stores pairwise: for a dozen descriptors, a sixth of the compile time.
"""

import io

from jaxlib.mlir import ir
from jaxlib.mlir.passmanager import PassManager

# `mosaic_gpu-serde` reads and writes the stable form in which XLA gets a module.
_PIPELINE = """builtin.module(
    mosaic_gpu-serde{serialize=false},
    cse,
    mosaic_gpu-serde{serialize=true}
)"""


def simplify_module(bytecode: bytes, context: ir.Context) -> bytes:
    """The simplified module. `context` has Mosaic's passes: that of the program from which the module comes."""
    allowed = context.allow_unregistered_dialects
    # The stable form's operations belong to a dialect that is not registered.
    context.allow_unregistered_dialects = True
    try:
        with context:
            module = ir.Module.parse(bytecode)
            _keep_host_code_scalar(module)
            passes = PassManager.parse(_PIPELINE)
            passes.enable_verifier(
                False
            )  # Mosaic verifies the module when it compiles it
            passes.run(module.operation)
    finally:
        context.allow_unregistered_dialects = allowed
    written = io.BytesIO()
    module.operation.write_bytecode(written, desired_version=0)
    return written.getvalue()


def _keep_host_code_scalar(module: ir.Module) -> None:
    """Sets `noimplicitfloat` on the host function: LLVM's SLP vectorizer skips functions with this attribute."""
    for operation in module.body:
        attributes = operation.operation.attributes
        if "llvm.emit_c_interface" in attributes:
            of_llvm = [ir.StringAttr.get("noimplicitfloat")]
            attributes["llvm.passthrough"] = ir.ArrayAttr.get(of_llvm)
