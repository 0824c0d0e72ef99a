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

    def each_chunk(self, body: Callable[[Place, Any], None], worker: Any, zero: Any) -> None:
        """Runs body(place, worker) on every chunk of this worker: heads first, which lie side by side in memory.

        `zero` [1] holds a 0 in device memory. It is added to the number of the worker through the loop: otherwise the
        compiler keeps the address of every tile in registers, and more than there are.
        """
        stride = self.used * self.workers
        first = lax.axis_index("program") * self.workers + worker
        count = lax.div(jnp.maximum(self.total - first, 0) + (stride - 1), jnp.int32(stride))

        def step(i: Any, zero: Any) -> Any:
            item = first + i * stride
            heads, n_chunks = jnp.int32(self.heads), jnp.int32(self.n_chunks)
            rest = lax.div(item, heads)
            body(Place(lax.div(rest, n_chunks), lax.rem(item, heads), lax.rem(rest, n_chunks)), worker + zero)
            return zero & i

        lax.fori_loop(0, count, step, zero[0])
