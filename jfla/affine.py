"""Splitting time: over a span of tokens the state goes through an affine map, and affine maps compose exactly.

The delta rule is linear in the state, so that over any span

    S_out = R S_in + C

C is the state that the span leads to from zero, and R is what it makes of the identity when its tokens write nothing
(v = 0): they only decay and erase. Of two spans one after the other (R1, C1), (R2, C2)

    S_out = R2 (R1 S_in + C1) + C2 = (R2 R1) S_in + (R2 C1 + C2)

so the spans' maps can be found side by side, and chained afterwards. In reverse, cotangents go through the transposed
map, dS_in = R^T dS_out + D, where D is the cotangent that the span's own outputs send to its start. No term is dropped
and nothing is approximated: it holds for any gate, to rounding (docs/math.md, equation 9).
"""

import jax.numpy as jnp
from jaxtyping import Array, Float


def chain(
    first: Float[Array, "*batch K V"] | None,
    r: Float[Array, "*batch spans K K"],
    c: Float[Array, "*batch spans K V"],
    *,
    reverse: bool = False,
) -> Float[Array, "*batch spans K V"]:
    """The state where every span begins: `first` (zeros if None) before span 0, R S + C after each.

    In `reverse` `first` is what the last span begins from and the maps run backward in time.

    >>> import jax.numpy as jnp
    >>> r, c = 0.5 * jnp.ones((3, 1, 1)), jnp.ones((3, 1, 1))
    >>> print(chain(None, r, c)[:, 0, 0], chain(jnp.ones((1, 1)), r, c, reverse=True)[:, 0, 0])
    [0.  1.  1.5] [1.75 1.5  1.  ]
    """
    num_spans = c.shape[-3]
    order = list(range(num_spans))
    if reverse:
        order.reverse()
    state = jnp.zeros_like(c[..., 0, :, :]) if first is None else first
    states = [state]
    for span in order[:-1]:
        state = (
            jnp.matmul(r[..., span, :, :], state, precision="highest")
            + c[..., span, :, :]
        )
        states.append(state)
    if reverse:
        states.reverse()
    return jnp.stack(states, axis=-3)


def through(
    first: Float[Array, "*batch K V"] | None,
    r: Float[Array, "*batch spans K K"],
    c: Float[Array, "*batch spans K V"],
    *,
    reverse: bool = False,
) -> Float[Array, "*batch K V"]:
    """The state behind all spans, from `first` (zeros if None) before them; in `reverse` that before all spans.

    >>> import jax.numpy as jnp
    >>> r, c = 0.5 * jnp.ones((3, 1, 1)), jnp.ones((3, 1, 1))
    >>> print(through(None, r, c)[0, 0])
    1.75
    """
    last = 0 if reverse else -1
    state = chain(first, r, c, reverse=reverse)[..., last, :, :]
    return (
        jnp.matmul(r[..., last, :, :], state, precision="highest") + c[..., last, :, :]
    )


def chain_by_pairs(
    first: Float[Array, "*batch K V"],
    r: Float[Array, "N *batch K K"],
    c: Float[Array, "N *batch K V"],
    *,
    reverse: bool = False,
) -> tuple[Float[Array, "N *batch K V"], Float[Array, "*batch K V"]]:
    """The state where every one of many spans begins, and the state behind all of them, in log2 N steps.

    Neighbours are composed until one map is left, and on the way back each pair's start goes through its first map.
    What a span begins with depends on the spans before it alone, not on how many follow. In `reverse` cotangents go
    from `first`, behind the last span, to every span's end and to the start of time. Other than in `chain` they go
    through r^T: r is the map of the forward, and of an even number of spans so are all compositions, which XLA then
    makes once for both directions. Matmuls are at the precision of the context.

    >>> import jax.numpy as jnp
    >>> r, c = 0.5 * jnp.ones((3, 1, 1)), jnp.ones((3, 1, 1))
    >>> starts, end = chain_by_pairs(jnp.zeros((1, 1)), r, c)
    >>> print(starts[:, 0, 0], end[0, 0])
    [0.  1.  1.5] 1.75
    """
    num_spans = r.shape[0]
    if num_spans == 1:
        return first[None], _apply(r[0], first, reverse) + c[0]
    num_pairs = num_spans // 2
    odd = num_spans % 2
    # The odd map is applied last.
    pairs = slice(odd, None) if reverse else slice(2 * num_pairs)
    r_pairs = r[pairs].reshape(num_pairs, 2, *r.shape[1:])
    c_pairs = c[pairs].reshape(num_pairs, 2, *c.shape[1:])
    # The maps of a pair in the order in which they are applied.
    earlier, later = (1, 0) if reverse else (0, 1)
    c_before = c_pairs[:, earlier]
    c_of_pairs = _apply(r_pairs[:, later], c_before, reverse) + c_pairs[:, later]
    r_of_pairs = r_pairs[:, 1] @ r_pairs[:, 0]
    starts, end = chain_by_pairs(first, r_of_pairs, c_of_pairs, reverse=reverse)
    halfway = _apply(r_pairs[:, earlier], starts, reverse) + c_before
    in_order = [halfway, starts] if reverse else [starts, halfway]
    states = jnp.stack(in_order, axis=1).reshape(2 * num_pairs, *c.shape[1:])
    if not odd:
        return states, end
    of_odd = 0 if reverse else -1
    both = [end[None], states] if reverse else [states, end[None]]
    return jnp.concatenate(both), _apply(r[of_odd], end, reverse) + c[of_odd]


def _apply(
    r: Float[Array, "*batch K K"], state: Float[Array, "*batch K V"], reverse: bool
) -> Float[Array, "*batch K V"]:
    """A state through a map, or in `reverse` a cotangent back through it."""
    return (r.mT if reverse else r) @ state
