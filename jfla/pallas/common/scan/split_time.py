"""The states where the splits of a long sequence begin, so that all splits can be scanned side by side.

By `jfla.affine`: over a split the state goes through S -> R S + C. One launch finds R and C of every split, with scans
that store nothing but their last state; the chain of maps is a few small matmuls of XLA. The map of all splits is that
of a device's stretch, where time is split over devices as well.
"""

import jax
import jax.numpy as jnp

from jfla import affine
from jfla.pallas.common.scan.pipeline import scan_kernel
from jfla.pallas.common.scan.spec import ScanConfig
from jfla.pallas.common.scan.steps import split_adjoint_spec, split_map_specs
from jfla.pallas.mgpu.overlap import run
from jfla.pallas.mgpu.smem import F32
from jfla.pallas.mgpu.types import Gmem
from jfla.parallel.stretch import Entered, Stretch
from jfla.parallel.varying import vary_with
from jfla.stages import QK, IntraChunk


def split_states(
    qk: QK,
    intra: IntraChunk,
    v: jax.Array,
    initial: Gmem,
    config: ScanConfig,
    time_splits: int,
    stretch: Stretch | None = None,
) -> tuple[jax.Array, Entered | None, jax.Array]:
    """S^T [B, HV, splits, V, K] where every split begins, from that before time [B, HV, 1, V, K] or None; and R.

    Of a `stretch` it is not the caller's state that is before time, but what devices hand over.
    """
    r, c = _maps(qk, intra, v, config, time_splits)
    first = _first(initial)
    entered = None
    if stretch is not None:
        entered = _enter(stretch, first, r, c)
        first = entered.states[:, 0]
    return affine.chain(first, r, c).mT, entered, r


def _enter(
    stretch: Stretch, first: jax.Array | None, r: jax.Array, c: jax.Array
) -> Entered:
    """The state that the devices before hand over, by the map of this device's splits."""
    identity = jnp.broadcast_to(jnp.eye(r.shape[-1], dtype=F32), r[:, :, 0].shape)

    def state_map(states: jax.Array) -> tuple[jax.Array, jax.Array]:
        whole = affine.through(identity, r, jnp.zeros_like(r))
        return whole, affine.through(states[:, 0], r, c)

    states = jnp.zeros_like(c[:, :, 0]) if first is None else first
    return stretch.enter(states[:, None], state_map)


def split_ends(
    qk: QK,
    intra: IntraChunk,
    v: jax.Array,
    do: jax.Array,
    ends: tuple[Gmem, Gmem],
    config: ScanConfig,
    time_splits: int,
    entered: Entered | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`split_states`, and dS^T where every split ends, from that after time.

    With `entered` time goes on elsewhere: before the initial state, and after d_final.
    """
    initial, d_final = ends
    d = _adjoints(qk, intra, do, config, time_splits)
    r, c = _maps(qk, intra, v, config, time_splits)
    states = affine.chain(_first(initial), r, c)
    d_last = _first(d_final)
    if entered is not None:
        d_last = _leave(entered, d_last, r, d)
    dstates = affine.chain(d_last, r.mT, d, reverse=True)
    return states.mT, dstates.mT


def stretch_end(
    qk: QK,
    intra: IntraChunk,
    do: jax.Array,
    d_final: Gmem,
    config: ScanConfig,
    entered: Entered,
    split_r: jax.Array,
) -> jax.Array:
    """dS^T [B, HV, 1, V, K] after a device's stretch: `d_final`, and what the devices behind it send."""
    d = _adjoints(qk, intra, do, config, split_r.shape[2])
    return _leave(entered, _first(d_final), split_r, d).mT[:, :, None]


def _leave(entered: Entered, d_final: Gmem, r: jax.Array, d: jax.Array) -> jax.Array:
    """dS after a device's stretch, from the maps of its splits."""

    def at_start(d_final: jax.Array) -> jax.Array:
        return affine.through(d_final[:, 0], r.mT, d, reverse=True)[:, None]

    d_final = jnp.zeros_like(d[:, :, 0]) if d_final is None else d_final
    return entered.stretch.leave(d_final[:, None], entered.r, at_start)[:, 0]


def _first(state: Gmem) -> jax.Array | None:
    """[B, HV, K, V] of [B, HV, 1, V, K]."""
    return None if state is None else state[:, :, 0].mT


def _adjoints(
    qk: QK,
    intra: IntraChunk,
    do: jax.Array,
    config: ScanConfig,
    time_splits: int,
) -> jax.Array:
    """D [B, HV, splits, K, V] of every split: the cotangent that its own outputs send to its start."""
    adjoint = split_adjoint_spec(qk, intra, do, time_splits)
    (outputs,) = run(scan_kernel((adjoint,), config, "jfla_split_adjoints"))
    return vary_with(outputs.last.mT, do)


def _maps(
    qk: QK,
    intra: IntraChunk,
    v: jax.Array,
    config: ScanConfig,
    time_splits: int,
) -> tuple[jax.Array, jax.Array]:
    """R [B, HV, splits, K, K] and C [B, HV, splits, K, V] of every split.

    The identity is a state like any other: columns that it or the values lack are zeros.
    """
    batch, _, heads, value_dim = v.shape
    key_dim = qk.key_dim
    columns = max(key_dim, value_dim)
    v = jnp.pad(v, ((0, 0), (0, 0), (0, 0), (0, columns - value_dim)))
    shape = (batch, heads, time_splits, columns, key_dim)
    identity = jnp.broadcast_to(jnp.eye(columns, key_dim, dtype=F32), shape)
    specs = split_map_specs(qk, intra, v, identity, time_splits)
    linear, constant = run(scan_kernel(specs, config, "jfla_split_states"))
    maps = linear.last[..., :key_dim, :].mT, constant.last[..., :value_dim, :].mT
    return vary_with(maps, v)
