"""What a call of the decode kernel is made of: operands, results, shared memory, blocks of states.

`Inputs`, `Options` and the columns of a CTA -> `DecodeSpec`, `DecodeOperands`, `DecodeOutputs`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array

from jfla.pallas.common.gate import GateKind
from jfla.pallas.mgpu.smem import F32
from jfla.pallas.mgpu.types import Gmem, Index, MemorySpec, Smem
from jfla.pool import named_slots
from jfla.types import Inputs, Options


class DecodeOperands(NamedTuple):
    """In global memory: the inputs as the caller passed them."""

    q: Gmem  # [B, T, H, K]
    k: Gmem
    v: Gmem  # [B, T, HV, V]
    g: Gmem  # [B, T, HV, G]: raw gate input, or natural-log decay
    beta: Gmem  # [B, T, HV]
    a_log: Gmem  # [HV] float32, or None
    dt_bias: Gmem  # [HV, G] float32, or None
    state: Gmem  # [B, HV, K, V], [P, HV, K, V] with `slots`, or None; a reference where it is to be overwritten
    # [B, T] int32, or None: 1 on a row's tokens, 0 on the padding behind them
    segment_ids: Gmem
    # [B] int32, or None: the states of the pool that the rows read and write
    slots: Gmem


class DecodeOutputs(NamedTuple):
    """In global memory. `states` is None where none is wanted or the initial one is overwritten."""

    output: Gmem  # [B, T, HV, V]
    states: Gmem  # [B, HV, K, V], or [B, T, HV, K, V] with `return_states`


class SharedStorage(NamedTuple):
    """[T, ...] float32, v as it came: what the recurrence reads, token by token."""

    q: Smem  # [T, K], normalized and scaled
    k: Smem  # [T, K], normalized
    v: Smem  # [T, v_block]
    decay: Smem  # [T, K]
    beta: Smem  # [T, K], K times the same number: a scalar alone cannot be stored


class StateBlock(NamedTuple):
    """The part of a state that one CTA holds: columns of V of one value head of one sequence."""

    batch: Index
    state: Index  # the row's own, or its slot in a pool
    value_head: Index
    head: Index  # of q and k
    columns: Index

    def of_state(self, state_gmem: Gmem) -> Gmem:
        """Its part [K, v_block] of [B, HV, K, V] or of a pool."""
        return state_gmem.at[self.state, self.value_head, :, self.columns]

    def of_state_after(self, t: Index, states_gmem: Gmem) -> Gmem:
        """Its part [K, v_block] of [B, T, HV, K, V], after token t."""
        return states_gmem.at[self.batch, t, self.value_head, :, self.columns]

    def of_values(self, ref_gmem: Gmem) -> Gmem:
        """Its part [T, v_block] of [B, T, HV, V]."""
        return ref_gmem.at[self.batch, :, self.value_head, self.columns]


class DecodeSpec(NamedTuple):
    """The static part of a call."""

    batch: int
    time: int
    heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    v_block: int
    gate: GateKind
    options: Options
    num_states: int  # B, or the slots of a pool
    initial_dtype: DTypeLike  # float32 or bfloat16
    v_dtype: DTypeLike

    @property
    def v_blocks(self) -> int:
        return self.value_dim // self.v_block

    @property
    def final_dtype(self) -> DTypeLike:
        return jnp.dtype(self.options.state_dtype or F32)

    @property
    def column_bytes(self) -> int:
        """Of the widest number of a column in global memory: of v, the output, and the state as it comes and goes."""
        dtypes = (self.v_dtype, self.initial_dtype, self.final_dtype)
        return max(jnp.dtype(dtype).itemsize for dtype in dtypes)

    @property
    def num_ctas(self) -> int:
        return self.batch * self.value_heads * self.v_blocks

    @property
    def block_shape(self) -> tuple[int, int]:
        """Of the part of a state that one CTA holds."""
        return (self.key_dim, self.v_block)

    @property
    def token_keys_shape(self) -> tuple[int, int]:
        """Of what every token has for every key channel."""
        return (self.time, self.key_dim)

    @property
    def scalar_gate(self) -> bool:
        return self.options.op.scalar_gate

    def state_block(self, cta: Index) -> StateBlock:
        """Blocks of V are fastest, then heads: CTAs that run together use neighbouring memory."""
        v_blocks = jnp.int32(self.v_blocks)
        state = lax.div(cta, v_blocks)
        value_heads = jnp.int32(self.value_heads)
        value_head = lax.rem(state, value_heads)
        head = lax.div(value_head, jnp.int32(self.value_heads // self.heads))
        start = pl.multiple_of(lax.rem(cta, v_blocks) * self.v_block, self.v_block)
        batch = lax.div(state, value_heads)
        return StateBlock(batch, batch, value_head, head, pl.ds(start, self.v_block))

    def smem(self) -> SharedStorage:
        keys: MemorySpec = plgpu.SMEM(self.token_keys_shape, F32)
        values: MemorySpec = plgpu.SMEM((self.time, self.v_block), self.v_dtype)
        return SharedStorage(q=keys, k=keys, v=values, decay=keys, beta=keys)


def decode_operands(inputs: Inputs, options: Options, state: Gmem) -> DecodeOperands:
    """On the host: the operands, with the gate's parameters in float32."""
    value_heads = inputs.v.shape[2]
    a_log = getattr(inputs.gate, "a_log", None)
    if a_log is not None:
        a_log = a_log.astype(F32).reshape(value_heads)
    dt_bias = getattr(inputs.gate, "dt_bias", None)
    if dt_bias is not None:
        gate_dim = options.op.gate_dim(inputs.q.shape[-1])
        dt_bias = dt_bias.astype(F32).reshape(value_heads, gate_dim)
    q, k, v, g, beta, *_ = inputs
    slots = inputs.state_slots
    if slots is not None:
        # For the kernel, which finds out by itself which of them exist, only what does not fit in int32.
        slots = (
            slots if slots.dtype == jnp.int32 else named_slots(slots, state.shape[0])
        )
    return DecodeOperands(
        q, k, v, g, beta, a_log, dt_bias, state, inputs.segment_ids, slots
    )


def decode_outputs(spec: DecodeSpec, v: Array, new_states: bool) -> DecodeOutputs:
    """On the host: what the kernel allocates."""
    output = jax.ShapeDtypeStruct(v.shape, v.dtype)
    if not new_states:
        return DecodeOutputs(output, None)
    states = (spec.batch, spec.time) if spec.options.return_states else (spec.batch,)
    shape = (*states, spec.value_heads, spec.key_dim, spec.value_dim)
    return DecodeOutputs(output, jax.ShapeDtypeStruct(shape, spec.final_dtype))
