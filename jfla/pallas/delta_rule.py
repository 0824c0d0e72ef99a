"""THE dataflow of the kernels: forward and backward as lists of stage calls, and the one custom_vjp of this folder."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
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
from jfla.pallas._keys import KeyOptions
from jfla.pallas._launch import interpreted
from jfla.pallas._operands import Operands, Pairs, Stretch
from jfla.pallas._tile import BF16, F32
from jfla.pallas.gradients_gdn import gradients_gdn, over_parts, result_shapes
from jfla.pallas.gradients_kda import gradients_kda
from jfla.pallas.prepare_gdn import prepare_gdn
from jfla.pallas.prepare_kda import prepare_kda
from jfla.pallas.scan import Kept, backward_scans, output_scan, split_ends, split_states


class Prepared(NamedTuple):
    """What the first kernel leaves: the pairs unless they are known; what GDN's gradients read of tokens."""

    operands: Operands
    pairs: Pairs | None
    known: Array | None


def prepare(
    x: KernelArrays, inputs: Inputs, options: Options, *, with_pairs: bool = True, programs: int | None = None
) -> Promise:
    """Prepared, chunk by chunk: gate, norms, decayed dots, inverse. KDA and GDN part here and in chunk_gradients."""
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


class Residuals(NamedTuple):
    """What the forward leaves for the backward, beside the inputs. stops: states where stretches of time begin."""

    pairs: Pairs
    stops: Array | None  # [B, HV, stretches, V, K]


def forward(inputs: Inputs, options: Options, *, for_backward: bool = False) -> tuple[DeltaRuleOutput, Residuals]:
    x = kernel_arrays(inputs, options)
    batch, heads, n_chunks, value_dim, key_dim = x.dims
    # Where shard_map tracks what varies over its mesh, a kernel cannot be handed what it may write.
    in_place = for_backward and not jax.typeof(inputs.v).manual_axis_type.varying
    stretches = _config.stretches(x.op, key_dim, value_dim, batch * heads, n_chunks) if in_place else 0
    kept = Kept(options.return_final_state, stretches)
    config, spare = _config.beside_config(x.op, key_dim, value_dim, batch * heads, n_chunks)
    if spare:
        with jax.named_scope("jfla_prepare_beside_output_scan"):
            preparing = prepare(x, inputs, options, programs=spare)
            scanning = output_scan(preparing.value.operands, preparing.value.pairs, x.v, x.initial, config, kept)
            prepared, (output, stops, final) = beside(preparing, scanning, (batch, heads, n_chunks))
    else:
        with jax.named_scope("jfla_prepare"):
            prepared = run(prepare(x, inputs, options))
        output, stops, final = scan_alone(x, prepared.operands, prepared.pairs, kept)
    pairs = Pairs(*(checkpoint_name(a, name) for a, name in zip(prepared.pairs, ("jfla_a_qk", "jfla_inverse"))))
    output = output[:, : inputs.v.shape[1]].astype(inputs.v.dtype)
    stops = None if stops is None else checkpoint_name(stops, "jfla_states")
    return DeltaRuleOutput(output, final), Residuals(pairs, stops)


def scan_alone(
    x: KernelArrays, carried: Operands, pairs: Pairs, kept: Kept
) -> tuple[Array, Array | None, Array | None]:
    """The output, states at stops and the last ones; parts of time side by side where there are few sequences."""
    batch, heads, n_chunks, value_dim, key_dim = x.dims
    config = _config.scan_config(key_dim, value_dim, batch * heads)
    parts, initial = _config.scan_parts(key_dim, value_dim, batch * heads, n_chunks), x.initial
    if parts > 1:
        with jax.named_scope("jfla_split"):
            initial = split_states(carried, pairs, x.v, initial, config, parts)
    with jax.named_scope("jfla_output_scan"):
        return run(output_scan(carried, pairs, x.v, initial, config, kept))


