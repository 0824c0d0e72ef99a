"""Matmuls on the tensor cores with value semantics: they take and return registers, and are jnp.dot interpreted.

A wgmma is asynchronous: several are issued, then waited for together, and a warpgroup can compute meanwhile
(`dots_while`). Where the machine has none they are mma.sync, one after the other.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jfla.pallas.context import interpreting
from jfla.pallas.machine import on_hopper
from jfla.pallas.mgpu.layouts import WGMMA
from jfla.pallas.mgpu.mma_sync import mma_sync
from jfla.pallas.mgpu.opaque import pin
from jfla.pallas.mgpu.smem import F32
from jfla.pallas.mgpu.types import Reg, Smem

# Operand of a matmul: Reg or Smem on the left, Smem on the right, both of 16 bits.
Operand = Any


def load(ref: Smem) -> Reg:
    """A tile in the accumulator's layout.

    Ask for a layout only where none follows from what the value meets: layout inference tries out every one that is
    asked for, against all that are open.
    """
    return plgpu.load(ref, layout=WGMMA)


def zeros(rows: int, columns: int) -> Reg:
    """An accumulator of zeros."""
    return filled(rows, columns, 0.0)


def filled(rows: int, columns: int, value: float) -> Reg:
    """An accumulator to begin from."""
    return plgpu.layout_cast(jnp.full((rows, columns), value, F32), WGMMA)


def dot(acc: Reg, *products: tuple[Operand, Smem]) -> Reg:
    """acc + sum of a @ b."""
    return dots((acc, *products))[0]


def dots(*sums: tuple[Any, ...]) -> list[Reg]:
    """`dot(acc, *products)` of several (acc, *products) that do not depend on each other, waited for together.

    Interpret mode simulates no wgmma with an operand in registers, so there they are plain dots.
    """
    if interpreting():
        return [
            sum((_product(a, b) for a, b in products), start=acc)
            for acc, *products in sums
        ]
    if not on_hopper():
        return [_dot_sync(acc, products) for acc, *products in sums]

    def issue(refs: list[Any]) -> None:
        for ref, (_, *products) in zip(refs, sums):
            for a, b in products:
                plgpu.wgmma(ref, a, b)

    accumulator: Any = plgpu.WGMMAAccumulatorRef
    results = pl.run_state(issue)([accumulator.init(acc) for acc, *_ in sums])
    return _pin_results(results)


def dots_while(
    work: Callable[[], Any], *sums: list[tuple[Operand, Smem]]
) -> tuple[list[Reg], Any]:
    """Every sum of a @ b, from zero; and what `work` returns, computed while the tensor cores are busy."""
    shapes = [(products[0][0].shape[0], products[0][1].shape[1]) for products in sums]
    if interpreting() or not on_hopper():
        return dots(
            *[(zeros(*shape), *products) for shape, products in zip(shapes, sums)]
        ), work()

    def body(*accumulators: Any) -> tuple[list[Reg], Any]:
        for accumulator, products in zip(accumulators, sums):
            for a, b in products:
                plgpu.wgmma(accumulator, a, b)
        done = work()
        return _pin_results([accumulator[...] for accumulator in accumulators]), done

    accumulator: Any = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]
    return pl.run_scoped(body, *[accumulator(shape, F32) for shape in shapes])


def short_dot(acc: Reg, *products: tuple[Operand, Smem], first_column: int = 0) -> Reg:
    """acc + sum of a @ b where b has fewer than the 64 rows that a wgmma takes: by mma.sync on every machine.

    Of b it takes as many columns from `first_column` on as acc has.
    """
    if interpreting():
        columns = pl.ds(first_column, acc.shape[1])
        return dot(acc, *[(a, b[:, columns]) for a, b in products])
    return _dot_sync(acc, products, first_column)


def _dot_sync(
    acc: Reg, products: Sequence[tuple[Operand, Smem]], first_column: int = 0
) -> Reg:
    for a, b in products:
        acc = mma_sync(acc, a, b, first_column)
    return acc


def _product(a: Operand, b: Smem) -> Reg:
    return jnp.dot(a[...].astype(F32), b[...].astype(F32), precision="highest")


def _pin_results(results: list[Reg]) -> list[Reg]:
    """Keeps LLVM from moving a use of a result before the wait for its wgmma.

    ptxas would see such a use, and would then serialise every wgmma of the kernel.
    """
    return [pin(x) for x in results]
