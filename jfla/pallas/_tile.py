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
    """The row (0) or column (1) number of every element."""
    return plgpu.broadcasted_iota(jnp.int32, (rows, columns), axis, layout=WGMMA)


def per_row(x: jax.Array, columns: int) -> jax.Array:
    return plgpu.layout_cast(lax.broadcast_in_dim(x, (x.shape[0], columns), [0]), WGMMA)


def per_column(x: jax.Array, rows: int) -> jax.Array:
    return plgpu.layout_cast(lax.broadcast_in_dim(x, (rows, x.shape[0]), [1]), WGMMA)


def transposed(ref: Any) -> Any:
    return ref.transpose((1, 0))


def dot(acc: jax.Array, *pairs: tuple[Any, Any]) -> jax.Array:
    """acc + sum of a @ b on the tensor cores. a: registers or shared memory, b: shared memory, both 16 bit.

    Interpret mode simulates no matmul with operands in registers, so there it is a plain dot.
    """
    if interpreting():
        for a, b in pairs:
            acc = acc + jnp.dot(a[...].astype(F32), b[...].astype(F32), precision="highest")
        return acc

    def issue(ref: Any) -> None:
        for a, b in pairs:
            plgpu.wgmma(ref, a, b)

    accumulator: Any = plgpu.WGMMAAccumulatorRef.init(acc)
    return pl.run_state(issue)(accumulator)


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


def below(level: Any) -> jax.Array:
    """The squares under the diagonal blocks of 2 * 2^level: late rows, early columns."""
    return (apart(level) == 1) & (index(1) < index(0))


def unit_lower_inverse(tile: Any) -> jax.Array:
    """(I + L)^-1 of the strictly lower L in a float16 tile, which it overwrites.

    By doubling blocks, X <- X - mask(X (L X)): no power of L is formed, so it is as stable as substitution. float16 is
    8 times finer than bfloat16 at the same cost, and wide enough: in a recurrence that does not blow up the entries of
    L and X are bounded by beta |k_i| |k_j|.
    """
    lower = plgpu.load(tile, layout=WGMMA)

    def double(level, x):
        x16 = x.astype(F16)
        tile[...] = x16
        plgpu.commit_smem()
        right = dot(zeros(CHUNK, CHUNK), (lower, tile)).astype(F16)
        tile[...] = right
        plgpu.commit_smem()
        return x - jnp.where(below(level), dot(zeros(CHUNK, CHUNK), (x16, tile)), zeros(CHUNK, CHUNK))

    zero = zeros(CHUNK, CHUNK)
    x = jnp.where(index(0) == index(1), zero + 1.0, zero) - jnp.where(below(0), lower.astype(F32), zero)
    return lax.fori_loop(1, 6, double, x)


def write_inverse(lower: jax.Array, tile: Any, beta: Any, out: Any) -> None:
    """(I + diag(beta) L)^-1 diag(beta) of the strictly lower part of `lower` into a bf16 tile; `tile` is float16 scratch.

    As t (I + s L t)^-1 s with s t = beta, so that a small beta makes small neither rows nor columns alone, and its
    relative digits survive.
    """
    root = lambda layout: jnp.sqrt(jnp.abs(plgpu.load(beta, layout=layout)))
    signed = lambda layout: jnp.where(plgpu.load(beta, layout=layout) < 0.0, -root(layout), root(layout))
    # The barriers keep layout inference from searching through every pair of layouts of one buffer.
    rows = lambda x: lax.optimization_barrier(per_row(x, CHUNK))
    columns = lambda x: lax.optimization_barrier(per_column(x, CHUNK))
    lower = lower * rows(signed(ROWS)) * columns(root(COLS))
    tile[...] = jnp.where(index(1) < index(0), lower, zeros(CHUNK, CHUNK)).astype(F16)
    inverse = unit_lower_inverse(tile) * rows(root(ROWS)) * columns(signed(COLS))
    out[...] = inverse.astype(BF16)
    plgpu.commit_smem()
