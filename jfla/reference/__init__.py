"""The definition: plain JAX on any device, any float dtype, differentiable in every mode.

`recurrent_kda`, `recurrent_gdn`: the recurrence itself, token by token. `chunk_kda`, `chunk_gdn`: the chunked form
without a derivative rule of its own. Both can be differentiated in forward mode and to any order (`jax.jvp`,
`jax.hessian`), in any float dtype.
"""

from typing import Any

from jaxtyping import Array

from jfla._inputs.validate import DEFAULTS, validate, validate_recurrent
from jfla.reference import recurrent
from jfla.types import GDN, KDA, DeltaRuleOutput, Op

__all__ = ["chunk_gdn", "chunk_kda", "recurrent", "recurrent_gdn", "recurrent_kda"]


def recurrent_kda(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    *,
    return_states: bool = False,
    **arguments: Any,
) -> DeltaRuleOutput:
    """The definition of Kimi Delta Attention, token by token.

        S <- exp(g_t)[:, None] S;    S <- S + k_t (beta_t (v_t - S^T k_t))^T;    o_t = S^T (scale q_t)

    **Arguments, returns, raises:** those of `jfla.recurrent_kda`, with the same shapes and units, but that there is no
    `implementation` to choose: `ValueError` for "pallas".

    Reference: Kimi Linear: An Expressive, Efficient Attention Architecture (arXiv:2510.26692).

    >>> import jax, jfla
    >>> x, beta = jax.numpy.ones((1, 3, 2, 4)), jax.numpy.ones((1, 3, 2))
    >>> print(jfla.reference.recurrent_kda(x, x, x, -x, beta, qk_norm=True).output.shape)
    (1, 3, 2, 4)
    """
    return _recurrent(KDA, q, k, v, g, beta, return_states=return_states, **arguments)


def recurrent_gdn(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    *,
    return_states: bool = False,
    **arguments: Any,
) -> DeltaRuleOutput:
    """The definition of Gated DeltaNet, token by token.

        S <- exp(g_t) S;    S <- S + k_t (beta_t (v_t - S^T k_t))^T;    o_t = S^T (scale q_t)

    **Arguments, returns, raises:** those of `jfla.recurrent_gdn`, with the same shapes and units, but that there is no
    `implementation` to choose: `ValueError` for "pallas".

    Reference: Yang, Kautz, Hatamizadeh, Gated Delta Networks: Improving Mamba2 with Delta Rule (arXiv:2412.06464).

    >>> import jax, jfla
    >>> x, beta = jax.numpy.ones((1, 3, 2, 4)), jax.numpy.ones((1, 3, 2))
    >>> f = lambda q: jfla.reference.recurrent_gdn(q, x, x, -beta, beta, qk_norm=True).output
    >>> print(jax.jvp(f, (x,), (x,))[1].shape)
    (1, 3, 2, 4)
    """
    return _recurrent(GDN, q, k, v, g, beta, return_states=return_states, **arguments)


def chunk_kda(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    **arguments: Any,
) -> DeltaRuleOutput:
    """Kimi Delta Attention in chunks, without a derivative rule of its own.

        S_t = (I - beta_t k_t k_t^T) diag(exp(g_t)) S_(t-1) + beta_t k_t v_t^T          o_t = S_t^T (scale q_t)

    **Arguments, returns, raises:** those of `jfla.chunk_kda`, with the same shapes and units, but that there is no
    `implementation` to choose: `ValueError` for "pallas".

    Reference: Kimi Linear: An Expressive, Efficient Attention Architecture (arXiv:2510.26692).

    >>> import jax, jfla
    >>> x, beta = jax.numpy.ones((1, 3, 2, 4)), jax.numpy.ones((1, 3, 2))
    >>> f = lambda q: jfla.reference.chunk_kda(q, x, x, -x, beta, qk_norm=True).output
    >>> print(jax.jvp(f, (x,), (x,))[1].shape)
    (1, 3, 2, 4)
    """
    return _chunk(KDA, q, k, v, g, beta, **arguments)


def chunk_gdn(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    **arguments: Any,
) -> DeltaRuleOutput:
    """Gated DeltaNet in chunks, without a derivative rule of its own.

        S_t = exp(g_t) (I - beta_t k_t k_t^T) S_(t-1) + beta_t k_t v_t^T          o_t = S_t^T (scale q_t)

    **Arguments, returns, raises:** those of `jfla.chunk_gdn`, with the same shapes and units, but that there is no
    `implementation` to choose: `ValueError` for "pallas".

    Reference: Yang, Kautz, Hatamizadeh, Gated Delta Networks: Improving Mamba2 with Delta Rule (arXiv:2412.06464).

    >>> import jax, jfla
    >>> x, beta = jax.numpy.ones((1, 3, 2, 4)), jax.numpy.ones((1, 3, 2))
    >>> print(jfla.reference.chunk_gdn(x, x, x, -beta, beta, qk_norm=True).output.shape)
    (1, 3, 2, 4)
    """
    return _chunk(GDN, q, k, v, g, beta, **arguments)


def _recurrent(
    op: Op, *arrays: Array, return_states: bool, **arguments: Any
) -> DeltaRuleOutput:
    arguments = _complete(arguments)
    arguments = {"state_slots": None} | arguments
    inputs, options = validate_recurrent(
        op, *arrays, return_states=return_states, **arguments
    )
    return recurrent.run(inputs, options)


def _chunk(op: Op, *arrays: Array, **arguments: Any) -> DeltaRuleOutput:
    from jfla.xla.op import run_without_vjp

    return run_without_vjp(*validate(op, *arrays, **_complete(arguments)))


def _complete(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments with defaults for those left out."""
    if arguments.get("implementation") == "pallas":
        raise ValueError(
            'implementation must be None or "xla" in jfla.reference, got "pallas"'
        )
    return DEFAULTS | arguments
