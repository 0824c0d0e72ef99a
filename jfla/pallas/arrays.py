"""The caller's arrays as the kernels read them: whole chunks, 16 bits, packing as decay resets; and cotangents back."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from jfla._inputs.canonicalize import without_padding
from jfla.gates import l2norm, log_decay, write_strength
from jfla.packing import starts, take_rows
from jfla.pallas.common.chunk_index import CHANNEL_BLOCK
from jfla.pallas.common.end_copies import return_ends
from jfla.pallas.common.gate import (
    LOG2E,
    STRONGEST,
    gate_kind,
    gate_parameters,
    reset_rows,
)
from jfla.pallas.common.packed_rows import PackedRows, Rows, SegmentTable
from jfla.pallas.common.qk_tiles import QkgOperands, QkOptions
from jfla.pallas.common.results import KernelGrads
from jfla.pallas.dims import Dims
from jfla.pallas.machine import on_hopper
from jfla.pallas.mgpu.smem import BF16, F16, F32
from jfla.pallas.segments import SegmentChunks, in_place, segment_chunks
from jfla.parallel.varying import vary_with
from jfla.types import CHUNK, Inputs, Options, State

# A write strength of 0 becomes this, so that dbeta can be read off what was written: nothing beside the operands'
# rounding. v_new and dv, which have it as a factor, keep their digits in the range of their dtype; so does its root in
# float16, which scales rows and columns of the inverse.
SMALLEST_BETA: dict[Any, float] = {BF16: 2.0**-26, F16: 2.0**-12}


class KernelArrays(NamedTuple):
    """T is a multiple of the chunk. The tail and padding are 0: they write nothing and decay nothing.

    With `grid` T is that of the aligned grid; q, k, v and the gate of a channel are `PackedRows`, in place, and so are
    the states of segments to begin from.
    """

    q: Rows  # [B, T, H, K]
    k: Rows  # [B, T, H, K]
    v: Rows  # [B, T, HV, V]
    g: Rows  # [B, T, HV, G]
    beta: Float[Array, "B T HV"]
    qk_dots: Float[Array, "B T HV"] | None  # see `_qk_dots`
    initial: Float[Array, "B HV 1 V K"] | Float[Array, "B S HV K V"] | None
    resets: Float[Array, "B T"] | None
    grid: SegmentChunks | None = None

    @property
    def dims(self) -> Dims:
        batch, time, heads, value_dim = self.v.shape
        return Dims(batch, heads, time // CHUNK, value_dim, self.q.shape[-1])

    @property
    def segments(self) -> SegmentTable | None:
        """Segments, and padding, that are scanned side by side."""
        return None if self.grid is None else self.grid.table


def kernel_arrays(
    inputs: Inputs,
    options: Options,
    *,
    row_is_segment: bool = False,
    segments_in_turn: bool = False,
) -> KernelArrays:
    """Of validated inputs, in `operand_dtype`, for scans of segments as `Schedule` says."""
    dtype = operand_dtype(inputs)
    q = inputs.q
    k = inputs.k
    if options.qk_norm and dtype == F16:
        q = l2norm(q)
        k = l2norm(k)
    g_dtype = inputs.g.dtype if inputs.g.dtype in (BF16, F32) else F32
    beta = write_strength(inputs.beta, options.beta_max)
    beta = nonzero_beta(beta.astype(F32), dtype)
    grid = None
    if options.aligned_segments:
        assert inputs.segment_ids is not None
        assert options.num_segments is not None
        grid = segment_chunks(
            inputs.segment_ids, options.num_segments, in_turn=segments_in_turn
        )
    elif row_is_segment:
        grid = segment_chunks(_is_token(inputs).astype(jnp.int32), 1)
    g = inputs.g.astype(g_dtype)
    qk_dots = _qk_dots(q, k, inputs, options)
    rows = [x.astype(dtype) for x in (q, k, inputs.v)]
    if options.op.scalar_gate:
        q, k, v = whole_chunks(rows, inputs, grid)
        g = _token_scalars(g, inputs, grid)
    else:
        q, k, v, g = whole_chunks([*rows, g], inputs, grid)
    initial = inputs.initial_state
    return KernelArrays(
        q=q,
        k=k,
        v=v,
        g=g,
        beta=_token_scalars(beta, inputs, grid),
        qk_dots=None if qk_dots is None else _token_scalars(qk_dots, inputs, grid),
        initial=to_kernel_state(initial) if grid is None else by_segment(initial),
        resets=_resets(inputs, options, grid),
        grid=grid,
    )


def _qk_dots(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    inputs: Inputs,
    options: Options,
) -> Float[Array, "B T HV"] | None:
    """scale q . k of every token, float32: the diagonal of KDA's a_qk where it is float16.

    Where strong gates leave little of earlier tokens it is most of the output, and from factors in bfloat16 it would
    have their digits. None where the kernels make it.
    """
    if options.op.scalar_gate or operand_dtype(inputs) != F16:
        return None
    dots = options.scale * jnp.sum(q.astype(F32) * k.astype(F32), axis=-1)
    return jnp.repeat(dots, inputs.v.shape[2] // q.shape[2], axis=2)


def operand_dtype(inputs: Inputs) -> DTypeLike:
    """What q, k, v and all that meets them on the tensor cores is rounded to.

    float16 where q, k and v are: bfloat16's digits are too few for it. Its range suffices, since the factors that
    multiply rows are at most 1 once q and k are normalised outside of the kernels. The factors of KDA's pairs of tokens
    go up to 2^110, so that these alone are bfloat16.
    """
    all_half = all(x.dtype == F16 for x in (inputs.q, inputs.k, inputs.v))
    return F16 if all_half else BF16


def query_dtype(inputs: Inputs) -> DTypeLike:
    """Of dq and dk as the gradient kernels leave them: float32 where value heads are left to sum."""
    whole = inputs.q.dtype == BF16 and inputs.q.shape[2] == inputs.v.shape[2]
    return BF16 if whole else F32


def _is_token(inputs: Inputs) -> Bool[Array, "B T"]:
    if inputs.segment_ids is None:
        return jnp.ones(inputs.v.shape[:2], bool)
    return inputs.segment_ids > 0


def by_segment(state: State | None) -> Float[Array, "B S HV K V"] | None:
    """States of segments; where a row has one, that of its one segment."""
    return state[:, None] if state is not None and state.ndim == 4 else state


def _resets(
    inputs: Inputs, options: Options, grid: SegmentChunks | None
) -> Float[Array, "B T"] | None:
    """`reset_rows` in whole chunks; of segments that are scanned by themselves only the tails are left."""
    if grid is not None and (inputs.segment_ids is None or options.aligned_segments):
        is_tail = grid.source == inputs.v.shape[1]
        if grid.is_first_chunk is None:
            return is_tail.astype(F32)
        is_first_row = jnp.arange(CHUNK) == 0
        is_start = grid.is_first_chunk[:, :, None] & is_first_row
        is_start = is_start.reshape(is_tail.shape)
        return jnp.where(is_tail, 1.0, jnp.where(is_start, STRONGEST, 0.0))
    if inputs.segment_ids is None:
        return None
    rows = reset_rows(inputs.segment_ids, starts(inputs.segment_ids))
    tail = -rows.shape[1] % CHUNK
    if grid is not None:
        tail = grid.source.shape[1] - rows.shape[1]
    return jnp.pad(rows, ((0, 0), (0, tail)), constant_values=1.0)


def whole_chunks(
    rows: list[Array], inputs: Inputs, grid: SegmentChunks | None
) -> list[Rows]:
    """Rows [B, T, heads, D]: 0 on padding, whatever was there, and in the tail of the last chunk."""
    if grid is None:
        return [_padded(x, inputs) for x in rows]
    return in_place(rows, grid)


def _token_scalars(x: Array, inputs: Inputs, grid: SegmentChunks | None) -> Array:
    """The same of [B, T, ..], a few numbers of each token, which are copied where segments are aligned."""
    return _padded(x, inputs) if grid is None else take_rows(x, grid.source)


def _padded(x: Array, inputs: Inputs) -> Array:
    """[B, T, ..] in whole chunks, and with zeros on padding."""
    if inputs.segment_ids is not None:
        x = jnp.where(_match(inputs.segment_ids > 0, x), x, jnp.zeros((), x.dtype))
    tail = -x.shape[1] % CHUNK
    return jnp.pad(x, ((0, 0), (0, tail)) + ((0, 0),) * (x.ndim - 2)) if tail else x


def _match(keep: Bool[Array, "B T"], x: Array) -> Bool[Array, "B T *ones"]:
    return keep.reshape(keep.shape + (1,) * (x.ndim - 2))


def to_kernel_state(state: State | None) -> Float[Array, "B HV 1 V K"] | None:
    """S^T float32 as the scans keep it, before a single time split."""
    return None if state is None else state.astype(F32).mT[:, :, None]


def to_kernel_states(
    states: Float[Array, "B S HV K V"] | None,
) -> Float[Array, "B HV S V K"] | None:
    """S^T float32 of several states along time in a row."""
    return None if states is None else jnp.moveaxis(states.astype(F32).mT, 1, 2)


def to_tokens(
    rows: list[Rows], inputs: Inputs, grid: SegmentChunks | None
) -> list[Float[Array, "B T ..."]]:
    """Of whole chunks the rows of the caller's tokens; 0 on padding where segments are aligned."""
    if grid is None:
        return [x[:, : inputs.v.shape[1]] for x in rows]
    in_place = [x for x in rows if isinstance(x, PackedRows)]
    returned = iter(return_ends(in_place, grid.bounds))
    return [
        next(returned) if isinstance(x, PackedRows) else take_rows(x, grid.target)
        for x in rows
    ]


