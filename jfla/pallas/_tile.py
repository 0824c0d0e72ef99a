"""What every kernel is built from: tile buffers, matmuls of value semantics, masks, and the triangular inverse."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jfla._types import CHUNK
from jfla.pallas._launch import interpreting

F32, BF16, F16 = jnp.float32, jnp.bfloat16, jnp.float16
WGMMA = plgpu.Layout.WGMMA
SHARED_MEMORY = 226 * 1024  # bytes of a program's tiles, beside barriers and the like: 227 KiB in all
ROWS, COLS = WGMMA.reduce(1), WGMMA.reduce(0)  # one value per row; one value per column


def tile_buffer(*shape: int, dtype: Any = BF16) -> Any:
    """Shared memory for [.., rows, columns] tiles that TMA writes and the tensor cores read: 128-byte swizzle."""
    columns = 128 // jnp.dtype(dtype).itemsize
    tiling: Any = plgpu.TilingTransform  # to a type checker it is abstract
    swizzle: Any = plgpu.SwizzleTransform
    return plgpu.SMEM(shape, dtype, transforms=(tiling((8, columns)), swizzle(128)))


def load(ref: Any) -> jax.Array:
    """Where the value meets one whose layout is known, `ref[...]` takes on that one, and compiles sooner.

    Every layout that is asked for is one that layout inference tries out, and goes through all that is open each time.
    """
    return plgpu.load(ref, layout=WGMMA)


def zeros(rows: int, columns: int) -> jax.Array:
    return plgpu.layout_cast(jnp.zeros((rows, columns), F32), WGMMA)


def index(axis: int, numbers: Any = None) -> jax.Array:
    """[C, C]: the row (0) or column (1) number of every element, from `numbers` of `write_numbers` if they are given.

    Broadcast from one line: as an array of two dimensions every element's number would be kept in a register. The
    compiler still keeps one for every column, from chunk to chunk; what it has to read it does not.
    """
    line = lax.iota(jnp.int32, CHUNK) if numbers is None else numbers[...]
    return per_row(line, CHUNK) if axis == 0 else per_column(line, CHUNK)


def number_buffer(warpgroups: int) -> Any:
    return plgpu.SMEM((warpgroups, CHUNK), jnp.int32)


def write_numbers(numbers: Any) -> None:
    """0, 1 .. into [C] in shared memory."""
    numbers[...] = plgpu.layout_cast(lax.iota(jnp.int32, CHUNK), ROWS)
    plgpu.commit_smem()


def per_row(x: jax.Array, columns: int) -> jax.Array:
    """Without a layout of its own, as in `per_column`: it follows from what this meets, and x's from it."""
    return lax.broadcast_in_dim(x, (x.shape[0], columns), [0])


def per_column(x: jax.Array, rows: int) -> jax.Array:
    return lax.broadcast_in_dim(x, (rows, x.shape[0]), [1])


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
    return _settled(pl.run_state(issue)([accumulator.init(acc) for acc, *_ in sums]))


def _settled(results: list[jax.Array]) -> list[jax.Array]:
    """Keeps the compiler from moving what is done with results before the wait for them.

    The hardware's compiler sees that, and from then on it lets no two matmuls of the kernel run together.
    """
    return [lax.optimization_barrier(x) for x in results]


def dots_while(work: Callable[[], Any], *sums: list[tuple[Any, Any]]) -> tuple[list[jax.Array], Any]:
    """Every sum of a @ b, from 0, and what `work` returns, which the warpgroup does while the tensor cores are busy."""
    if interpreting():
        return dots(*[(zeros(pairs[0][0].shape[0], pairs[0][1].shape[1]), *pairs) for pairs in sums]), work()

    def body(*accumulators: Any) -> tuple[list[jax.Array], Any]:
        for accumulator, pairs in zip(accumulators, sums):
            for a, b in pairs:
                plgpu.wgmma(accumulator, a, b)
        done = work()
        return _settled([accumulator[...] for accumulator in accumulators]), done

    shapes = [(pairs[0][0].shape[0], pairs[0][1].shape[1]) for pairs in sums]
    accumulator: Any = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]
    return pl.run_scoped(body, *[accumulator(shape, F32) for shape in shapes])


def pair_decay(before: Any, scale: float = 1.0) -> jax.Array:
    """[C, C]: scale * the decay from token j to token i, from the running sum of log2 decay; 1 above the diagonal."""
    # The barriers keep layout inference from searching through every pair of layouts of one buffer.
    log_scale = math.log2(scale)
    rows = lax.optimization_barrier(per_row(plgpu.load(before, layout=ROWS) + log_scale, CHUNK))
    between = rows - lax.optimization_barrier(per_column(plgpu.load(before, layout=COLS), CHUNK))
    return jnp.exp2(jnp.minimum(between, log_scale))


