"""The caller's arrays as the kernels read them: whole chunks, bf16, packing as decay resets; and the way back."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jfla._types import CHUNK, Inputs, Options, State
from jfla.gates import Gate, l2norm, log_decay, write_strength
from jfla.packing import starts
from jfla.pallas._ends import PART, Gradients
from jfla.pallas._gate import LOG2E, STRONGEST, gate_kind, reset_rows, split_gate
from jfla.pallas._keys import KeyArrays, KeyOptions
from jfla.pallas._tile import BF16, F32
from jfla.prepare import without_padding

# A write strength of 0 becomes this, so that its gradient can be read off what was written: 1.5e-8 is nothing, and its
# root, which scales rows and columns of the float16 inverse, is in float16's range.
_SMALLEST_BETA = 2.0**-26


class KernelArrays(NamedTuple):
    """T is a multiple of the chunk. What is 0 in the tail and in padding writes nothing and decays nothing."""

    q: Float[Array, "B T H K"]
    k: Float[Array, "B T H K"]
    v: Float[Array, "B T HV V"]
    g: Float[Array, "B T HV G"]
    beta: Float[Array, "B T HV"]
    initial: Float[Array, "B HV 1 V K"] | None
    resets: Float[Array, "B T"] | None

    @property
    def op(self) -> str:
        return "gdn" if self.g.shape[-1] == 1 else "kda"

    @property
    def dims(self) -> tuple[int, int, int, int, int]:
        """B, HV, N, V and K."""
        batch, time, heads, value_dim = self.v.shape
        return batch, heads, time // CHUNK, value_dim, self.q.shape[-1]


def kernel_arrays(inputs: Inputs, options: Options) -> KernelArrays:
    """Pads and masks; a pass over memory only where T is no multiple of 64 or sequences are packed."""
    tail = -inputs.q.shape[1] % CHUNK
    keep = None if inputs.segment_ids is None else inputs.segment_ids > 0

    def whole(x: Array, dtype: Any) -> Array:
        x = x.astype(dtype)
        if keep is not None:
            x = jnp.where(_match(keep, x), x, 0)
        return jnp.pad(x, ((0, 0), (0, tail)) + ((0, 0),) * (x.ndim - 2)) if tail else x

    beta = write_strength(inputs.beta, options.beta_max).astype(F32)
    beta = at_least_smallest(beta)
    resets = None
    if inputs.segment_ids is not None:
        rows = reset_rows(inputs.segment_ids, starts(inputs.segment_ids))
        resets = jnp.pad(rows, ((0, 0), (0, tail)), constant_values=1.0)
    q, k, v = (whole(x, BF16) for x in (inputs.q, inputs.k, inputs.v))
    g = whole(inputs.g, inputs.g.dtype if inputs.g.dtype in (BF16, F32) else F32)
    return KernelArrays(q, k, v, g, whole(beta, F32), as_kept(inputs.initial_state), resets)


def as_kept(state: State | None) -> Float[Array, "B HV 1 V K"] | None:
    """As the scans keep a state."""
    return None if state is None else state.mT[:, :, None]


def kernel_cotangent(do: Float[Array, "B T HV V"], inputs: Inputs) -> Float[Array, "B T_whole HV V"]:
    """The cotangent of the output like v: whole chunks, bf16, 0 on padding."""
    do = do.astype(BF16)
    if inputs.segment_ids is not None:
        do = jnp.where(_match(inputs.segment_ids > 0, do), do, 0)
    return jnp.pad(do, ((0, 0), (0, -do.shape[1] % CHUNK), (0, 0), (0, 0)))


def at_least_smallest(beta: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    return jnp.where(jnp.abs(beta) < _SMALLEST_BETA, _SMALLEST_BETA, beta)


def _match(keep: Bool[Array, "B T"], x: Array) -> Array:
    return keep.reshape(keep.shape + (1,) * (x.ndim - 2))


def by_chunk(*x: Float[Array, "B T HV"]) -> Float[Array, "B HV N S C"]:
    """S numbers of every token: too few bytes for the kernels to read them as the caller laid them.

    Two arrays would be two transposes of XLA, a kernel each.
    """
    rows = [a.reshape(a.shape[0], -1, CHUNK, a.shape[2]) for a in x]
    return jnp.moveaxis(jnp.stack(rows, axis=2), -1, 1)


def log2_decays(x: KernelArrays, inputs: Inputs) -> Float[Array, "B T HV"]:
    """GDN: log2 decay of every token."""
    time = inputs.q.shape[1]
    g = jnp.maximum(log_decay(x.g, inputs.gate)[..., 0].astype(F32) * LOG2E, STRONGEST)
    g = jnp.where(jnp.arange(g.shape[1])[None, :, None] < time, g, 0.0)
    if x.resets is not None:
        resets = x.resets[:, :, None]
        g = jnp.where(resets > 0, 0.0, jnp.maximum(g + resets, STRONGEST))
    return g


def key_arrays(x: KernelArrays, inputs: Inputs) -> KeyArrays:
    rates, bias = split_gate(inputs.gate, inputs.v.shape[2], inputs.g.shape[-1])
    return KeyArrays(x.q, x.k, x.g, rates, bias, x.resets)


def key_options(inputs: Inputs, options: Options) -> KeyOptions:
    return KeyOptions(options.scale, options.qk_norm, inputs.q.shape[1], gate_kind(inputs.gate))


def cotangents(inputs: Inputs, options: Options, grads: Gradients, dv: Array, d_initial: Array | None) -> Inputs:
    """From what the kernels leave, per value head and in whole chunks, to the cotangents of the caller's arrays."""
    batch, time, heads, key_dim = inputs.q.shape
    differentiable = (inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta)
    # Under shard_map a kernel's result is not marked as varying over the mesh; what it is chosen with is.
    varying = jnp.stack([jnp.ravel(x)[0].astype(F32) for x in differentiable]).sum()
    marked = lambda x: jnp.where(True, x, varying.astype(x.dtype))
    tokens = lambda x: without_padding(marked(x[:, :time]), inputs.segment_ids)
    by_token = lambda x: tokens(x.reshape(*x.shape[:2], -1).swapaxes(1, 2))

    def to_queries(dx: Array, x: Array) -> Array:
        """Sums over the value heads of a group, and parts of V, in float32; then of x as the caller passed it."""
        dx = tokens(dx)
        if dx.shape[2] != heads:
            dx = jnp.sum(dx.reshape(batch, time, heads, -1, key_dim), axis=3)
        if options.qk_norm and key_dim > PART:
            (dx,) = jax.vjp(lambda x: l2norm(without_padding(x, inputs.segment_ids)), x)[1](dx)
        return dx.astype(inputs.q.dtype)

    def elementwise(g: Array, gate: Gate | None, beta: Array) -> tuple[Array, Array]:
        g, beta = without_padding(g, inputs.segment_ids), without_padding(beta, inputs.segment_ids)
        return log_decay(g, gate), write_strength(beta, options.beta_max)

    (_, beta), adjoint = jax.vjp(elementwise, inputs.g, inputs.gate, inputs.beta)
    dbeta = by_token(grads.written) / at_least_smallest(beta) ** 2
    dg = tokens(grads.dg) if inputs.g.shape[-1] == key_dim else by_token(grads.dg)[..., None]
    dg, dgate, dbeta = adjoint((dg, dbeta))
    d_state = None if d_initial is None else marked(d_initial[:, :, 0].mT)
    dv = tokens(dv).astype(inputs.v.dtype)
    return Inputs(to_queries(grads.dq, inputs.q), to_queries(grads.dk, inputs.k), dv, dg, dbeta, dgate, d_state, None)
