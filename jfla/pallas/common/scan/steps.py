"""Kernels: the states from chunk to chunk, with the output or for the backward, and their cotangents in reverse.

    v_new = a_inv (v - k_from_start S)
    o     = q_from_start S + a_qk v_new
    S    <- chunk_decay * S + k_to_end^T v_new

and, with dS at a chunk's end (docs/math.md, equations 6 and 10),

    dv  = a_inv^T (a_qk^T do + k_to_end dS)
    dS <- chunk_decay * dS + q_from_start^T do - k_from_start^T dv

Everything is transposed, [V, C] and [V, K]: see spec.py.
"""

from collections.abc import Callable

import jax
from jax.typing import DTypeLike

from jfla.pallas.backward_overlap import BackwardOverlap
from jfla.pallas.common.chunk_index import TILE_V, TimeSpan
from jfla.pallas.common.packed_rows import Rows, SegmentTable, rows_like
from jfla.pallas.common.scan.pipeline import scan_kernel
from jfla.pallas.common.scan.signalling import signalling_specs
from jfla.pallas.common.scan.spec import (
    ChunkTiles,
    ScanConfig,
    ScanOutputs,
    ScanSpec,
    Store,
    gmem_operands,
)
from jfla.pallas.common.token_decay import times
from jfla.pallas.mgpu.copies import commit_smem, write
from jfla.pallas.mgpu.mma import MatmulQueue, Products, Sum, load
from jfla.pallas.mgpu.overlap import PendingResults
from jfla.pallas.mgpu.smem import F32, transposed
from jfla.pallas.mgpu.types import Gmem, Reg, Smem
from jfla.stages import (
    K_FROM_START,
    K_TO_END,
    Q_FROM_START,
    QK,
    IntraChunk,
    ScanResults,
)
from jfla.types import CHUNK

# Steps, in registers.

_VALUES_SHAPE = (TILE_V, CHUNK)  # of v^T, of what is made of it, and of the output


def _state_operand(
    state: Reg,
    tiles: ChunkTiles,
    store: Store | None = None,
) -> tuple[Reg | Smem, Callable[[], None]]:
    """(left wgmma operand, deferred store) of the state. The store, if any, is best while the tensor cores work."""
    state16 = state.astype(tiles.dtype)
    if tiles.state is None:
        return state16, lambda: None if store is None else store(0, state16)
    if store is None:
        write(tiles.state, state16)
    else:
        store(0, state16)  # its staging tile is tiles.state
    commit_smem()
    return tiles.state, lambda: None


def _add_v_new(
    v_new_sum: Sum, prediction: Sum, tiles: ChunkTiles, with_values: bool = True
) -> None:
    """Adds to v_new^T = (v - k_from_start S)^T a_inv^T, or the same without v, from (k_from_start S)^T.

    `prediction` is without the factor of its tokens.

    v and what S predicts of it stay apart: v keeps all of its digits, and a prediction that is small beside v is
    rounded by its own size. Of their difference in 16 bits nothing would be left of a prediction below half of v's
    last digit, in every chunk alike, and what is erased slowly would stay for ever.
    """
    a_inv = transposed(tiles.a_inv)
    written: Products = [(transposed(tiles.values), a_inv)] if with_values else []
    if not tiles.few_registers:
        v_new_sum.add(*written)
    predicted = times(-prediction.read(), tiles.decay.factor(K_FROM_START))
    v_new_sum.add((predicted.astype(tiles.dtype), a_inv))
    if tiles.few_registers:
        v_new_sum.add(*written)


def _output_step(state: Reg, tiles: ChunkTiles, store: Store) -> Reg:
    """One chunk: stores the output, returns the next state."""
    operand, _ = _state_operand(state, tiles)
    queue = MatmulQueue()

    def step(prediction: Sum, from_state: Sum, v_new_sum: Sum) -> Reg:
        prediction.add((operand, transposed(tiles.k_from_start)))
        from_state.add((operand, transposed(tiles.q_from_start)))
        _add_v_new(v_new_sum, prediction, tiles)
        decayed = tiles.decay.decay_state(state)
        read_by_query = tiles.decay.scale_tokens(from_state.read(), Q_FROM_START)
        k_factor = tiles.decay.factor(K_TO_END)
        v_new = v_new_sum.read()

        def finish(output: Sum, state: Sum) -> None:
            # The output first: while it is stored, the tensor cores have the state's product.
            output.add((v_new.astype(tiles.dtype), transposed(tiles.a_qk)))
            state.add((times(v_new, k_factor).astype(tiles.dtype), tiles.k_to_end))
            store(0, output.read())

        return queue.accumulate(finish, read_by_query, decayed)[1]

    return queue.from_zero(step, *[_VALUES_SHAPE] * 3)


