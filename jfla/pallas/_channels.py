"""What the channels of one warpgroup get in the gradients of a chunk of KDA: dq, dk, dg."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jfla._types import CHUNK
from jfla.pallas._chunk_kda import FIRST_PAIRS, KDA_STEPS, Chunk
from jfla.pallas._keys import BLOCK, K, Q
from jfla.pallas._patterns import FAST_RANGE, NEAR_STEPS, pairs_of
from jfla.pallas._tile import BF16, COLS, F32, dot, index, load, transposed, zeros

NEVER = -1e30  # as an exponent
settled = lax.optimization_barrier


def meet_states(c: Chunk, values: Any, first: int) -> jax.Array:
    """values [C, V] @ the state that begins at tile `first`: [C, 64]."""
    tiles = [(values.at[n], c.state(first + n)) for n in c.values()]
    return dot(zeros(CHUNK, BLOCK), *tiles)


def through_the_chunk(c: Chunk) -> list[Any]:
    """S dS, element by element, in two tiles of scratch: summed over v, what every decay of the chunk gets."""

    @pl.loop(0, c.value_blocks)
    def _(n: Any) -> None:
        tile = c.state(n)
        tile[...] = (load(tile).astype(F32) * c.state(2 + n)[...].astype(F32)).astype(BF16)

    plgpu.commit_smem()
    return [c.state(n) for n in c.values()]


def channels(chunk: Chunk) -> tuple[jax.Array, jax.Array, jax.Array]:
    """dq, dk, dg [C, 64] of this warpgroup's channels.

    Where the chunk's gates allow, its pairs decay from the chunk's start, which takes one factor > 1.
    """
    c, none = chunk.anew(9), zeros(CHUNK, BLOCK)
    dq, dk = meet_states(c, c.s.do, 0), meet_states(c, c.s.dv, 0)
    c.meet_channels()
    c = chunk.anew(4)
    # The same for every token, so a vector is kept: [channels, C] with equal columns.
    e = jnp.exp2(c.exponent(0, FIRST_PAIRS, flat=True))
    through = e * c.spread(none, 0, FIRST_PAIRS, through_the_chunk(c), flat=True)
    c.s.whole.at[c.me][...] = jnp.sum(jnp.where(index(1) == 0, through, none), axis=1)

    c = chunk.anew(5)
    before = c.exponent(1, FIRST_PAIRS)
    fast, keys = in_range(c, before), c.keys.with_factors()

    def from_start(dq: jax.Array, dk: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        q_in, k_in, k_back = (c.scratch(n) for n in range(3))
        q_in[...] = (keys.read(Q, c.me) * jnp.exp2(before)).astype(BF16)
        k_in[...] = (keys.read(K, c.me) * jnp.exp2(before)).astype(BF16)
        k_back[...] = (keys.read(K, c.me) * jnp.exp2(-before)).astype(BF16)
        plgpu.commit_smem()
        w_q, w_k = c.s.weights.at[c.at(0)], c.s.weights.at[c.at(1)]
        dq, dk = dot(dq, (w_q, k_back)), dot(-dk, (w_k, k_back))
        back = dot(zeros(CHUNK, BLOCK), (transposed(w_q), q_in), (transposed(w_k), k_in))
        # With the rounded factors that the matmuls saw, what a pair gives to both its tokens cancels before it.
        z = q_in[...].astype(F32) * dq + k_in[...].astype(F32) * dk - k_back[...].astype(F32) * back
        return jnp.exp2(before) * dq, jnp.exp2(before) * dk + jnp.exp2(-before) * back, z

    def states_alone(dq: jax.Array, dk: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        dq, dk = jnp.exp2(before) * dq, -jnp.exp2(before) * dk
        return dq, dk, keys.read(Q, c.me) * dq + keys.read(K, c.me) * dk

    dq, dk, z = lax.cond(fast, from_start, states_alone, dq, dk)
    c = chunk.anew(3)
    dg = c.spread(none, 1, FIRST_PAIRS, c.split(z))

    c = chunk.anew(6)
    dk_out = jnp.exp2(c.exponent(2, FIRST_PAIRS)) * meet_states(c, c.s.v_new, 2)
    dg = c.spread(dg, 2, FIRST_PAIRS, c.split(c.keys.read(K, c.me) * dk_out))
    return strong_pairs(chunk, FIRST_PAIRS + jnp.where(fast, 0, NEAR_STEPS), (dq, dk + dk_out, dg))


def in_range(c: Chunk, exponents: jax.Array) -> Any:
    """Whether this warpgroup's channels may decay backwards by these."""
    flags = c.s.flags.at[c.me]
    flags[...] = jnp.min(exponents, axis=1)
    plgpu.commit_smem()
    return jnp.min(plgpu.load(flags, layout=COLS)) > -FAST_RANGE


