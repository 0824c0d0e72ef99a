"""THE dataflow of the kernels: forward and backward as lists of stage calls, and the one custom_vjp of this folder."""

import functools
from typing import NamedTuple

import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

from jfla._types import DeltaRuleOutput, Inputs, Options, State
from jfla._types import Value as Values
from jfla.pallas import _config
from jfla.pallas._arrays import (
    KernelArrays,
    as_kept,
    by_chunk,
    cotangents,
    kernel_arrays,
    kernel_cotangent,
    key_arrays,
    key_options,
    log2_decays,
)
from jfla.pallas._ends import Ends, Gradients
from jfla.pallas._jobs import Promise, beside, run
from jfla.pallas._launch import interpreted
from jfla.pallas._operands import Operands, Pairs
from jfla.pallas._tile import BF16, F32
from jfla.pallas.gradients_gdn import gradients_gdn
from jfla.pallas.gradients_kda import gradients_kda
from jfla.pallas.prepare_gdn import prepare_gdn
from jfla.pallas.prepare_kda import prepare_kda
from jfla.pallas.scan import backward_scans, output_scan, split_ends, split_states


class Prepared(NamedTuple):
    """What the first kernel leaves: the pairs unless they are known; what GDN's gradients read of tokens."""

    operands: Operands
    pairs: Pairs | None
    known: Array | None


def prepare(
    x: KernelArrays, inputs: Inputs, options: Options, *, with_pairs: bool = True, programs: int | None = None
) -> Promise:
    """Prepared, chunk by chunk: gate, norms, decayed dots, inverse. The one place where KDA and GDN part."""
    key_dim, static = x.q.shape[-1], key_options(inputs, options)
    beta = (x.beta,) if with_pairs else ()
    programs = programs or _config.MULTIPROCESSORS
    if x.op == "gdn":
        tokens = by_chunk(log2_decays(x, inputs), *beta)
        promise = prepare_gdn(x.q, x.k, tokens, static, _config.prepare_gdn_config(key_dim, programs))
    else:
        tokens = by_chunk(*beta) if with_pairs else None
        promise = prepare_kda(key_arrays(x, inputs), tokens, x.v.shape[2], static, programs)
    return promise._replace(value=Prepared(*promise.value))


def forward(inputs: Inputs, options: Options) -> tuple[DeltaRuleOutput, Pairs]:
    x = kernel_arrays(inputs, options)
    batch, heads, n_chunks, value_dim, key_dim = x.dims
    last = options.return_final_state
    config, spare = _config.beside_config(x.op, key_dim, value_dim, batch * heads, n_chunks)
    if spare:
        with jax.named_scope("jfla_prepare_beside_output_scan"):
            preparing = prepare(x, inputs, options, programs=spare)
            scanning = output_scan(
                preparing.value.operands, preparing.value.pairs, x.v, x.initial, config, keeps_last=last
            )
            prepared, (output, final) = beside(preparing, scanning, (batch, heads, n_chunks))
    else:
        with jax.named_scope("jfla_prepare"):
            prepared = run(prepare(x, inputs, options))
        output, final = scan_alone(x, prepared.operands, prepared.pairs, keeps_last=last)
    pairs = Pairs(*(checkpoint_name(a, name) for a, name in zip(prepared.pairs, ("jfla_a_qk", "jfla_inverse"))))
    output = output[:, : inputs.v.shape[1]].astype(inputs.v.dtype)
    return DeltaRuleOutput(output, None if final is None else final[:, :, -1].mT), pairs


def scan_alone(x: KernelArrays, carried: Operands, pairs: Pairs, *, keeps_last: bool) -> tuple[Array, Array | None]:
    """The output and the last states; parts of time side by side where there are few sequences."""
    batch, heads, n_chunks, value_dim, key_dim = x.dims
    config = _config.scan_config(key_dim, value_dim, batch * heads)
    parts, initial = _config.scan_parts(key_dim, value_dim, batch * heads, n_chunks), x.initial
    if parts > 1:
        with jax.named_scope("jfla_split"):
            initial = split_states(carried, pairs, x.v, initial, config, parts)
    with jax.named_scope("jfla_output_scan"):
        return run(output_scan(carried, pairs, x.v, initial, config, keeps_last=keeps_last))


def backward(inputs: Inputs, options: Options, pairs: Pairs, d_output: Values, d_final: State | None) -> Inputs:
    """The two scans, then the gradients of every chunk, then what was elementwise."""
    x = kernel_arrays(inputs, options)
    with jax.named_scope("jfla_prepare"):
        prepared = run(prepare(x, inputs, options, with_pairs=False))
    do = kernel_cotangent(d_output, inputs)
    ends, d_initial = scans(x, prepared.operands, pairs, do, d_final)
    with jax.named_scope("jfla_chunk_gradients"):
        grads = chunk_gradients(x, inputs, options, prepared, ends)
    return cotangents(inputs, options, grads, ends.dv, d_initial)


def chunk_gradients(x: KernelArrays, inputs: Inputs, options: Options, prepared: Prepared, ends: Ends) -> Gradients:
    """The gradients of every chunk, which do not depend on each other."""
    static = key_options(inputs, options)
    out_dtype = BF16 if inputs.q.dtype == BF16 and inputs.q.shape[2] == inputs.v.shape[2] else F32
    if prepared.known is not None:
        return gradients_gdn(prepared.operands, prepared.known, ends, static, _config.MULTIPROCESSORS, out_dtype)
    return gradients_kda(key_arrays(x, inputs), ends, static, out_dtype)


def scans(
    x: KernelArrays, carried: Operands, pairs: Pairs, do: Array, d_final: State | None
) -> tuple[Ends, Array | None]:
    """The states once more, their cotangents in reverse; and dS^T before the first chunk, if a state was given."""
    batch, heads, n_chunks, value_dim, key_dim = x.dims
    config = _config.scan_config(key_dim, value_dim, batch * heads)
    both_ends = x.initial, as_kept(d_final)
    parts = _config.scan_parts(key_dim, value_dim, batch * heads, n_chunks)
    if parts > 1:
        with jax.named_scope("jfla_split"):
            both_ends = split_ends(carried, pairs, x.v, do, both_ends, config, parts)
    with jax.named_scope("jfla_backward_scans"):
        states, v_new, dends, dv, d_initial = backward_scans(
            carried, pairs, x.v, do, both_ends, config, keeps_first=x.initial is not None
        )
    return Ends(states, dends, v_new, do, dv), d_initial


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
