"""Matmuls on the tensor cores with value semantics: they take and return registers, and are jnp.dot interpreted.

A wgmma is asynchronous: several are issued, then waited for together, and a warpgroup can compute meanwhile
(`MatmulQueue`). Where the machine has none they are mma.sync, one after the other.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jfla.pallas.context import interpreting
from jfla.pallas.machine import on_hopper
from jfla.pallas.mgpu.layouts import WGMMA
from jfla.pallas.mgpu.mma_sync import mma_sync
from jfla.pallas.mgpu.opaque import pin
from jfla.pallas.mgpu.smem import F32, is_tile
from jfla.pallas.mgpu.types import Reg, Smem

# Operand of a matmul: Reg or Smem on the left, Smem on the right, both of 16 bits.
Operand = Any
# Left and right operands of matmuls, in the order in which they are issued.
Products = list[tuple[Operand, Smem]]


def load(ref: Smem) -> Reg:
    """A tile, or a buffer of float32, in the accumulator's layout.

    Asked for a load without bank conflicts, JAX raises an error where it finds none, as for float32 without a swizzle.
    """
    return plgpu.load(ref, layout=WGMMA, optimized=is_tile(ref))


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
    """`dot(acc, *products)` of several (acc, *products) that do not depend on each other, waited for together."""

    def issue(*results: Sum) -> None:
        for result, (_, *products) in zip(results, sums):
            result.add(*products)

    return MatmulQueue().accumulate(issue, *[acc for acc, *_ in sums])


class Sum:
    """acc + sum of a @ b: `add` issues products, `read` waits for them.

    Where there is no wgmma, `add` computes them. Interpret mode simulates none with an operand in registers, so there
    they are plain dots.
    """

    def __init__(self, acc: Any, queue: "MatmulQueue"):
        self._acc: Any = acc  # a reference to an accumulator, or the value itself
        self._queue = queue
        self._last = 0  # number of its last product in the queue

    def add(self, *products: tuple[Operand, Smem]) -> None:
        """Issues a @ b of each."""
        for a, b in products:
            if interpreting():
                self._acc = self._acc + _product(a, b)
            elif on_hopper():
                plgpu.wgmma(self._acc, a, b)
            else:
                self._acc = mma_sync(self._acc, a, b)
        self._queue.issued += len(products)
        self._last = self._queue.issued

    def read(self) -> Reg:
        """Waits for this sum, and for none of what was issued behind it.

        Every `plgpu.wgmma` commits a group of its own, and groups end in order: so those that may be in flight are
        counted as products. With one too many the sum would be read before the tensor cores have written it.
        Pinned: LLVM would move a use of it before the wait, and ptxas, seeing that, serialise all of a kernel's wgmmas.
        """
        if not _asynchronous():
            return self._acc
        pending = self._queue.issued - self._last
        return pin(plgpu.wgmma_accumulator_load(self._acc, wait_n=pending))


class MatmulQueue:
    """Matmuls in flight, in the order in which they were issued and end: a warpgroup computes meanwhile."""

    def __init__(self):
        self.issued = 0  # products so far

    def wait(self) -> None:
        """Waits for all that is in flight: its operands in shared memory may then be written over."""
        if _asynchronous():
            plgpu.wgmma_wait(0)

    def from_zero[T](self, body: Callable[..., T], *shapes: tuple[int, int]) -> T:
        """`body(*sums)` with a `Sum` of each shape."""
        if not _asynchronous():
            return body(*[Sum(zeros(*shape), self) for shape in shapes])
        accumulator: Any = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]
        refs = [accumulator(shape, F32) for shape in shapes]
        return pl.run_scoped(lambda *refs: body(*[Sum(x, self) for x in refs]), *refs)

    def accumulate(self, body: Callable[..., None], *accs: Reg) -> list[Reg]:
        """The sums from each of `accs` on, to which `body(*sums)` has added; waits for all that is in flight."""
        if not _asynchronous():
            sums = [Sum(acc, self) for acc in accs]
            body(*sums)
            return [x.read() for x in sums]
        init: Any = plgpu.WGMMAAccumulatorRef.init
        results = pl.run_state(lambda refs: body(*[Sum(x, self) for x in refs]))(
            [init(acc) for acc in accs]
        )
        return [pin(x) for x in results]  # see `Sum.read`


def short_dot(acc: Reg, *products: tuple[Operand, Smem], first_column: int = 0) -> Reg:
    """acc + sum of a @ b where b has fewer than the 64 rows that a wgmma takes: by mma.sync on every machine.

    Of b it takes as many columns from `first_column` on as acc has.
    """
    if interpreting():
        columns = pl.ds(first_column, acc.shape[1])
        return dot(acc, *[(a, b[:, columns]) for a, b in products])
    for a, b in products:
        acc = mma_sync(acc, a, b, first_column)
    return acc


def _product(a: Operand, b: Smem) -> Reg:
    return jnp.dot(a[...].astype(F32), b[...].astype(F32), precision="highest")


def _asynchronous() -> bool:
    return on_hopper() and not interpreting()
