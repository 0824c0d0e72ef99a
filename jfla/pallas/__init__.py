"""The Hopper kernels' door: what they support, interpret mode, and the two ops."""

from collections.abc import Callable
from typing import Any

from jfla._types import DeltaRuleOutput, Inputs, Options
from jfla._validate import DEFAULTS, validate
from jfla.pallas import decode, delta_rule
from jfla.pallas._launch import interpret, interpreting
from jfla.pallas._support import unsupported

__all__ = ["chunked", "interpret", "interpreting", "recurrent", "supported", "unsupported"]


def supported(q: Any, k: Any, v: Any, g: Any, beta: Any, **arguments: Any) -> str | None:
    """None when the kernels take this call of `chunk_kda` or `chunk_gdn` here, else the reason.

    The arguments of the op, of which only shapes, dtypes and devices matter; `jax.ShapeDtypeStruct`s will do. The rank
    of `g` says which op: [B, T, HV, K] is KDA, [B, T, HV] is GDN.

    **Raises:** `ValueError` for what the op itself would refuse.

    >>> import jax, jfla
    >>> x = jax.ShapeDtypeStruct((1, 64, 2, 128), "float32")
    >>> beta = jax.ShapeDtypeStruct((1, 64, 2), "float32")
    >>> jfla.pallas.supported(x, x, x, x, beta)
    'q is float32; the kernels take bfloat16 and float16'
    """
    op = "kda" if len(g.shape) == 4 else "gdn"
    return unsupported("chunk", *validate(op, q, k, v, g, beta, **(DEFAULTS | arguments)))


def chunked(inputs: Inputs, options: Options) -> DeltaRuleOutput:
    """The chunked op by kernels."""
    return delta_rule.apply(inputs, options, interpreting())


def recurrent(
    inputs: Inputs, options: Options, definition: Callable[[Inputs, Options], DeltaRuleOutput]
) -> DeltaRuleOutput:
    """The recurrent op by a kernel. It is for decoding: what is differentiated is `definition`, in any mode."""
    return decode.apply(inputs, options, definition, interpreting())
