"""The definition and the portable implementation: plain JAX on any device, any float dtype.

`recurrent_kda`, `recurrent_gdn`: the recurrence itself, token by token. `chunk_kda`, `chunk_gdn`: the chunked form
without a derivative rule of its own. Both can be differentiated in forward mode and to any order (`jax.jvp`,
`jax.hessian`).
"""

from typing import Any

from jaxtyping import Array

from jfla._types import DeltaRuleOutput
from jfla._validate import DEFAULTS, validate
from jfla.reference import chunked, recurrent

__all__ = ["chunk_gdn", "chunk_kda", "chunked", "recurrent", "recurrent_gdn", "recurrent_kda"]


def recurrent_kda(q: Array, k: Array, v: Array, g: Array, beta: Array, **arguments: Any) -> DeltaRuleOutput:
    """The definition of KDA. Arguments and results of `jfla.recurrent_kda`, without `implementation`."""
    return recurrent.apply(*validate("kda", q, k, v, g, beta, **(DEFAULTS | arguments)))


def recurrent_gdn(q: Array, k: Array, v: Array, g: Array, beta: Array, **arguments: Any) -> DeltaRuleOutput:
    """The definition of GDN. Arguments and results of `jfla.recurrent_gdn`, without `implementation`."""
    return recurrent.apply(*validate("gdn", q, k, v, g, beta, **(DEFAULTS | arguments)))


def chunk_kda(q: Array, k: Array, v: Array, g: Array, beta: Array, **arguments: Any) -> DeltaRuleOutput:
    """Chunked KDA without a derivative rule. Arguments and results of `jfla.chunk_kda`, without `implementation`."""
    return chunked.plain(*validate("kda", q, k, v, g, beta, **(DEFAULTS | arguments)))


def chunk_gdn(q: Array, k: Array, v: Array, g: Array, beta: Array, **arguments: Any) -> DeltaRuleOutput:
    """Chunked GDN without a derivative rule. Arguments and results of `jfla.chunk_gdn`, without `implementation`."""
    return chunked.plain(*validate("gdn", q, k, v, g, beta, **(DEFAULTS | arguments)))
