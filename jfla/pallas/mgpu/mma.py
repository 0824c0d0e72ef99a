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
# Left and right operands of matmuls, in the order in which they are issued.
Products = list[tuple[Operand, Smem]]


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
            _issue(ref, products)

    accumulator: Any = plgpu.WGMMAAccumulatorRef
    results = pl.run_state(issue)([accumulator.init(acc) for acc, *_ in sums])
    return [pin(x) for x in results]  # see `_read`


def dots_while(work: Callable[[], Any], *sums: Products) -> tuple[list[Reg], Any]:
    """Every sum of a @ b, from zero; and what `work` returns, computed while the tensor cores are busy."""
    shapes = [_sum_shape(products) for products in sums]
    if interpreting() or not on_hopper():
        return dots(
            *[(zeros(*shape), *products) for shape, products in zip(shapes, sums)]
        ), work()

    def body(*accumulators: Any) -> tuple[list[Reg], Any]:
        for accumulator, products in zip(accumulators, sums):
            _issue(accumulator, products)
        done = work()
        return [_read(accumulator, 0) for accumulator in accumulators], done

    return pl.run_scoped(body, *[_accumulator(shape) for shape in shapes])


def dots_in_turn(
    sums: Sequence[Products],
    more: Callable[[Reg], Products],
    work: Callable[..., Any],
    shape: tuple[int, int],
) -> tuple[Reg, Any]:
    """The last of `sums` and `more` products, made of the first sum; and what `work` makes of the sums between.

    A sum is one of a @ b from zero. Only the first is waited for before `more` are issued, and those between before
    `work`, which computes while the tensor cores are busy with the last. Its `shape` is given: it may begin empty.
    """
    if interpreting() or not on_hopper():
        *before, begun = sums
        first, *between = [dot(zeros(*_sum_shape(x)), *x) for x in before]
        return dot(zeros(*shape), *more(first), *begun), work(*between)

    def body(*accumulators: Any) -> tuple[Reg, Any]:
        first, *between, last = accumulators
        for accumulator, products in zip(accumulators, sums):
            _issue(accumulator, products)
        pending = sum(len(products) for products in sums[1:])
        added = more(_read(first, pending))
        _issue(last, added)
        pending += len(added)
        done: list[Reg] = []
        for accumulator, products in zip(between, sums[1:-1]):
            pending -= len(products)
            done.append(_read(accumulator, pending))
        result = work(*done)
        return _read(last, 0), result

    shapes = [*(_sum_shape(products) for products in sums[:-1]), shape]
    return pl.run_scoped(body, *[_accumulator(shape) for shape in shapes])


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


def _sum_shape(products: Products) -> tuple[int, int]:
    a, b = products[0]
    return a.shape[0], b.shape[1]


def _accumulator(shape: tuple[int, int]) -> Any:
    accumulator: Any = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]
    return accumulator(shape, F32)


def _issue(accumulator: Any, products: Products) -> None:
    for a, b in products:
        plgpu.wgmma(accumulator, a, b)


def _read(accumulator: Any, pending: int) -> Reg:
    """A sum, when no more than `pending` products are in flight, which were issued behind its own.

    Every `plgpu.wgmma` commits a group of its own, and groups end in order: so `pending` counts products. With one too
    many in flight the sum would be read before the tensor cores have written it.
    Pinned: LLVM would move a use of it before the wait, and ptxas, seeing that, serialise every wgmma of the kernel.
    """
    return pin(plgpu.wgmma_accumulator_load(accumulator, wait_n=pending))
