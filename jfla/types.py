"""Notation, array aliases and the small containers that every room shares.

    B batch        T time         H query/key heads      HV value heads (HV = r H; head hv reads q, k of head hv // r)
    K key dim      V value dim    C chunk length         N chunks      S segments (packed sequences)
    G last axis of the gate: K for KDA (a decay per key channel), 1 for GDN (a decay per head)

`g` is always a per-token natural-log decay, <= 0. Sums of `g` run inside a chunk. A cotangent of `x` is `dx`.
"""

import dataclasses
from typing import Literal, NamedTuple

from jaxtyping import Array, Float, Int

from jfla.gates import Gate

Implementation = Literal["pallas", "xla"]
Form = Literal["chunk", "recurrent"]
AxisName = str | tuple[str, ...]  # of a mesh

CHUNK = 64

# What the public functions take: time before heads, as Flash Linear Attention lays its arrays out.
Query = Float[Array, "B T H K"]
Value = Float[Array, "B T HV V"]
Decay = Float[Array, "B T HV G"]
Beta = Float[Array, "B T HV"]
State = Float[Array, "B *S HV K V"]
SegmentIds = Int[Array, "B T"]


@dataclasses.dataclass(frozen=True)
class Op:
    """One member of the family.

    `gate_axes` is "K" where every key channel has a decay of its own, "" where a head has one. `write` is how a token
    enters the state: "delta" corrects what the state says about the token's key.
    """

    name: str
    gate_axes: Literal["K", ""]
    write: Literal["delta"] = "delta"

    @property
    def scalar_gate(self) -> bool:
        """Whether one decay multiplies the whole state of a head."""
        return self.gate_axes == ""

    def gate_dim(self, key_dim: int) -> int:
        """G, the length of the last axis of `Inputs.g`."""
        return 1 if self.scalar_gate else key_dim


KDA = Op("kda", gate_axes="K")
GDN = Op("gdn", gate_axes="")
OPS = {op.name: op for op in (KDA, GDN)}


class DeltaRuleOutput(NamedTuple):
    """What every op returns, a named tuple.

    **Fields:** `output` `[B, T, HV, V]` in the dtype of v; `final_state` `[B, HV, K, V]`, or `[B, S, HV, K, V]` with a
    state per segment, or `[B, T, HV, K, V]` with `return_states`, `[B, ceil(T / n), HV, K, V]` with
    `return_states_every=n`, the pool with `state_slots`. In `state_dtype`: bfloat16 after an initial state of bfloat16
    and else float32 (float64 when the op computes in it). None when it was not asked for.

    >>> import jax, jfla
    >>> x = jax.numpy.ones((1, 3, 2, 4))
    >>> output, final_state = jfla.recurrent_gdn(x, x, x, -x[..., 0], x[..., 0], qk_norm=True)
    >>> print(output.shape, final_state)
    (1, 3, 2, 4) None
    """

    output: Value
    final_state: State | None


class Inputs(NamedTuple):
    """The arrays of one call. `g` always carries its last axis: K (KDA) or 1 (GDN)."""

    q: Query
    k: Query
    v: Value
    g: Decay
    beta: Beta
    gate: Gate | None
    initial_state: State | None
    segment_ids: SegmentIds | None
    # where given, `initial_state` is a pool [P, HV, K, V]
    state_slots: Int[Array, " B"] | None = None


@dataclasses.dataclass(frozen=True)
class Options:
    """The static part of one call: hashable, so that it can be a constant of jit and of a derivative rule."""

    op: Op
    scale: float
    beta_max: float | None
    qk_norm: bool
    return_final_state: bool
    num_segments: int | None  # S of a packed call, where the caller says it
    # each packed segment has a state of its own going in or coming out
    per_segment_state: bool = False
    return_states: bool = False  # the final state is that after every token
    # mesh axis over whose devices time is split: see jfla.parallel
    sequence_axis: AxisName | None = None
    # the final state is that after every so many tokens, and after the last
    states_every: int | None = None
    state_dtype: str | None = None  # of the final state; None: that of the computation

    @property
    def num_states(self) -> int | None:
        """S where each segment has a state, None where each row of the batch has one."""
        return self.num_segments if self.per_segment_state else None

    @property
    def aligned_segments(self) -> bool:
        """Whether kernels lay the segments of this call on chunk boundaries and scan each by itself."""
        return self.num_segments is not None and self.sequence_axis is None

    @property
    def chunks_per_state(self) -> int | None:
        """`states_every` in chunks."""
        return None if self.states_every is None else self.states_every // CHUNK

    def as_final_state(self, state: Array) -> Array:
        """A computed state in the dtype in which the caller gets it."""
        return state if self.state_dtype is None else state.astype(self.state_dtype)
