"""Deals the chunks of a call out to programs that stay until none are left."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from jfla.pallas._operands import Place


class Turn(NamedTuple):
    """One chunk of a worker.

    `zero` is 0, which the compiler cannot know. Added to an index it keeps addresses and masks from being computed
    before the loop, where they would all be held in registers, and more than there are.
    """

    place: Place
    number: Any
    zero: Any
    next_place: Place
    has_next: Any


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
        """Heads first, which lie side by side in memory."""
        heads, n_chunks = jnp.int32(self.heads), jnp.int32(self.n_chunks)
        rest = lax.div(item, heads)
        return Place(lax.div(rest, n_chunks), lax.rem(item, heads), lax.rem(rest, n_chunks))

    def first(self, worker: Any) -> Any:
        return lax.axis_index("program") * self.workers + worker

    def each_chunk(self, body: Callable[[Turn], None], worker: Any, zero: Any) -> None:
        """Runs `body` on every chunk of this worker. `zero` [1] holds a 0 in device memory: see Turn."""
        stride, first = self.used * self.workers, self.first(worker)
        count = lax.div(jnp.maximum(self.total - first, 0) + (stride - 1), jnp.int32(stride))

        def step(i: Any, zero: Any) -> Any:
            item = first + i * stride
            body(Turn(self.place(item), i, zero, self.place(item + stride), item + stride < self.total))
            return zero & i

        lax.fori_loop(0, count, step, zero[0])
