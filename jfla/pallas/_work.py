"""Deals the chunks of a call out to programs that stay until none are left."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from jfla.pallas._operands import Place


class Work(NamedTuple):
    """The chunks of a call, dealt out to `workers` in each of at most `programs` programs, which stay to the end."""

    batch: int
    heads: int
    n_chunks: int
    workers: int
    programs: int

    @property
    def total(self) -> int:
        return self.batch * self.heads * self.n_chunks

    @property
    def used(self) -> int:
        """Programs, the length of the grid's axis "program"."""
        return min(self.programs, -(-self.total // self.workers))

    def place(self, item: Any) -> Place:
        """Heads first, which lie side by side in memory; chunks last, as a scan beside wants them."""
        heads, batch = jnp.int32(self.heads), jnp.int32(self.batch)
        rest = lax.div(item, heads)
        return Place(lax.rem(rest, batch), lax.rem(item, heads), lax.div(rest, batch))

    def first(self, program: Any, worker: Any) -> Any:
        return program * self.workers + worker

    def count(self, program: Any, worker: Any) -> Any:
        """The chunks of this worker of a program."""
        stride = self.used * self.workers
        return lax.div(jnp.maximum(self.total - self.first(program, worker), 0) + (stride - 1), jnp.int32(stride))

    def each_chunk(self, body: Callable[["Turn"], None], program: Any, worker: Any, zero: Any) -> Place:
        """Runs `body` on every chunk of this worker of a program; returns its last one.

        `zero` [1] holds a 0 in device memory: see Turn.
        """
        stride, first, count = self.used * self.workers, self.first(program, worker), self.count(program, worker)

        def step(i: Any, zero: Any) -> Any:
            body(Turn(self, first + i * stride, stride, i, zero))
            return zero & i

        lax.fori_loop(0, count, step, zero[0])
        return self.place(first + (count - 1) * stride)


class Turn(NamedTuple):
    """One chunk of a worker: `number` counts his chunks, `item` those of the call, `step` apart.

    `zero` is 0, which the compiler cannot know. Added to an index it keeps addresses and masks from being computed
    before the loop, where they would all be held in registers, and more than there are.
    """

    work: Work
    item: Any
    step: Any
    number: Any
    zero: Any

    @property
    def place(self) -> Place:
        return self.work.place(self.item)

    @property
    def next_place(self) -> Place:
        return self.work.place(self.item + self.step)

    @property
    def last_place(self) -> Place:
        return self.work.place(self.item - self.step)

    @property
    def has_last(self) -> Any:
        return self.item >= self.step

    @property
    def has_next(self) -> Any:
        return self.item + self.step < self.work.total
