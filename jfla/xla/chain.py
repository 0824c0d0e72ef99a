"""The state at every chunk's start, from the chunks' maps of the state, in log2 N steps: neighbours become one.

    S_out = R S_in + C,      R = diag(decay) - erased,      C = written

and two chunks compose to R2 R1 and R2 C1 + C2 (`jfla.affine`; docs/math.md, equations 9 and 10). Matmuls take what is
erased, and the decay is applied elementwise. A GPU rounds operands of matmuls to tensorfloat32: a decay near 1 would be
off by up to 5e-4, in the same direction in every chunk, and the error of a state would grow with the number of chunks.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float


class Maps(NamedTuple):
    """R and C of many spans of time."""

    decay: Float[Array, "*batch G"]
    erased: Float[Array, "*batch K K"]
    written: Float[Array, "*batch K V"]

    def apply(
        self, state: Float[Array, "*batch K V"], adjoint: bool
    ) -> Float[Array, "*batch K V"]:
        """R S + C, or R^T S + C."""
        erased = self.erased.mT if adjoint else self.erased
        return self.decay[..., None] * state - jnp.matmul(erased, state) + self.written

    def at(self, spans: int | slice | tuple) -> "Maps":
        """Of some of the spans."""
        return Maps(*(x[spans] for x in self))


def chain_by_pairs(
    first: Float[Array, "*batch K V"], maps: Maps, *, adjoint: bool = False
) -> tuple[Float[Array, "N *batch K V"], Float[Array, "*batch K V"]]:
    """The state where each of N spans begins, and the state behind all of them.

    The way there composes neighbours until one map is left; on the way back each pair's start goes through its first
    map. What a span begins with depends on the spans before it alone, not on how many follow.

    In the `adjoint` cotangents go through R^T from `first`, behind the last span, to every span's end and to the
    start of time. R of an even number of spans is composed as in the forward, which XLA then does once for both.

    >>> import jax.numpy as jnp
    >>> ones = jnp.ones((3, 1, 1))
    >>> starts, end = chain_by_pairs(jnp.zeros((1, 1)), Maps(ones[..., 0], 0.5 * ones, ones))
    >>> print(starts[:, 0, 0], end[0, 0])
    [0.  1.  1.5] 1.75
    """
    num_spans = maps.decay.shape[0]
    if num_spans == 1:
        return first[None], maps.at(0).apply(first, adjoint)
    odd = num_spans % 2
    # The map of the odd span is applied last.
    even = maps.at(slice(odd, None) if adjoint else slice(num_spans - odd))
    pairs = Maps(*(x.reshape(-1, 2, *x.shape[1:]) for x in even))
    early, late = (pairs.at((slice(None), i)) for i in (0, 1))
    # The same two in the order in which they are applied.
    before, behind = (late, early) if adjoint else (early, late)
    composed = Maps(
        early.decay * late.decay,
        _erased_by_both(early, late),
        behind.apply(before.written, adjoint),
    )
    starts, end = chain_by_pairs(first, composed, adjoint=adjoint)
    middles = before.apply(starts, adjoint)
    in_order = [middles, starts] if adjoint else [starts, middles]
    states = jnp.stack(in_order, axis=1).reshape(-1, *starts.shape[1:])
    if not odd:
        return states, end
    both = [end[None], states] if adjoint else [states, end[None]]
    return jnp.concatenate(both), maps.at(0 if adjoint else -1).apply(end, adjoint)


def _erased_by_both(early: Maps, late: Maps) -> Float[Array, "*batch K K"]:
    """diag(decays of both) - R2 R1."""
    return (
        late.decay[..., None] * early.erased
        + late.erased * early.decay[..., None, :]
        - jnp.matmul(late.erased, early.erased)
    )