def nonzero_beta(
    beta: Float[Array, "*shape"], dtype: DTypeLike
) -> Float[Array, "*shape"]:
    """beta with SMALLEST_BETA of the operands' dtype in the place of what is closer to 0."""
    smallest = SMALLEST_BETA[dtype]
    return jnp.where(jnp.abs(beta) < smallest, smallest, beta)


def chunk_major(*x: Float[Array, "B T HV"]) -> Float[Array, "B HV N S C"]:
    """S numbers of every token: too few bytes for TMA to read them as the caller laid them.

    Stacked before the transpose: two arrays would be two transposes of XLA, a kernel each.
    """
    rows = []
    for a in x:
        batch, _, heads = a.shape
        rows.append(a.reshape(batch, -1, CHUNK, heads))
    stacked = jnp.stack(rows, axis=2)
    return jnp.moveaxis(stacked, -1, 1)


def log2_decays(x: KernelArrays, inputs: Inputs) -> Float[Array, "B T HV"]:
    """Scalar gate: log2 decay of every token, with resets; 0 in the tail."""
    natural = log_decay(x.g, inputs.gate)[..., 0]
    log2 = natural.astype(F32) * LOG2E
    log2 = jnp.maximum(log2, STRONGEST)
    if x.resets is None:
        in_time = jnp.arange(log2.shape[1])[None, :, None] < inputs.q.shape[1]
        log2 = jnp.where(in_time, log2, 0.0)
    else:
        resets = x.resets[:, :, None]
        log2 = jnp.where(resets > 0, 0.0, jnp.maximum(log2 + resets, STRONGEST))
    return log2


