"""implementation="pallas": what the kernels take, interpret mode, and compiling for a GPU that is not here.

The kernels themselves are imported with the first call that runs them.
"""

from typing import Any

from jfla._inputs.validate import DEFAULTS, validate
from jfla.pallas.context import compiling_for, interpret, interpreting, mma_kernels
from jfla.pallas.support import unsupported
from jfla.types import GDN, KDA

__all__ = [
    "compiling_for",
    "interpret",
    "interpreting",
    "mma_kernels",
    "supported",
    "unsupported",
]


def supported(
    q: Any, k: Any, v: Any, g: Any, beta: Any, **arguments: Any
) -> str | None:
    """None when the kernels take this call of `chunk_kda` or `chunk_gdn` here, else the reason.

    The arguments of the op, of which only shapes, dtypes and devices matter; `jax.ShapeDtypeStruct`s will do. The rank
    of `g` says which op: [B, T, HV, K] is KDA, [B, T, HV] is GDN. `jfla.explain` says more, for all ops.

    **Raises:** `ValueError` for what the op itself would refuse.

    >>> import jax, jfla
    >>> x = jax.ShapeDtypeStruct((1, 64, 2, 128), "float32")
    >>> beta = jax.ShapeDtypeStruct((1, 64, 2), "float32")
    >>> jfla.pallas.supported(x, x, x, x, beta)
    'q is float32; the kernels take bfloat16 and float16'
    """
    op = KDA if len(g.shape) == 4 else GDN
    return unsupported(
        "chunk", *validate(op, q, k, v, g, beta, **(DEFAULTS | arguments))
    )