def blocks_apart(apart: Any, level: Any, numbers: Any = None, zero: Any = 0) -> jax.Array:
    """[C, C]: tokens of one block of 2^level (`apart` 0), or of the two halves of a block of 2 * 2^level (1).

    Lines are shifted and compared: element by element it would be three operations more for every pair. `zero`: a 0,
    see Turn.
    """
    line = lambda: lax.iota(jnp.int32, CHUNK)  # rows and columns are laid out differently, so not one for both
    columns = per_column(block_of(line() if numbers is None else numbers[...], level), CHUNK)
    return per_row(block_of(line() + zero, level) ^ apart, CHUNK) == columns


def block_of(line: jax.Array, level: Any) -> jax.Array:
    """The block of 2^level tokens that each token is in."""
    return lax.shift_right_logical(line, jnp.broadcast_to(jnp.int32(level), line.shape))


LEVELS = 6  # halvings of a chunk: blocks of 32 .. 1


def mask_buffer() -> Any:
    """For the masks of `Inverse`: the diagonal; then for every level the squares that join two of its blocks."""
    return tile_buffer(1 + LEVELS, CHUNK, CHUNK, dtype=F16)


def write_masks(masks: Any, numbers: Any, worker: Any, workers: int) -> None:
    """This worker's share of the masks."""

    @pl.loop(0, -(-(1 + LEVELS) // workers))
    def _(n: Any) -> None:
        i = n * workers + worker

        @pl.when(i <= LEVELS)
        def _():
            here = blocks_apart(jnp.minimum(i, 1), jnp.maximum(i - 1, 0), numbers) & (index(1, numbers) <= index(0))
            masks.at[i][...] = jnp.where(here, 1.0 + zeros(CHUNK, CHUNK), zeros(CHUNK, CHUNK)).astype(F16)

    plgpu.commit_smem()


class Inverse(NamedTuple):
    """(I - N)^-1 of the strictly lower N in the float16 tile `lower`; `work` is another one. `zero`: see Turn.

    By doubling blocks, X <- X + X N' X with the N' of the squares that join two blocks: no power of N is formed, so it
    is as stable as substitution. float16 is 8 times finer than bfloat16 at the same cost, and wide enough: in a
    recurrence that does not blow up the entries of N and X are bounded by beta |k_i| |k_j|.

    `masks` is what `write_masks` left, where there is room: without it a square's mask is worked out element by
    element, which takes four times the instructions.
    """

    lower: Any
    work: Any
    zero: Any
    numbers: Any = None
    masks: Any = None

    def square(self, level: Any) -> jax.Array:
        n = self.lower[...]
        if self.masks is not None:
            return n * plgpu.load(self.masks.at[level + 1 + self.zero], layout=WGMMA)
        here = blocks_apart(1, level, self.numbers, self.zero * level)
        return jnp.where(here, n, zeros(CHUNK, CHUNK).astype(F16))

    def diagonal(self) -> jax.Array:
        if self.masks is not None:
            return plgpu.load(self.masks.at[self.zero], layout=WGMMA).astype(F32)
        same = index(0) == index(1, self.numbers)
        return jnp.where(same, zeros(CHUNK, CHUNK) + 1.0, zeros(CHUNK, CHUNK))

    def double(self, level: Any, x: jax.Array) -> jax.Array:
        x16 = x.astype(F16)
        self.work[...] = x16
        plgpu.commit_smem()
        right = dot(zeros(CHUNK, CHUNK), (self.square(level), self.work)).astype(F16)
        self.work[...] = right
        plgpu.commit_smem()
        return dot(x, (x16, self.work))

    def __call__(self) -> jax.Array:
        return lax.fori_loop(1, LEVELS, self.double, self.diagonal() + self.square(0).astype(F32))


def write_roots(beta: Any, roots: Any) -> None:
    """s and t [2, C] of every token, beta = s t and |s| = |t|: what the two sides of the inverse are scaled with."""
    beta = plgpu.load(beta, layout=ROWS)
    root = jnp.sqrt(jnp.abs(beta))
    roots.at[0][...] = jnp.where(beta < 0.0, -root, root)
    roots.at[1][...] = root


def around(x: jax.Array, roots: Any, zero: Any, inverse: bool = False) -> jax.Array:
    """s x t of x [C, C], or t x s for the inverse, of what `write_roots` left.

    (I + diag(beta) L)^-1 diag(beta) = t (I + s L t)^-1 s: a small beta makes small neither rows nor columns alone, and
    what belongs to it keeps its digits in float16.
    """
    rows, columns = roots[zero + inverse], roots[zero + 1 - inverse]
    # The barriers keep layout inference from searching through every pair of layouts of one buffer.
    x = x * lax.optimization_barrier(per_row(rows, CHUNK))
    return x * lax.optimization_barrier(per_column(columns, CHUNK))


def write_lower(lower: jax.Array, roots: Any, tile: Any, zero: Any) -> None:
    """-s L t into a float16 tile, of which `Inverse` reads what is strictly lower."""
    tile[...] = around(-lower, roots, zero).astype(F16)
    plgpu.commit_smem()


def write_inverse(inverse: Inverse, roots: Any, out: Any) -> None:
    """(I + diag(beta) L)^-1 diag(beta) into a bf16 tile, from what `write_lower` left."""
    out[...] = around(inverse(), roots, inverse.zero, inverse=True).astype(BF16)
    plgpu.commit_smem()
