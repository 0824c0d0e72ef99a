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