def strong_pairs(
    chunk: Chunk, end: Any, grads: tuple[jax.Array, jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Adds what pairs give, for any gate, in the steps up to `end`: see _patterns.PAIRS.

    From a block's start, a later token decays on and an earlier one back, which takes a factor > 1. Through a middle,
    both decay towards it. Where not even blocks of 16 tokens are in range, the squares inside them come last.
    """

    def step(i: Any, end: Any, grads: tuple[jax.Array, jax.Array, jax.Array]):
        dq, dk, dg = grads
        c = chunk._replace(zero=chunk.zero * i).anew(0)
        q, k, k_back, e, w_q, w_k = (c.scratch(n) for n in range(6))  # w_q and w_k where dS was, from tile 2 on
        inside = i == FIRST_PAIRS

        @pl.loop(0, 2)
        def _weights(which: Any) -> None:
            here = pairs_of(i - FIRST_PAIRS)
            c.state(2 + which)[...] = jnp.where(here, c.s.weights[which], zeros(CHUNK, CHUNK).astype(BF16))

        plgpu.commit_smem()

        exponents = c.sums.sums(c.s.g.at[c.me])
        beyond = lax.cond(inside, lambda: ~in_range(c, exponents), lambda: jnp.bool_(False))
        end = jnp.where(beyond, len(KDA_STEPS), end)
        c.next(c.sums, i, end)
        keys = c.keys.with_factors()
        exponents += jnp.where(beyond, NEVER, 0.0)  # nothing comes of this step then
        back = jnp.where(inside, jnp.where(beyond, 0.0, -1.0), 1.0) * exponents
        e[...] = jnp.exp2(exponents).astype(BF16)
        q[...] = (keys.read(Q, c.me) * jnp.exp2(exponents)).astype(BF16)
        k[...] = (keys.read(K, c.me) * jnp.exp2(exponents)).astype(BF16)
        k_back[...] = (keys.read(K, c.me) * jnp.exp2(jnp.minimum(back, FAST_RANGE))).astype(BF16)
        plgpu.commit_smem()

        # From memory: the exponents, or what comes of them, would be registers too many. Rounded, like the operands.
        on = lambda: e[...].astype(F32)

        def off() -> jax.Array:
            """What k_back decays by: on, or 1 / on inside blocks."""
            x = on()
            return x + jnp.where(inside, 1.0, 0.0) * (1.0 / jnp.maximum(x, 2.0**-FAST_RANGE) - x)

        # Each result is added before the next matmul; the compiler would keep all three to the end.
        none, sign = zeros(CHUNK, BLOCK), jnp.where(inside, -1.0, 1.0)
        dx = dot(none, (transposed(w_k), k), (transposed(w_q), q))
        dk, z = settled((dk + off() * dx, sign * k_back[...].astype(F32) * dx))
        dx = dot(none, (w_q, k_back))
        dq, z = settled((dq + on() * dx, z + q[...].astype(F32) * dx))
        dx = dot(none, (w_k, k_back))
        dk, z = settled((dk + on() * dx, z + k[...].astype(F32) * dx))
        return i + 1, end, (dq, dk, c.spread(dg, i, end, c.split(z)))

    @pl.when(end > FIRST_PAIRS)
    def _():
        chunk.sums.fetch(FIRST_PAIRS)
        chunk.adjoints.fetch(FIRST_PAIRS)

    carry = jnp.int32(FIRST_PAIRS), end, grads
    return lax.while_loop(lambda carry: carry[0] < carry[1], lambda carry: step(*carry), carry)[2]
