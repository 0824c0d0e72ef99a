"""Kernel jfla_sum_blocks: what the channel blocks of K = 256 add to a chunk's pairs of tokens, to `IntraChunk`."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from jfla.pallas.common.beta_scaling import (
    BETA_LINE,
    scale_rows_and_columns,
    write_a_inv,
    write_beta_scaling,
)
from jfla.pallas.common.chunk_index import ChunkIndex
from jfla.pallas.common.pair_passes import BLOCK
from jfla.pallas.common.qk_tiles import K, Q
from jfla.pallas.mgpu.columns import join_columns, split_columns
from jfla.pallas.mgpu.copies import (
    commit_smem,
    load_with_layout,
    write_transposed,
)
from jfla.pallas.mgpu.launch import launch
from jfla.pallas.mgpu.layouts import ROWS, WGMMA
from jfla.pallas.mgpu.opaque import opaque_zero
from jfla.pallas.mgpu.smem import F16, F32, tile_smem
from jfla.pallas.mgpu.triangular import TriangularInverse
from jfla.pallas.mgpu.types import Barrier, Gmem, Reg, Smem
from jfla.pallas.mgpu.warp_blocks import with_diagonal
from jfla.stages import IntraChunk
from jfla.types import CHUNK


class SumBlocksInputs(NamedTuple):
    """What the kernel reads."""

    block_sums: Gmem  # [B, HV, N, blocks, 2, C, C] float32: terms of (q D k^T)^T and (k D k^T)^T
    beta: Gmem  # [B, HV, N, 1, C] float32
    qk_dots: Gmem  # the same of the diagonal of a_qk, where the caller has it


class SharedStorage(NamedTuple):
    """Shared memory of a CTA: its one warpgroup's."""

    beta_scaling: Smem  # [3, C]: its scaling, and beta
    a_qk: Smem  # [C, C] in the dtype of q
    a_inv: Smem  # [C, C] in the dtype of q
    lower: Smem  # [C, C] float16: what is inverted
    work: Smem  # [C, C] float16: of the inverse


def sum_blocks(
    block_sums: jax.Array,
    beta: jax.Array,
    qk_dots: jax.Array | None,
    dtype: DTypeLike,
) -> IntraChunk:
    """On the host: launches the kernel, a CTA of one warpgroup a chunk of a value head. Results are in `dtype`."""
    batch, heads, n_chunks, num_blocks, *_ = block_sums.shape

    def body(
        gmem: SumBlocksInputs,
        intra_gmem: IntraChunk,
        smem: SharedStorage,
        beta_full: Barrier,
    ) -> None:
        sequence, head, chunk = map(lax.axis_index, ("sequence", "head", "chunk"))
        index = ChunkIndex(sequence, head, chunk)
        zero = opaque_zero()
        beta = smem.beta_scaling.at[BETA_LINE]
        plgpu.copy_gmem_to_smem(index.tile(gmem.beta).at[0], beta, beta_full)
        terms = index.tile(gmem.block_sums)

        def total(which: int) -> Reg:
            blocks = [terms.at[block, which] for block in range(num_blocks)]
            loaded = [plgpu.load(x, layout=WGMMA, optimized=False) for x in blocks]
            return functools.reduce(jnp.add, loaded)

        a_qk = total(Q)
        if gmem.qk_dots is not None:
            diagonal = load_with_layout(index.tile(gmem.qk_dots).at[0], ROWS)
            blocks = enumerate(split_columns(a_qk, BLOCK))
            a_qk = join_columns([with_diagonal(x, diagonal, n) for n, x in blocks])
        write_transposed(smem.a_qk, a_qk.astype(dtype))
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(smem.a_qk, index.tile(intra_gmem.a_qk))
        plgpu.barrier_wait(beta_full)
        write_beta_scaling(beta, smem.beta_scaling)
        plgpu.commit_smem()
        lower = scale_rows_and_columns(-total(K), smem.beta_scaling, zero, inverse=True)
        write_transposed(smem.lower, lower.astype(F16))
        commit_smem()
        inverse = TriangularInverse(smem.lower, smem.work)
        write_a_inv(inverse, smem.beta_scaling, smem.a_inv, zero)
        plgpu.copy_smem_to_gmem(smem.a_inv, index.tile(intra_gmem.a_inv))
        plgpu.wait_smem_to_gmem(0)

    square: Gmem = jax.ShapeDtypeStruct((batch, heads, n_chunks, CHUNK, CHUNK), dtype)
    return launch(
        body,
        SumBlocksInputs(block_sums, beta, qk_dots),
        IntraChunk(square, square),
        grid={"chunk": n_chunks, "head": heads, "sequence": batch},
        num_warpgroups=1,
        smem=SharedStorage(
            beta_scaling=plgpu.SMEM((3, CHUNK), F32),
            a_qk=tile_smem(CHUNK, CHUNK, dtype=dtype),
            a_inv=tile_smem(CHUNK, CHUNK, dtype=dtype),
            lower=tile_smem(CHUNK, CHUNK, dtype=F16),
            work=tile_smem(CHUNK, CHUNK, dtype=F16),
        ),
        barriers=plgpu.Barrier(),
        name="jfla_sum_blocks",
    )