def backward(inputs: Inputs, options: Options, left: Residuals, d_output: Values, d_final: State | None) -> Inputs:
    """The two scans, then the gradients of every chunk, then what was elementwise."""
    x = kernel_arrays(inputs, options)
    with jax.named_scope("jfla_prepare"):
        prepared = run(prepare(x, inputs, options, with_pairs=False))
    do = kernel_cotangent(d_output, inputs)
    if left.stops is not None and prepared.known is not None:
        stretches = functools.partial(in_stretches, options=key_options(inputs, options), dtype=query_dtype(inputs))
        grads, dv, d_initial = jax.custom_batching.sequential_vmap(stretches)(
            x, prepared.operands, prepared.known, left.pairs, left.stops, do, as_kept(d_final)
        )
        return cotangents(inputs, options, grads, dv, d_initial)
    ends, d_initial = scans(x, prepared.operands, left.pairs, do, d_final)
    with jax.named_scope("jfla_chunk_gradients"):
        grads = chunk_gradients(x, inputs, options, prepared, ends)
    return cotangents(inputs, options, grads, ends.dv, d_initial)


def query_dtype(inputs: Inputs) -> Any:
    """Of dq and dk as the gradients leave them: float32 where heads are left to sum."""
    return BF16 if inputs.q.dtype == BF16 and inputs.q.shape[2] == inputs.v.shape[2] else F32


def chunk_gradients(x: KernelArrays, inputs: Inputs, options: Options, prepared: Prepared, ends: Ends) -> Gradients:
    """The gradients of every chunk, which do not depend on each other. Here KDA and GDN part again."""
    static = key_options(inputs, options)
    if prepared.known is None:
        return gradients_kda(key_arrays(x, inputs), ends, static, query_dtype(inputs))
    programs = _config.MULTIPROCESSORS
    return over_parts(gradients_gdn(prepared.operands, prepared.known, ends, static, programs, query_dtype(inputs)))


def in_stretches(
    x: KernelArrays, op: Operands, known: Array, pairs: Pairs, stops: Array, do: Array, d_last: Array | None,
    *, options: KeyOptions, dtype: Any,
) -> tuple[Gradients, Array, Array | None]:  # fmt: skip
    """Scans and gradients of GDN, stretch of time by stretch from the last: states of one only are ever in memory."""
    batch, heads, n_chunks, value_dim, key_dim = x.dims
    count, config = stops.shape[2], _config.scan_config(key_dim, value_dim, batch * heads)
    programs = _config.MULTIPROCESSORS

    def fill(refs: Any) -> None:
        grads, dv, d_state = refs

        def stretch(i: Array, nothing: None) -> None:
            later = jnp.reshape(i, 1)
            with jax.named_scope("jfla_backward_scans"):
                states, v_new, dends, *_ = backward_scans(
                    op, pairs, x.v, do, (stops, d_state), config, keeps_first=True, stretch=Stretch(later, dv)
                )
            with jax.named_scope("jfla_chunk_gradients"):
                ends = Ends(states, dends, v_new, do, dv)
                gradients_gdn(op, known, ends, options, programs, dtype, Stretch(later, grads))

        lax.fori_loop(0, count, stretch, None)

    unwritten = lambda shape: lax.empty(shape.shape, shape.dtype)
    shapes = result_shapes((batch, x.v.shape[1], heads, key_dim), n_chunks, options, dtype)
    d_last = jnp.zeros((batch, heads, 1, value_dim, key_dim), F32) if d_last is None else d_last
    grads, dv, d_first = pl.run_state(fill)(
        (jax.tree.map(unwritten, shapes), unwritten(jax.ShapeDtypeStruct(x.v.shape, BF16)), d_last)
    )
    return over_parts(grads), dv, None if x.initial is None else d_first


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
    output, left = forward(inputs, options, for_backward=True)
    return output, (inputs, left)


def _chunked_bwd(options: Options, interpret: bool, residuals: tuple[Inputs, Residuals], d: DeltaRuleOutput):
    # The backward may be traced outside the context that the forward was traced in.
    with interpreted(interpret), jax.default_matmul_precision("highest"):
        inputs, left = residuals
        return (backward(inputs, options, left, d.output, d.final_state),)


_chunked.defvjp(_chunked_fwd, _chunked_bwd)

# `interpret` is part of the key under which the compiled function is kept.
apply = jax.jit(_chunked, static_argnames=("options", "interpret"))
