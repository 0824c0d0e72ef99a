"""What every kernel is built from: tile buffers, matmuls of value semantics, masks, and the triangular inverse."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jfla._types import CHUNK
from jfla.pallas._launch import interpreting

F32, BF16, F16 = jnp.float32, jnp.bfloat16, jnp.float16
WGMMA = plgpu.Layout.WGMMA
ROWS, COLS = WGMMA.reduce(1), WGMMA.reduce(0)  # one value per row; one value per column


def tile_buffer(*shape: int, dtype: Any = BF16) -> Any:
    """Shared memory for [.., rows, columns] tiles that TMA writes and the tensor cores read: 128-byte swizzle."""
    columns = 128 // jnp.dtype(dtype).itemsize
    tiling: Any = plgpu.TilingTransform  # to a type checker it is abstract
    swizzle: Any = plgpu.SwizzleTransform
    return plgpu.SMEM(shape, dtype, transforms=(tiling((8, columns)), swizzle(128)))


def load(ref: Any) -> jax.Array:
    return plgpu.load(ref, layout=WGMMA)


def zeros(rows: int, columns: int) -> jax.Array:
    return plgpu.layout_cast(jnp.zeros((rows, columns), F32), WGMMA)


def index(axis: int, rows: int = CHUNK, columns: int = CHUNK) -> jax.Array:
    """The row (0) or column (1) number of every element.

    Broadcast from one line: as an array of two dimensions every element's number would be kept in a register.
    """
    if axis == 0:
        return per_row(plgpu.broadcasted_iota(jnp.int32, (rows,), 0, layout=ROWS), columns)
    return per_column(plgpu.broadcasted_iota(jnp.int32, (columns,), 0, layout=COLS), rows)


def per_row(x: jax.Array, columns: int) -> jax.Array:
    return plgpu.layout_cast(lax.broadcast_in_dim(x, (x.shape[0], columns), [0]), WGMMA)


def per_column(x: jax.Array, rows: int) -> jax.Array:
    return plgpu.layout_cast(lax.broadcast_in_dim(x, (rows, x.shape[0]), [1]), WGMMA)


def transposed(ref: Any) -> Any:
    return ref.transpose((1, 0))


def dot(acc: jax.Array, *pairs: tuple[Any, Any]) -> jax.Array:
    """acc + sum of a @ b on the tensor cores. a: registers or shared memory, b: shared memory, both 16 bit."""
    return dots((acc, *pairs))[0]


def dots(*sums: tuple[Any, ...]) -> list[jax.Array]:
    """Several `dot`s, none of which needs another: they are waited for together.

    Interpret mode simulates no matmul with operands in registers, so there they are plain dots.
    """
    if interpreting():
        product = lambda a, b: jnp.dot(a[...].astype(F32), b[...].astype(F32), precision="highest")
        return [sum((product(a, b) for a, b in pairs), start=acc) for acc, *pairs in sums]

    def issue(refs: list[Any]) -> None:
        for ref, (_, *pairs) in zip(refs, sums):
            for a, b in pairs:
                plgpu.wgmma(ref, a, b)

    accumulator: Any = plgpu.WGMMAAccumulatorRef
    return pl.run_state(issue)([accumulator.init(acc) for acc, *_ in sums])


def pair_decay(before: Any) -> jax.Array:
    """[C, C]: the decay from token j to token i, from the running sum of log2 decay; 1 above the diagonal."""
    # The barriers keep layout inference from searching through every pair of layouts of one buffer.
    rows = lax.optimization_barrier(per_row(plgpu.load(before, layout=ROWS), CHUNK))
    between = rows - lax.optimization_barrier(per_column(plgpu.load(before, layout=COLS), CHUNK))
    return jnp.exp2(jnp.minimum(between, 0.0))


def shift(x: jax.Array, bits: Any) -> jax.Array:
    return lax.shift_right_logical(x, jnp.broadcast_to(jnp.int32(bits), x.shape))


def apart(level: Any) -> jax.Array:
    """0 for two tokens of one block of 2^level, 1 for tokens of the two halves of a block of 2 * 2^level, else more.

    Shifted one by one: in a loop over levels the exclusive or of the two indices would be kept in 32 registers.
    """
    return shift(index(0), level) ^ shift(index(1), level)


def unit_lower_inverse(lower: Any, work: Any, zero: Any, written_out: bool) -> jax.Array:
    """(I - N)^-1 of the strictly lower N in a float16 tile; `work` is another one. `zero`: see Turn.

    By doubling blocks, X <- X + X N' X with the N' of the squares that join two blocks: no power of N is formed, so it
    is as stable as substitution. float16 is 8 times finer than bfloat16 at the same cost, and wide enough: in a
    recurrence that does not blow up the entries of N and X are bounded by beta |k_i| |k_j|. Written out, the levels
    take fewer instructions, because with the level known most of a square's mask is; in a loop the code is shorter.
    """
    none = zeros(CHUNK, CHUNK).astype(F16)

    def square(level: Any, zero: Any) -> jax.Array:
        row, column = index(0) + zero, index(1) + zero
        return jnp.where(shift(row, level) ^ shift(column, level) == 1, plgpu.load(lower, layout=WGMMA), none)

    def double(level: Any, x: jax.Array) -> jax.Array:
        x16 = x.astype(F16)
        work[...] = x16
        plgpu.commit_smem()
        right = dot(zeros(CHUNK, CHUNK), (square(level, zero * level), work)).astype(F16)
        work[...] = right
        plgpu.commit_smem()
        return dot(x, (x16, work))

    diagonal = index(0) + zero == index(1) + zero
    x = jnp.where(diagonal, zeros(CHUNK, CHUNK) + 1.0, square(0, zero).astype(F32))
    if not written_out:
        return lax.fori_loop(1, 6, double, x)
    for level in range(1, 6):
        x = double(level, x)
    return x


class Roots:
    """beta = s t, by rows and by columns, |s| = |t|: what the two sides of the inverse are scaled with.

    (I + diag(beta) L)^-1 diag(beta) = t (I + s L t)^-1 s: a small beta makes small neither rows nor columns alone, and
    what belongs to it keeps its digits in float16.
    """

    def __init__(self, beta: Any):
        self.beta = beta

    def _root(self, layout: Any, signed: bool) -> jax.Array:
        beta = plgpu.load(self.beta, layout=layout)
        root = jnp.sqrt(jnp.abs(beta))
        return jnp.where(beta < 0.0, -root, root) if signed else root

    def around(self, x: jax.Array, signed_rows: bool) -> jax.Array:
        """s x t or t x s."""
        # The barriers keep layout inference from searching through every pair of layouts of one buffer.
        rows = lax.optimization_barrier(per_row(self._root(ROWS, signed_rows), CHUNK))
        return x * rows * lax.optimization_barrier(per_column(self._root(COLS, not signed_rows), CHUNK))


def write_lower(lower: jax.Array, beta: Any, tile: Any) -> None:
    """-s L t of the strictly lower part of L [C, C] into a float16 tile, for `write_inverse`."""
    lower = Roots(beta).around(-lower, signed_rows=True)
    tile[...] = jnp.where(index(1) < index(0), lower, zeros(CHUNK, CHUNK)).astype(F16)
    plgpu.commit_smem()


def write_inverse(lower: Any, work: Any, beta: Any, out: Any, zero: Any, written_out: bool) -> None:
    """(I + diag(beta) L)^-1 diag(beta) into a bf16 tile, from what `write_lower` left; `work` is a float16 tile."""
    out[...] = Roots(beta).around(unit_lower_inverse(lower, work, zero, written_out), signed_rows=False).astype(BF16)
    plgpu.commit_smem()
