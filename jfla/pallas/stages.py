"""The stages of the kernels one by one, in the layouts of `jfla.stages`: for tests and benchmarks.

A `Schedule` says which machine's kernels; without one they are Hopper's.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jfla.gates import l2norm
from jfla.pallas import chunk
from jfla.pallas.arrays import kernel_arrays, leaves_norm, to_kernel_state
from jfla.pallas.common.scan.spec import ScanConfig
from jfla.pallas.common.scan.steps import output_scan_kernel
from jfla.pallas.dims import dims_of
from jfla.pallas.heuristics import Schedule, schedule
from jfla.pallas.machine import tracing_for
from jfla.pallas.mgpu.overlap import run
from jfla.pallas.mgpu.smem import F32
from jfla.stages import QK, ChunkGrads, IntraChunk, ScanResults
from jfla.types import Inputs, Options


def intra(
    inputs: Inputs, options: Options, plan: Schedule | None = None
) -> tuple[QK, IntraChunk]:
    """q and k as they meet the state, a_qk and a_inv of every chunk."""
    plan = _plan(inputs, options, plan)
    with tracing_for(plan.machine):
        x = kernel_arrays(inputs, options)
        results = run(chunk.intra_kernel(x, inputs, options, plan))
    return results.qk, results.intra


def output_scan(
    inputs: Inputs,
    options: Options,
    qk: QK,
    pairs: IntraChunk,
    plan: Schedule | None = None,
) -> tuple[Float[Array, "B T HV V"], Float[Array, "B HV K V"]]:
    """The output and the final state."""
    plan = _plan(inputs, options, plan)
    with tracing_for(plan.machine):
        x = kernel_arrays(inputs, options)
        config = ScanConfig.of(plan, plan.scan_v_block)
        scanned = run(
            output_scan_kernel(qk, pairs, x.v, x.initial, config, final_dtype=F32)
        )
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
    plan = _plan(inputs, options, plan)
    with tracing_for(plan.machine):
        x = kernel_arrays(inputs, options)
        scans, d_initial = chunk.both_scans(
            x, plan, qk, pairs, do, to_kernel_state(d_final)
        )
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

    Where the kernels leave the adjoint of the norm to their caller, it is made here.
    """
    plan = _plan(inputs, options, plan)
    with tracing_for(plan.machine):
        x = kernel_arrays(inputs, options)
        results = run(chunk.intra_kernel(x, inputs, options, plan, with_a=False))
        grads = chunk.grads_kernel(
            x, inputs, options, plan, results, scans, out_dtype=F32
        )
        norm_is_left = leaves_norm(inputs, options)
    dq = grads.dq
    dk = grads.dk
    if norm_is_left:
        dq = _through_norm(inputs.q, dq)
        dk = _through_norm(inputs.k, dk)
    return ChunkGrads(
        dq=dq,
        dk=dk,
        dg=_to_tokens(grads.dg)[..., None] if options.op.scalar_gate else grads.dg,
        v_new_dot_dv=_to_tokens(grads.v_new_dot_dv),
    )


def _plan(inputs: Inputs, options: Options, plan: Schedule | None) -> Schedule:
    return schedule(options.op, dims_of(inputs, options)) if plan is None else plan


def _through_norm(x: jax.Array, dx: jax.Array) -> jax.Array:
    """dx [B, T_whole, HV, K] after the norm of x [B, T, H, K] to before it, for every value head."""
    _, time, heads, _ = x.shape
    x = jnp.repeat(x.astype(F32), dx.shape[2] // heads, axis=2)
    x = jnp.pad(x, ((0, 0), (0, dx.shape[1] - time), (0, 0), (0, 0)))
    return jax.vjp(l2norm, x)[1](dx)[0]


def _to_tokens(x: jax.Array) -> jax.Array:
    """[B, HV, N, C] to [B, T, HV]."""
    return x.reshape(*x.shape[:2], -1).swapaxes(1, 2)
