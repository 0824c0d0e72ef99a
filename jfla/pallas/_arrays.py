"""The caller's arrays as the kernels read them: whole chunks, bf16, packing as decay resets; and the way back."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jfla._types import CHUNK, Inputs, Options
from jfla.gates import log_decay, write_strength
from jfla.packing import starts
from jfla.pallas._gate import LOG2E, STRONGEST, GateKind, reset_rows, split_gate
from jfla.pallas._tile import BF16, F32

# A write strength of 0 becomes this, so that its gradient can be read off what was written; 1e-12 is nothing.
_SMALLEST_BETA = 2.0**-40


class KernelArrays(NamedTuple):
    """T is a multiple of the chunk. What is 0 in the tail and in padding writes nothing and decays nothing."""

    q: Float[Array, "B T H K"]
    k: Float[Array, "B T H K"]
    v: Float[Array, "B T HV V"]
    g: Float[Array, "B T HV G"]
    beta: Float[Array, "B HV T"]
    initial: Float[Array, "B HV 1 V K"]
    resets: Float[Array, "B T"] | None


def kernel_arrays(inputs: Inputs, options: Options) -> KernelArrays:
    """Pads and masks; a pass over memory only where T is no multiple of 64 or sequences are packed."""
    batch, time, _, key_dim = inputs.q.shape
    value_heads, value_dim = inputs.v.shape[2:]
    tail = -time % CHUNK
    keep = None if inputs.segment_ids is None else inputs.segment_ids > 0

    def whole(x: Array, dtype: Any) -> Array:
        x = x.astype(dtype)
        if keep is not None:
            x = jnp.where(_match(keep, x), x, 0)
        return jnp.pad(x, ((0, 0), (0, tail)) + ((0, 0),) * (x.ndim - 2)) if tail else x

    beta = write_strength(inputs.beta, options.beta_max).astype(F32)
    beta = at_least_smallest(beta)
    state = inputs.initial_state
    if state is None:
        state = jnp.zeros((batch, value_heads, key_dim, value_dim), F32)
    resets = None
    if inputs.segment_ids is not None:
        rows = reset_rows(inputs.segment_ids, starts(inputs.segment_ids))
        resets = jnp.pad(rows, ((0, 0), (0, tail)), constant_values=1.0)
    q, k, v = (whole(x, BF16) for x in (inputs.q, inputs.k, inputs.v))
    g = whole(inputs.g, inputs.g.dtype if inputs.g.dtype in (BF16, F32) else F32)
    return KernelArrays(q, k, v, g, whole(beta, F32).swapaxes(1, 2), state.mT[:, :, None], resets)


def kernel_cotangent(do: Float[Array, "B T HV V"], inputs: Inputs) -> Float[Array, "B T_whole HV V"]:
    """The cotangent of the output like v: whole chunks, bf16, 0 on padding."""
    do = do.astype(BF16)
    if inputs.segment_ids is not None:
        do = jnp.where(_match(inputs.segment_ids > 0, do), do, 0)
    return jnp.pad(do, ((0, 0), (0, -do.shape[1] % CHUNK), (0, 0), (0, 0)))


def at_least_smallest(beta: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    return jnp.where(jnp.abs(beta) < _SMALLEST_BETA, _SMALLEST_BETA, beta)


def token_chunks(x: Float[Array, "B T HV D"]) -> Float[Array, "B HV N C D"]:
    batch, time, heads, dim = x.shape
    return jnp.moveaxis(x.reshape(batch, time // CHUNK, CHUNK, heads, dim), 3, 1)


def _match(keep: Bool[Array, "B T"], x: Array) -> Array:
    return keep.reshape(keep.shape + (1,) * (x.ndim - 2))


def token_decays(x: KernelArrays, inputs: Inputs) -> tuple[Float[Array, "B HV N C"], Float[Array, "B HV N C"]]:
    """GDN: the running sum of log2 decay in every chunk, and beta: too few bytes for a kernel of their own."""
    time = inputs.q.shape[1]
    g = jnp.maximum(log_decay(x.g, inputs.gate)[..., 0].astype(F32) * LOG2E, STRONGEST)
    g = jnp.where(jnp.arange(g.shape[1])[None, :, None] < time, g, 0.0)
    if x.resets is not None:
        resets = x.resets[:, :, None]
        g = jnp.where(resets > 0, 0.0, jnp.maximum(g + resets, STRONGEST))
    chunks = lambda y: y.reshape(*y.shape[:2], -1, CHUNK)
    return jnp.cumsum(chunks(g.swapaxes(1, 2)), axis=-1), chunks(x.beta)


def gate_arrays(inputs: Inputs) -> tuple[GateKind, jax.Array, jax.Array]:
    return split_gate(inputs.gate, inputs.v.shape[2], inputs.g.shape[-1])
