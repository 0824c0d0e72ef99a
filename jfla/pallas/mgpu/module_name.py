"""A kernel's module is named after the kernel alone, so that the same kernel is the same bytes in every program.

XLA keeps compiled Mosaic kernels by the hash of their module, and the key of JAX's compilation cache is of the whole
program. JAX 0.11.2 writes the name of a file for dumps into the module, with a number that counts the kernels of the
process: a kernel met for the second time was compiled again, and the cache served only processes that lower the same
kernels in the same order. A name that is there already is kept.
"""

from typing import Any

from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir

from jfla.pallas.context import interpreting

_ATTRIBUTE = "mosaic_gpu.dump_basename"


def name_module(name: str) -> None:
    """At the start of a kernel: its module is called `name`, whatever was lowered before."""
    if interpreting():
        return

    @plgpu.inline_mgpu()
    def set_name(_: Any) -> None:
        module = ir.InsertionPoint.current.block.owner
        while module.parent is not None:
            module = module.parent
        module.attributes[_ATTRIBUTE] = ir.StringAttr.get(name)

    set_name()  # pyright: ignore[reportCallIssue]: the first argument is Mosaic's