def qkg_operands(x: KernelArrays, inputs: Inputs) -> QkgOperands:
    """What the kernels of a gate per channel read."""
    rates, bias = gate_parameters(inputs.gate, inputs.v.shape[2], inputs.g.shape[-1])
    log2_bias = None if bias is None else LOG2E * bias
    return QkgOperands(x.q, x.k, x.g, rates, log2_bias, x.resets)


def qk_options(x: KernelArrays, inputs: Inputs, options: Options) -> QkOptions:
    """The static part of what the kernels do to q, k and g."""
    time = inputs.q.shape[1] if x.grid is None else x.q.shape[1]
    return QkOptions(
        options.scale,
        options.qk_norm and x.q.dtype == BF16,
        time,
        gate_kind(inputs.gate),
    )


def cotangents(
    inputs: Inputs,
    options: Options,
    grid: SegmentChunks | None,
    grads: KernelGrads,
    dv: Rows,
    d_initial: Array | None,
) -> Inputs:
    """From what the kernels leave, per value head and in whole chunks, to the cotangents of the caller's arrays.

    Those of g and beta are of the log decay and of the strength of the write: `gate_cotangents` takes them further.
    """
    differentiable = (inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta)

    def per_token(x: Array) -> Array:
        return x.reshape(*x.shape[:2], -1).swapaxes(1, 2)

    scalar_gate = options.op.scalar_gate
    dg = per_token(grads.dg) if scalar_gate else grads.dg
    rows = [grads.dq, grads.dk, dv, dg, per_token(grads.v_new_dot_dv)]
    by_token = [vary_with(x, *differentiable) for x in to_tokens(rows, inputs, grid)]
    if grid is None:
        by_token = [without_padding(x, inputs.segment_ids) for x in by_token]
    dq, dk, dv, dg, v_new_dot_dv = by_token
    if d_initial is not None and inputs.initial_state is not None:
        d_state = d_initial[:, :, 0].mT if grid is None else d_initial
        # Where the row is one segment, that segment's state is the row's.
        d_state = d_state.reshape(inputs.initial_state.shape)
        d_initial = vary_with(
            d_state.astype(inputs.initial_state.dtype), *differentiable
        )
    beta = write_strength(
        without_padding(inputs.beta, inputs.segment_ids), options.beta_max
    )
    dtype = operand_dtype(inputs)
    return Inputs(
        q=_to_query(dq, inputs.q, inputs, options),
        k=_to_query(dk, inputs.k, inputs, options),
        v=dv.astype(inputs.v.dtype),
        g=dg[..., None] if scalar_gate else dg,
        beta=v_new_dot_dv / nonzero_beta(beta, dtype) ** 2,
        gate=None,
        initial_state=d_initial,
        segment_ids=None,
    )


def _to_query(dx: Array, x: Array, inputs: Inputs, options: Options) -> Array:
    """Sums over the value heads of a group, and blocks of V, in float32; then of q or k as the caller passed it."""
    batch, time, heads, key_dim = x.shape
    if dx.shape[2] != heads:
        dx = jnp.sum(dx.reshape(batch, time, heads, -1, key_dim), axis=3)
    if leaves_norm(inputs, options):
        norm = lambda x: l2norm(without_padding(x, inputs.segment_ids))
        (dx,) = jax.vjp(norm, x)[1](dx)
    return dx.astype(x.dtype)


def leaves_norm(inputs: Inputs, options: Options) -> bool:
    """Whether the kernels leave the adjoint of q's and k's norm: where none sees all channels of a row at once."""
    half = operand_dtype(inputs) == F16
    return options.qk_norm and (
        inputs.q.shape[-1] > CHANNEL_BLOCK or half or not on_hopper()
    )
