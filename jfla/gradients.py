"""The gradients of every chunk from the states and cotangents at its two ends, in closed form and plain jnp."""

import functools
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from jfla.decay import decayed_dot_adjoint, dot, sum_after, sum_after_adjoint, sum_before, sum_before_adjoint
from jfla.prepare import ChunkInputs

Pairs = Float[Array, "N B HV C C"]
Keys = Float[Array, "N B HV C K"]
Values = Float[Array, "N B HV C V"]
States = Float[Array, "N B HV K V"]


class Operands(NamedTuple):
    """q and k carried to where they meet the state: to the chunk's start (`_in`) or its end (`_out`)."""

    q_in: Keys
    k_in: Keys
    k_out: Keys
    decay: Float[Array, "N B HV G"]


def operands(x: ChunkInputs) -> Operands:
    """The decays between a token and the two ends of its chunk."""
    e_in, e_out = jnp.exp(sum_before(x.g)), jnp.exp(sum_after(x.g))
    return Operands(x.q * e_in, x.k * e_in, x.k * e_out, jnp.exp(jnp.sum(x.g, axis=-2)))


def chunk_gradients(
    x: ChunkInputs,
    op: Operands,
    states: States,
    error: Values,
    v_new: Values,
    do: Values,
    d_a_qk: Pairs,
    dends: States,
    y: Values,
) -> tuple[Keys, Keys, Values, Float[Array, "N B HV C G"], Float[Array, "N B HV C"]]:
    """dq, dk, dv, dg, dbeta of every chunk, from the states and their cotangents at its two ends.

    The inverse's adjoint needs no product with X: dL = -stril(X^T dX X^T) = -stril(y v_new^T). The gate's is closed:
    where x meets exp(a sum of decays), that sum's cotangent is x * dx.
    """
    d_lower = -jnp.tril(y @ v_new.mT, -1)
    rows = jnp.stack([x.q, x.beta[..., None] * x.k], axis=-3)
    drows, dk, dg = decayed_dot_adjoint(rows, x.k, x.g, jnp.stack([d_a_qk, d_lower], axis=-3))

    # Each of these is the cotangent of q or k times the decay it was multiplied with.
    e_in, e_out = jnp.exp(sum_before(x.g)), jnp.exp(sum_after(x.g))
    dq_in = e_in * (do @ states.mT)
    dk_in = -e_in * ((x.beta[..., None] * y) @ states.mT)
    dk_out = e_out * (v_new @ dends.mT)

    dbeta_k = drows[..., 1, :, :]
    dq = drows[..., 0, :, :] + dq_in
    dk = dk + x.beta[..., None] * dbeta_k + dk_in + dk_out
    dbeta = dot(dbeta_k, x.k) + dot(y, error)
    dv = x.beta[..., None] * y

    keep = functools.partial(_sum_to_gate, gate_dim=x.g.shape[-1])
    dg = dg + sum_before_adjoint(keep(x.q * dq_in + x.k * dk_in)) + sum_after_adjoint(keep(x.k * dk_out))
    dg = dg + (op.decay * keep(dot(states, dends)))[..., None, :]
    return dq, dk, dv, dg, dbeta


def _sum_to_gate(x: Float[Array, "*batch K"], gate_dim: int) -> Float[Array, "*batch G"]:
    """The gate's axis: every key channel has its decay (KDA), or all of them share one (GDN)."""
    return x if gate_dim == x.shape[-1] else jnp.sum(x, axis=-1, keepdims=True)
