"""The states where the splits of a long sequence begin, so that all splits can be scanned side by side.

By `jfla.affine`: over a split the state goes through S -> R S + C. One launch finds R and C of every split, with scans
that store nothing but their last state; the chain of maps is a few small matmuls of XLA.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jfla import affine
from jfla.pallas.mgpu.overlap import run
from jfla.pallas.mgpu.smem import F32
from jfla.pallas.sm90.scan.pipeline import scan_kernel
from jfla.pallas.sm90.scan.spec import ScanConfig
from jfla.pallas.sm90.scan.steps import split_adjoint_spec, split_map_specs
from jfla.stages import QK, IntraChunk


def split_states(
    qk: QK,
    intra: IntraChunk,
    v: jax.Array,
    initial: Any,
    config: ScanConfig,
    time_splits: int,
) -> jax.Array:
    """S^T [B, HV, splits, V, K] where every split begins, from that before time [B, HV, 1, V, K] or None."""
    r, c = _maps(qk, intra, v, config, time_splits)
    return affine.chain(_first(initial), r, c).mT


def split_ends(
    qk: QK,
    intra: IntraChunk,
    v: jax.Array,
    do: jax.Array,
    ends: tuple[Any, Any],
    config: ScanConfig,
    time_splits: int,
) -> tuple[jax.Array, jax.Array]:
    """`split_states`, and dS^T where every split ends, from that after time."""
    initial, d_final = ends
    adjoint = split_adjoint_spec(qk, intra, do, time_splits)
    (outputs,) = run(scan_kernel((adjoint,), config, "jfla_split_adjoints"))
    d = outputs.last.mT
    r, c = _maps(qk, intra, v, config, time_splits)
    states = affine.chain(_first(initial), r, c)
    dstates = affine.chain(_first(d_final), r.mT, d, reverse=True)
    return states.mT, dstates.mT


def _first(state: Any) -> jax.Array | None:
    """[B, HV, K, V] of [B, HV, 1, V, K]."""
    return None if state is None else state[:, :, 0].mT


def _maps(
    qk: QK,
    intra: IntraChunk,
    v: jax.Array,
    config: ScanConfig,
    time_splits: int,
) -> tuple[jax.Array, jax.Array]:
    """R [B, HV, splits, K, K] and C [B, HV, splits, K, V] of every split (V = K, because the identity is a state)."""
    batch, _, heads, dim = v.shape
    identity = jnp.broadcast_to(jnp.eye(dim, dtype=F32), (batch, heads, time_splits, dim, dim))
    specs = split_map_specs(qk, intra, v, identity, time_splits)
    linear, constant = run(scan_kernel(specs, config, "jfla_split_states"))
    return linear.last.mT, constant.last.mT