def forward_step(
    state: Reg,
    tiles: ChunkTiles,
    store: Store | None,
    with_values: bool = True,
) -> Reg:
    """One chunk: stores the state before it and v_new, returns the next state.

    Without values (v = 0) the tokens only decay and erase: the linear part R of the affine map.
    """
    operand, store_state = _state_operand(state, tiles, store)
    queue = MatmulQueue()

    def step(prediction: Sum, v_new_sum: Sum) -> Reg:
        prediction.add((operand, transposed(tiles.k_from_start)))
        _add_v_new(v_new_sum, prediction, tiles, with_values)
        store_state()
        decayed = tiles.decay.decay_state(state)
        k_factor = tiles.decay.factor(K_TO_END)
        v_new = v_new_sum.read()

        def finish(state: Sum) -> None:
            state.add((times(v_new, k_factor).astype(tiles.dtype), tiles.k_to_end))
            if store is not None:
                store(1, v_new)

        return queue.accumulate(finish, decayed)[0]

    return queue.from_zero(step, *[_VALUES_SHAPE] * 2)


def backward_step(dstate: Reg, tiles: ChunkTiles, store: Store | None) -> Reg:
    """One chunk in reverse: stores dS at its end and dv, returns dS at its start."""
    operand, store_dstate = _state_operand(dstate, tiles, store)
    do = load(transposed(tiles.values))
    queue = MatmulQueue()

    def step(from_dstate: Sum, from_output: Sum, dv_sum: Sum) -> Reg:
        from_dstate.add((operand, transposed(tiles.k_to_end)))
        from_output.add((do, tiles.a_qk))
        store_dstate()
        scaled_do = tiles.decay.scale_tokens(do.astype(F32), Q_FROM_START)
        from_query = (scaled_do.astype(tiles.dtype), tiles.q_from_start)
        dv_state = from_dstate.read()
        dv_output = from_output.read()
        dv_new = dv_output + times(dv_state, tiles.decay.factor(K_TO_END))
        dv_sum.add((dv_new.astype(tiles.dtype), tiles.a_inv))
        decayed = tiles.decay.decay_state(dstate)

        def finish(dstate: Sum) -> None:
            # Behind dv's product: the tensor cores have this one while dv is read and rounded.
            dstate.add(from_query)
            k_factor = tiles.decay.factor(K_FROM_START)
            dv = dv_sum.read()
            erased = times(-dv, k_factor).astype(tiles.dtype)
            dstate.add((erased, tiles.k_from_start))
            if store is not None:
                store(1, dv)

        return queue.accumulate(finish, decayed)[0]

    return queue.from_zero(step, *[_VALUES_SHAPE] * 3)


# Kernels, on the host.


def output_scan_kernel(
    qk: QK,
    intra: IntraChunk,
    v: Rows,
    initial: Gmem,
    config: ScanConfig,
    *,
    final_dtype: DTypeLike | None,
    num_checkpoints: int = 0,
    group_chunks: int | None = None,
    segments: SegmentTable | None = None,
) -> PendingResults:
    """ScanOutputs: stores (o [B, T, HV, V],), checkpoints, and the last state [B, HV, K, V] in `final_dtype`.

    Without a `final_dtype` no last state is wanted; with `group_chunks` the last of every group of so many chunks is,
    with `segments` that of each. `initial` is S^T where every time split or segment begins,
    [B, HV, splits, V, K], or None: zeros.
    """
    spec = ScanSpec(
        _output_step,
        gmem_operands(qk, intra, v, initial, segments=segments),
        qk.scalar_gate,
        stores=(rows_like(v, v.shape, v.dtype),),
        time_splits=num_splits(initial, segments),
        last=None if final_dtype is None else "caller",
        num_checkpoints=num_checkpoints,
        last_dtype=F32 if final_dtype is None else final_dtype,
        group_chunks=group_chunks,
    )
    pending = scan_kernel((spec,), config, "jfla_output_scan")
    return pending._replace(resolve=lambda outputs: outputs[0])


