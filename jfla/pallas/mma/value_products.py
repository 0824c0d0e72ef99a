"""The products of values that make the weights of pairs in the gradients, by mma.sync: do, dv, v_new to both."""

from jax import lax

from jfla.pallas.common.chunk_index import ChunkIndex
from jfla.pallas.common.grads_tiles import DO, DV, V_NEW, load_values
from jfla.pallas.mgpu.copies import Copies, commit_smem
from jfla.pallas.mgpu.mma import dot, zeros
from jfla.pallas.mgpu.smem import transposed
from jfla.pallas.mgpu.types import Index, Reg, Smem
from jfla.stages import ScanResults
from jfla.types import CHUNK


def value_products(
    scans: ScanResults,
    index: ChunkIndex,
    heads: int,
    num_v_tiles: int,
    values_smem: Smem,
) -> tuple[Reg, Reg]:
    """[C, C]: do v_new^T and dv v_new^T of a chunk, in float32."""

    def add(v_tile: Index, sums: tuple[Reg, Reg]) -> tuple[Reg, Reg]:
        commit_smem()  # the tile before has been read
        copies = Copies(None)
        load_values(copies, scans, index, heads, v_tile, values_smem)
        copies.wait()
        v_new = transposed(values_smem.at[V_NEW])
        do_v_new, dv_v_new = sums
        do_v_new = dot(do_v_new, (values_smem.at[DO], v_new))
        dv_v_new = dot(dv_v_new, (values_smem.at[DV], v_new))
        return do_v_new, dv_v_new

    zero = zeros(CHUNK, CHUNK)
    return lax.fori_loop(0, num_v_tiles, add, (zero, zero))
