"""q, k and the decay of a chunk in shared memory, by blocks of 64 channels: loaded, gated, normalised."""

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
from jfla.pallas._tile import COLS, F16, F32, ROWS, WGMMA, index, load, per_column, per_row, zeros

BLOCK = 64  # key channels per tile
Q, K = range(2)


class KeyArrays(NamedTuple):
    """What the kernels of a chunk read. `rates` [HV, 2] and `bias` [HV, K] belong to the gate, `resets` to packing."""

    q: Any  # [B, T, H, K]
    k: Any
    g: Any  # [B, T, HV, K], raw when there is a gate
    rates: Any
    bias: Any
    resets: Any  # [B, T] or None


class KeyOptions(NamedTuple):
    """Static. `time`: tokens from there on are padding."""

    scale: float
    qk_norm: bool
    time: int
    kind: GateKind = GateKind()


class Keys(NamedTuple):
    """The tiles of one chunk. q, k [blocks, C, 64] bf16 as the caller passed them; norms [2, blocks, C] float32."""

    options: KeyOptions
    place: Place
    value_heads: int
    blocks: int
    q: Any
    k: Any
    norms: Any

    def fetch(self, b: Any, q: Any, k: Any, barrier: Any) -> None:
        for source, target in ((q, self.q), (k, self.k)):
            columns = pl.ds(b * BLOCK, BLOCK)
            plgpu.copy_gmem_to_smem(self.place.rows(source, self.value_heads, columns), target.at[b], barrier)

    def measure(self, b: Any) -> None:
        """Leaves the squared norms of the rows of a block where everybody finds them."""
        for which, source in enumerate((self.q, self.k)):
            y = load(source.at[b]).astype(F32)
            self.norms.at[which, b][...] = jnp.sum(y * y, axis=1)

    def scale(self, which: int) -> float:
        return self.options.scale if which == Q else 1.0

    def factor(self, which: int, layout: Any = ROWS) -> jax.Array:
        """[C]: 1 / norm of each row of q or k, under qk_norm."""
        total = sum(plgpu.load(self.norms.at[which, b], layout=layout) for b in range(self.blocks))
        return lax.rsqrt(total + NORM_EPSILON)

    def reread(self, which: int, source: Any, b: Any) -> jax.Array:
        """The same as `read` from device memory, when the tile holds something else by now."""
        view = self.place.rows(source, self.value_heads, pl.ds(b * BLOCK, BLOCK))
        return self._normalised(which, plgpu.load(view, layout=WGMMA, optimized=False)) * self.scale(which)

    def unit(self, which: int, b: Any) -> jax.Array:
        """[C, 64] float32 of q or k: normalised under qk_norm."""
        return self._normalised(which, load((self.q, self.k)[which].at[b]))

    def read(self, which: int, b: Any) -> jax.Array:
        """[C, 64] float32, as the recurrence reads it: q is scaled."""
        return self.unit(which, b) * self.scale(which)

    def _normalised(self, which: int, y: jax.Array) -> jax.Array:
        y = y.astype(F32)
        return y * per_row(self.factor(which), BLOCK) if self.options.qk_norm else y

    def raw_gate(self, arrays: KeyArrays, b: Any) -> jax.Array:
        """A block of g as the caller passed it, straight from device memory."""
        source = self.place.rows(arrays.g, self.value_heads, pl.ds(b * BLOCK, BLOCK))
        return plgpu.load(source, layout=WGMMA, optimized=False)

    def gate(self, raw: jax.Array, arrays: KeyArrays, bias: Any, resets: Any) -> jax.Array:
        """log2 decay of a block, as a float16 tile keeps it. bias: the block's [64] in shared memory; resets [C]."""
        kind, head = self.options.kind, self.place.head
        shift = None if bias is None else per_column(plgpu.load(bias, layout=COLS), CHUNK)
        g = log2_decay(kind, raw.astype(F32), (arrays.rates[head, 0], arrays.rates[head, 1]), shift)
        if kind.name != "given" and self.options.time % CHUNK:
            g = jnp.where(index(0) + self.place.chunk * CHUNK < self.options.time, g, zeros(CHUNK, BLOCK))
        if resets is not None:
            g = with_resets(g, plgpu.load(resets, layout=ROWS))
        return (g * GATE_SCALE).astype(F16)