def backward_scans_kernel(
    qk: QK,
    intra: IntraChunk,
    v: Rows,
    do: Rows,
    ends: tuple[Gmem, Gmem],
    config: ScanConfig,
    *,
    keep_dstate: bool,
    span: TimeSpan | None = None,
    group_chunks: int | None = None,
    segments: SegmentTable | None = None,
    beside_grads: BackwardOverlap | None = None,
) -> PendingResults:
    """`ScanResults`, and dS^T where every time split begins if it is kept: the two scans in one kernel.

    `ends` is (S^T before time, dS^T after it), each None for zeros, of every one of `segments`. With
    `group_chunks` the second is what is added
    to dS^T after every group of so many chunks, [B, HV, groups, V, K]. On a span of time they are (the states before
    every span [B, HV, spans, V, K], a reference to dS^T after the span, which takes that before it), and `span.results`
    is a reference that takes dv; `ScanResults` then has None for it. With `beside_grads` the first are the states
    before every span, too, states, their cotangents and v_new may be rings, and every chunk is signalled.
    """
    initial, d_final = ends
    n_chunks = v.shape[1] // CHUNK
    if span is not None:
        n_chunks //= initial.shape[2]
    reverse = _backward_spec(
        qk, intra, do, d_final, n_chunks, keep_dstate, span, segments
    )
    if group_chunks is not None:
        operands = gmem_operands(qk, intra, do, None, added=d_final)
        reverse = reverse._replace(
            operands=operands, time_splits=1, group_chunks=group_chunks
        )
    forward = _states_spec(qk, intra, v, initial, n_chunks, span, segments)
    if beside_grads is not None:
        reverse, forward = signalling_specs(reverse, forward, beside_grads, config)
        sequences_per_group = beside_grads.sequences_per_group
        config = config._replace(sequences_per_group=sequences_per_group)
    pending = scan_kernel((reverse, forward), config, "jfla_backward_scans")

    def resolve(outputs: list[ScanOutputs]) -> tuple[ScanResults, Gmem]:
        backward, states = outputs
        dstates, dv = backward.stores
        scans = ScanResults(states.stores[0], dstates, states.stores[1], do, dv)
        return scans, backward.last

    return pending._replace(resolve=resolve)


def _states_spec(
    qk: QK,
    intra: IntraChunk,
    v: Rows,
    initial: Gmem,
    n_chunks: int,
    span: TimeSpan | None,
    segments: SegmentTable | None,
) -> ScanSpec:
    """S^T at each chunk's start and v_new: what the backward reads of the forward."""
    time_splits = num_splits(initial, segments)
    if span is not None:
        span = span._replace(results=None)
        time_splits = 1
    operands = gmem_operands(
        qk, intra, v, initial, queries=False, span=span, segments=segments
    )
    stores = _states_and_values(qk, v, n_chunks)
    return ScanSpec(
        forward_step,
        operands,
        qk.scalar_gate,
        stores,
        time_splits=time_splits,
        last=None,
    )


def _backward_spec(
    qk: QK,
    intra: IntraChunk,
    do: Rows,
    d_final: Gmem,
    n_chunks: int,
    keep_dstate: bool,
    span: TimeSpan | None,
    segments: SegmentTable | None,
) -> ScanSpec:
    """dS^T at each chunk's end and dv, and dS^T before the first chunk."""
    dstates, dv = _states_and_values(qk, do, n_chunks)
    last = "every split" if segments is None else "caller"
    return ScanSpec(
        backward_step,
        gmem_operands(qk, intra, do, d_final, span=span, segments=segments),
        qk.scalar_gate,
        stores=(dstates, rows_like(do, dv.shape, dv.dtype)),
        reverse=True,
        time_splits=num_splits(d_final, segments),
        last=last if keep_dstate else None,
    )


def num_splits(initial: Gmem, segments: SegmentTable | None = None) -> int:
    """Time splits of a scan that begins from these states, or its segments."""
    if segments is not None:
        return segments.segments.shape[1]
    return 1 if initial is None else initial.shape[2]


def _states_and_values(
    qk: QK,
    v: Rows,
    n_chunks: int,
) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    batch, _, heads, value_dim = v.shape
    states = jax.ShapeDtypeStruct(
        (batch, heads, n_chunks, value_dim, qk.key_dim), v.dtype
    )
    values = jax.ShapeDtypeStruct((batch, n_chunks * CHUNK, heads, value_dim), v.dtype)
    return states, values


def split_map_specs(
    qk: QK,
    intra: IntraChunk,
    v: jax.Array,
    identity: jax.Array,
    time_splits: int,
) -> tuple[ScanSpec, ScanSpec]:
    """R^T and C^T of every time split: where it leads from the identity without values, and from zero with them."""

    def linear(state: Reg, tiles: ChunkTiles, _: Store) -> Reg:
        return forward_step(state, tiles, None, with_values=False)

    def constant(state: Reg, tiles: ChunkTiles, _: Store) -> Reg:
        return forward_step(state, tiles, None)

    return (
        ScanSpec(
            linear,
            gmem_operands(qk, intra, v, identity, queries=False),
            qk.scalar_gate,
            time_splits=time_splits,
        ),
        ScanSpec(
            constant,
            gmem_operands(qk, intra, v, None, queries=False),
            qk.scalar_gate,
            time_splits=time_splits,
        ),
    )


def split_adjoint_spec(
    qk: QK, intra: IntraChunk, do: jax.Array, time_splits: int
) -> ScanSpec:
    """D^T of every time split: the cotangent that its own outputs send to its start."""

    def step(dstate: Reg, tiles: ChunkTiles, _: Store) -> Reg:
        return backward_step(dstate, tiles, None)

    operands = gmem_operands(qk, intra, do, None)
    return ScanSpec(
        step, operands, qk.scalar_gate, reverse=True, time_splits=time_splits
    )
