"""The stages of the Hopper kernels one by one, in the layouts of `jfla.stages`: for tests and benchmarks."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jfla.pallas import chunk
from jfla.pallas.arrays import kernel_arrays, to_kernel_state
from jfla.pallas.common.chunk_index import CHANNEL_BLOCK
from jfla.pallas.common.scan.spec import ScanConfig
from jfla.pallas.common.scan.steps import output_scan_kernel
from jfla.pallas.heuristics import Schedule, dims_of, schedule
from jfla.pallas.mgpu.overlap import run
from jfla.pallas.mgpu.smem import F32
from jfla.stages import QK, ChunkGrads, IntraChunk, ScanResults
from jfla.types import Inputs, Options


def intra(inputs: Inputs, options: Options, plan: Schedule | None = None) -> tuple[QK, IntraChunk]:
    """q and k as they meet the state, a_qk and a_inv of every chunk."""
    x = kernel_arrays(inputs, options)
    results = run(chunk.intra_kernel(x, inputs, options, _plan(inputs, options, plan)))
    return results.qk, results.intra


def output_scan(
    inputs: Inputs,
    options: Options,
    qk: QK,
    pairs: IntraChunk,
    plan: Schedule | None = None,
) -> tuple[Float[Array, "B T HV V"], Float[Array, "B HV K V"]]:
    """The output and the final state."""
    x = kernel_arrays(inputs, options)
    config = ScanConfig(_plan(inputs, options, plan).scan_v_block)
    scanned = run(output_scan_kernel(qk, pairs, x.v, x.initial, config, final_dtype=F32))
    return scanned.stores[0], scanned.last


def backward_scans(
    inputs: Inputs,
    options: Options,
    qk: QK,
    pairs: IntraChunk,
    do: Float[Array, "B T HV V"],
    d_final: Float[Array, "B HV K V"],
    plan: Schedule | None = None,
) -> tuple[ScanResults, Float[Array, "B HV K V"]]:
    """States, their cotangents, v_new and dv; and the cotangent of the initial state, which must be given."""
    x = kernel_arrays(inputs, options)
    plan = _plan(inputs, options, plan)
    scans, d_initial = chunk.both_scans(x, plan, qk, pairs, do, to_kernel_state(d_final))
    if d_initial is None:
        raise ValueError("initial_state must be given, got None")
    return scans, d_initial[:, :, 0].mT


def chunk_grads(
    inputs: Inputs,
    options: Options,
    scans: ScanResults,
    plan: Schedule | None = None,
) -> ChunkGrads:
    """The gradients of every chunk in float32, for q and k as the caller passed them.

    **Raises:** `ValueError` for K = 256 under qk_norm, where the kernels leave the norm's adjoint to the caller.
    """
    key_dim = inputs.q.shape[-1]
    if options.qk_norm and key_dim > CHANNEL_BLOCK:
        raise ValueError(f"K must be at most {CHANNEL_BLOCK} under qk_norm, got {key_dim}")
    x = kernel_arrays(inputs, options)
    plan = _plan(inputs, options, plan)
    without_a = run(chunk.intra_kernel(x, inputs, options, plan, with_a=False))
    grads = chunk.grads_kernel(x, inputs, options, plan, without_a, scans, out_dtype=F32)
    heads = inputs.v.shape[2]
    return ChunkGrads(
        dq=_over_v_blocks(grads.dq, heads),
        dk=_over_v_blocks(grads.dk, heads),
        dg=_to_tokens(grads.dg)[..., None] if options.op.scalar_gate else grads.dg,
        v_new_dot_dv=_to_tokens(grads.v_new_dot_dv),
    )


def _plan(inputs: Inputs, options: Options, plan: Schedule | None) -> Schedule:
    return schedule(options.op, dims_of(inputs, options)) if plan is None else plan


def _over_v_blocks(dx: jax.Array, heads: int) -> jax.Array:
    """[B, T, HV * v_blocks, K] to [B, T, HV, K]."""
    batch, time, _, key_dim = dx.shape
    return jnp.sum(dx.reshape(batch, time, heads, -1, key_dim), axis=3)


def _to_tokens(x: jax.Array) -> jax.Array:
    """[B, HV, N, C] to [B, T, HV]."""
    return x.reshape(*x.shape[:2], -1).swapaxes(1, 2)
