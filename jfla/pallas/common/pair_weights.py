"""The cotangents of a GDN chunk's pairs of tokens, W_q or W_k, from products of values and what `intra_gdn` leaves.

Without the diagonal, which no decay multiplies.
"""

from typing import Any

import jax.numpy as jnp

from jfla.pallas.common.intra_gdn.smem import INV_NORMS, LOG2_CUM
from jfla.pallas.common.qk_tiles import K
from jfla.pallas.common.token_decay import pair_decay
from jfla.pallas.mgpu.copies import load_with_layout
from jfla.pallas.mgpu.diagonal import below_diagonal
from jfla.pallas.mgpu.iota import per_column
from jfla.pallas.mgpu.layouts import COLS, ROWS
from jfla.pallas.mgpu.types import Index, Reg, Smem
from jfla.types import CHUNK


def pair_weights(
    products: Reg,
    token_scalars_smem: Smem,
    which: Index,
    scale: Index,
    qk_norm: bool,
) -> Reg:
    """[C, C] float32: do v_new^T or dv v_new^T, strictly lower, times decays, `scale` and norms.

    The norms are those of q, or of k, in rows, and of k in columns.
    """
    log2_factor: Any = 0.0
    if qk_norm:
        inv_norm = load_with_layout(token_scalars_smem.at[INV_NORMS + which], ROWS)
        log2_factor = jnp.log2(inv_norm)
        inv_norm_k = load_with_layout(token_scalars_smem.at[INV_NORMS + K], COLS)
        scale = per_column(scale * inv_norm_k, CHUNK)
    decay = pair_decay(token_scalars_smem.at[LOG2_CUM], log2_factor)
    return below_diagonal(products * scale * decay)
