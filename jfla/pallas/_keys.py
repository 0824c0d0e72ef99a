"""q, k and the decay of a chunk in shared memory, by blocks of 64 channels: loaded, gated, normalised."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jfla._types import CHUNK
from jfla.gates import NORM_EPSILON
from jfla.pallas._gate import GateKind, log2_decay, with_resets
from jfla.pallas._operands import Place
from jfla.pallas._patterns import GATE_SCALE
from jfla.pallas._tile import F16, F32, WGMMA, index, per_column, per_row, zeros

BLOCK = 64  # key channels per tile
Q, K = range(2)


class KeyArrays(NamedTuple):
    """What the kernels of a chunk read. `rates` and `bias` belong to the gate, if there is one, `resets` to packing."""

    q: Any  # [B, T, H, K]
    k: Any
    g: Any  # [B, T, HV, K], raw when there is a gate
    rates: Any  # [HV, 2] or None
    bias: Any  # [HV, K] or None
    resets: Any  # [B, T] or None


class KeyOptions(NamedTuple):
    """Static. `time`: tokens from there on are padding."""

    scale: float
    qk_norm: bool
    time: int
    kind: GateKind = GateKind()

    @property
    def given(self) -> bool:
        """Whether g is the decay itself."""
        return self.kind.name == "given"


class Keys(NamedTuple):
    """The tiles of one chunk. q, k [blocks, C, 64] bf16 as the caller passed them; norms [2, up to blocks, C] float32.

    They may be a part of the channels, a power of two of blocks, from block `first` on, a multiple of it.
    """

    options: KeyOptions
    place: Place
    value_heads: int
    blocks: int
    q: Any
    k: Any
    norms: Any
    first: Any = 0
    factors: tuple[jax.Array, jax.Array] | None = None  # see `with_factors`

    def columns(self, b: Any) -> Any:
        """Where block b lies among all channels."""
        return pl.ds((b ^ self.first) * BLOCK, BLOCK)

    def view(self, ref: Any, b: Any) -> Any:
        """Block b of an array [B, T, heads, K] in device memory."""
        return self.place.rows(ref, self.value_heads, self.columns(b))

    def fetch(self, b: Any, q: Any, k: Any, barrier: Any) -> None:
        for source, target in ((q, self.q), (k, self.k)):
            plgpu.copy_gmem_to_smem(self.view(source, b), target.at[b], barrier)

    def measure(self, b: Any, arrays: KeyArrays | None = None) -> None:
        """Leaves the squared norms of rows where everybody finds them: of block b, and of others if `norms` has fewer.

        With `arrays` also of the blocks that are not among the tiles.
        """
        step, blocks = self.norms.shape[1], self.blocks if arrays is None else arrays.q.shape[-1] // BLOCK
        for which, tiles in enumerate((self.q, self.k)):
            total = zeros(CHUNK, BLOCK)
            for n in range(0, blocks, step):
                if arrays is None or n < self.blocks:
                    y = tiles[b ^ n]
                else:
                    y = plgpu.load(self.view(arrays[which], b ^ n), layout=WGMMA, optimized=False)
                total += y.astype(F32) * y.astype(F32)
            self.norms.at[which, b][...] = jnp.sum(total, axis=1)

    def scale(self, which: int) -> float:
        return self.options.scale if which == Q else 1.0

    def with_factors(self) -> "Keys":
        """The same for a stage that takes the norms from shared memory here, once, however often it reads q and k."""
        return self._replace(factors=(self.factor(Q), self.factor(K))) if self.options.qk_norm else self

    def factor(self, which: int) -> jax.Array:
        """[C]: 1 / norm of each row of q or k, under qk_norm."""
        if self.factors is not None:
            return self.factors[which]
        total = functools.reduce(jnp.add, [self.norms[which, b] for b in range(self.norms.shape[1])])
        return lax.rsqrt(total + NORM_EPSILON)

    def unit(self, which: int, b: Any) -> jax.Array:
        """[C, 64] float32 of q or k: normalised under qk_norm."""
        return self._normalised(which, (self.q, self.k)[which][b])

    def read(self, which: int, b: Any) -> jax.Array:
        """[C, 64] float32, as the recurrence reads it: q is scaled."""
        x = self.unit(which, b)
        return x * self.scale(which) if which == Q else x

    def _normalised(self, which: int, y: jax.Array) -> jax.Array:
        y = y.astype(F32)
        return y * per_row(self.factor(which), BLOCK) if self.options.qk_norm else y

    def raw_gate(self, arrays: KeyArrays, b: Any) -> jax.Array:
        """A block of g as the caller passed it, straight from device memory."""
        return plgpu.load(self.view(arrays.g, b), layout=WGMMA, optimized=False)

    def gate(self, raw: jax.Array, arrays: KeyArrays, bias: Any, resets: Any) -> jax.Array:
        """log2 decay of a block, as a float16 tile keeps it. bias: the block's [64] in shared memory; resets [C]."""
        kind, head = self.options.kind, self.place.head
        shift = None if bias is None else per_column(bias[...], CHUNK)
        rate = None if self.options.given else (arrays.rates[head, 0], arrays.rates[head, 1])
        g = log2_decay(kind, raw.astype(F32), rate, shift)
        if not self.options.given and self.options.time % CHUNK:
            g = jnp.where(index(0) + self.place.chunk * CHUNK < self.options.time, g, zeros(CHUNK, BLOCK))
        if resets is not None:
            g = with_resets(g, resets[...])
        return (g * GATE_SCALE).astype(F16)
