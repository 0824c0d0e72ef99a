"""THE dataflow of the kernels: forward and backward as lists of stage calls, and the one custom_vjp of this folder."""

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

from jfla._types import DeltaRuleOutput, Inputs, Options, State
from jfla._types import Value as Values
from jfla.gradients import chunk_gradients, operands
from jfla.pallas import _config
from jfla.pallas._arrays import (
    KernelArrays,
    at_least_smallest,
    gate_arrays,
    kernel_arrays,
    kernel_cotangent,
    token_chunks,
    token_decays,
)
from jfla.pallas._launch import interpreted
from jfla.pallas._operands import Operands, Pairs
from jfla.pallas._tile import F32
from jfla.pallas.prepare_gdn import TokenDecays, prepare_gdn
from jfla.pallas.prepare_kda import PrepareArrays, prepare_kda
from jfla.pallas.scan import adjoint_scan, output_scan, state_scan
from jfla.prepare import ChunkInputs, prepare_chunks


def prepare(
    x: KernelArrays, inputs: Inputs, options: Options, with_pairs: bool = True
) -> tuple[Operands, Pairs | None]:
    """Chunk by chunk: gate, norms, decayed dots, inverse. The one place where KDA and GDN part."""
    static = {"scale": options.scale, "qk_norm": options.qk_norm}
    key_dim = x.q.shape[-1]
    with jax.named_scope("jfla_prepare"):
        if x.g.shape[-1] == 1:
            decays = TokenDecays(*token_decays(x, inputs))
            return prepare_gdn(x.q, x.k, decays, config=_config.prepare_gdn_config(key_dim), **static)
        kind, rates, bias = gate_arrays(inputs)
        arrays = PrepareArrays(x.q, x.k, x.g, x.beta, rates, bias, x.resets)
        time = inputs.q.shape[1]
        return prepare_kda(
            arrays, time, kind=kind, config=_config.prepare_kda_config(key_dim), with_pairs=with_pairs, **static
        )


def forward(inputs: Inputs, options: Options) -> tuple[DeltaRuleOutput, Pairs]:
    x = kernel_arrays(inputs, options)
    carried, pairs = prepare(x, inputs, options)
    assert pairs is not None
    pairs = Pairs(*(checkpoint_name(a, name) for a, name in zip(pairs, ("jfla_a_qk", "jfla_inverse"))))
    batch, heads, _, value_dim, key_dim = x.initial.shape
    config = _config.scan_config(key_dim, value_dim, batch * heads)
    with jax.named_scope("jfla_output_scan"):
        output, final = output_scan(carried, pairs, x.v, x.initial, config)
    output = output[:, : inputs.v.shape[1]].astype(inputs.v.dtype)
    return DeltaRuleOutput(output, final[:, :, 0].mT if options.return_final_state else None), pairs


def backward(inputs: Inputs, options: Options, pairs: Pairs, d_output: Values, d_final: State | None) -> Inputs:
    """Both scans by kernels; the gradients inside the chunks, which need neither order nor neighbours, by XLA."""
    states, v_new, do, dends, dv, d_initial = scans(inputs, options, pairs, d_output, d_final)
    with jax.named_scope("jfla_chunk_gradients"):
        return gradients(inputs, options, states.mT, v_new, do, dends.mT, dv, d_initial[:, :, 0].mT)


def scans(
    inputs: Inputs, options: Options, pairs: Pairs, d_output: Values, d_final: State | None
) -> tuple[Array, Array, Array, Array, Array, Array]:
    """The states once more, their cotangents in reverse: S^T and v_new, do, dS^T, dv, dS^T before the first chunk."""
    x = kernel_arrays(inputs, options)
    do = kernel_cotangent(d_output, inputs)
    carried, _ = prepare(x, inputs, options, with_pairs=False)
    batch, heads, _, value_dim, key_dim = x.initial.shape
    config = _config.scan_config(key_dim, value_dim, batch * heads)
    d_last = jnp.zeros_like(x.initial) if d_final is None else d_final.mT[:, :, None]
    with jax.named_scope("jfla_state_scan"):
        states, v_new = state_scan(carried, pairs, x.v, x.initial, config)
    with jax.named_scope("jfla_adjoint_scan"):
        dends, dv, d_initial = adjoint_scan(carried, pairs, do, d_last, config)
    return states, v_new, do, dends, dv, d_initial


def gradients(
    inputs: Inputs,
    options: Options,
    states: Array,
    v_new: Array,
    do: Array,
    dends: Array,
    dv: Array,
    d_initial: Array,
) -> Inputs:
    """The cotangents of the caller's arrays from what the scans left."""

    def prepared(differentiable: Inputs) -> ChunkInputs:
        return prepare_chunks(differentiable._replace(segment_ids=inputs.segment_ids), options)

    x, prepare_adjoint = jax.vjp(prepared, inputs._replace(segment_ids=None))
    states, dends, v_new, do, dv = (y.astype(F32) for y in (states, dends, *map(token_chunks, (v_new, do, dv))))
    beta = at_least_smallest(x.beta)[..., None]
    d_a_qk = jnp.tril(do @ v_new.mT)
    dq, dk, dv, dg, dbeta = chunk_gradients(x, operands(x), states, v_new, do, d_a_qk, dends, dv / beta)
    # Under shard_map a kernel's result is not marked as varying over the mesh; what it is added to is.
    d_state = 0 * x.state + d_initial[:, None]
    return prepare_adjoint(ChunkInputs(dq, dk, dv, dg, dbeta, d_state, None))[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _chunked(inputs: Inputs, options: Options, interpret: bool) -> DeltaRuleOutput:
    return forward(inputs, options)[0]


def _chunked_fwd(inputs: Inputs, options: Options, interpret: bool):
    output, pairs = forward(inputs, options)
    return output, (inputs, pairs)


def _chunked_bwd(options: Options, interpret: bool, residuals: tuple[Inputs, Pairs], d: DeltaRuleOutput):
    # The backward may be traced outside the context that the forward was traced in.
    with interpreted(interpret), jax.default_matmul_precision("highest"):
        inputs, pairs = residuals
        return (backward(inputs, options, pairs, d.output, d.final_state),)


_chunked.defvjp(_chunked_fwd, _chunked_bwd)

# `interpret` is part of the key under which the compiled function is kept.
apply = jax.jit(_chunked, static_argnames=("options", "interpret"))
