"""The hint "evict first" of a TMA copy: nobody reads the same bytes again in this launch. Mosaic's copies take none.

Kernels side by side read a chunk one after the other, and the second-level cache holds the chunks between them. Without
the hint a chunk that every kernel has read may stay there, while one that is still to be read goes to device memory.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from jfla.pallas.mgpu.types import InlineContext, Scalar

_OF_NVVM = "nvvm.cp.async.bulk.tensor.shared.cluster.global"  # with JAX 0.11
_OF_LLVM = "llvm.inline_asm"


class _Copy(NamedTuple):
    """A copy of a tile of an array into shared memory, as its instruction has it."""

    predicate: Scalar  # one thread issues it
    smem: Scalar
    descriptor: Scalar
    barrier: Scalar
    coordinates: Sequence[Scalar]

    @classmethod
    def of(cls, operation: Any) -> "_Copy":
        """Of Mosaic's operation for it."""
        name = operation.operation.name
        if name == _OF_LLVM and "cp.async.bulk.tensor" in operation.asm_string.value:
            predicate, smem, descriptor, barrier, *coordinates = operation.operands
            return cls(predicate, smem, descriptor, barrier, coordinates)
        if name == _OF_NVVM:
            pointers = (operation.dstMem, operation.tmaDescriptor, operation.mbar)
            return cls(operation.predicate, *pointers, list(operation.coordinates))
        raise ValueError(f"the last operation must be a TMA copy, but it is {name}")

    def evict_first(self) -> None:
        """Writes the instruction, with the hint."""
        rank = len(self.coordinates)
        places = ", ".join(f"${4 + i}" for i in range(rank))
        llvm.inline_asm(
            ir.Type.parse("!llvm.void"),
            [*self[:4], *self.coordinates],
            f"""{{
            .reg .b64 policy;
            createpolicy.fractional.L2::evict_first.b64 policy, 1.0;
            @$0 cp.async.bulk.tensor.{rank}d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint
                [$1], [$2, {{{places}}}], [$3], policy;
            }}""",
            "b,r,l,r" + ",r" * rank,
            has_side_effects=True,
        )


def hint_evict_first() -> None:
    """Gives the hint to the copy into shared memory that was started last.

    Mosaic's operation for it has to be the last of the block that is being lowered. It is replaced by the instruction.
    """

    @plgpu.inline_mgpu()
    def replace(_: InlineContext) -> None:
        operations = ir.InsertionPoint.current.block.operations
        last = operations[len(operations) - 1]
        with ir.InsertionPoint(last):
            _Copy.of(last).evict_first()
        last.operation.erase()

    replace()  # pyright: ignore[reportCallIssue]: the first argument is Mosaic's
