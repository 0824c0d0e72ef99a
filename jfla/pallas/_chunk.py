"""What one warpgroup sees of a chunk whose gradients it makes: tiles, patterns, scratch, and the other warpgroup."""

from typing import Any, NamedTuple

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jfla.pallas import _patterns
from jfla.pallas._keys import KeyArrays, Keys
from jfla.pallas._patterns import Window
from jfla.pallas._tile import BF16, F32

LEVELS = 6
ENDS = (_patterns.ALL, _patterns.BEFORE, _patterns.AFTER)
KDA_STEPS = (*ENDS, *map(_patterns.stretch, reversed(range(LEVELS))))
GDN_STEPS = (_patterns.BEFORE, *ENDS)


class Ends(NamedTuple):
    """What the scans left: the states and their cotangents at a chunk's two ends, and what passed between."""

    states: Any  # [B, HV, N, V, K] bf16, S^T at the chunk's start
    dends: Any  # the same of dS, at its end
    v_new: Any  # [B, T, HV, V] bf16
    do: Any
    dv: Any


class Gradients(NamedTuple):
    """Per value head. dq, dk [B, T, HV, K]; dg [B, T, HV, K] (KDA) or [B, HV, N, C]; dv . v_new [B, HV, N, C]."""

    dq: Any
    dk: Any
    dg: Any
    written: Any


class Chunk(NamedTuple):
    """The references of one warpgroup in one chunk. Tiles are [C, 64]; a state takes one for each 64 of V."""

    me: Any
    keys: Keys
    arrays: KeyArrays
    states: Any  # [4] tiles of this warpgroup's channels: S^T, then from 2 on dS^T
    value_blocks: int
    v_new: Any  # [value_blocks] tiles
    do: Any
    dv: Any
    weights: Any  # [2] tiles: W_q with its diagonal, W_k + W_k^T
    g: Any  # [blocks] float16 tiles (KDA)
    before: Any  # [C] running sum of log2 decay (GDN)
    rows: Any  # [2, 2, C]: parts of GDN's dg
    along: Any  # [2, blocks, C]: what of dq and dk lies along q and k (qk_norm)
    sums: Any  # Window, KDA
    adjoints: Window
    other: Any  # barrier

    def at(self, n: int) -> Any:
        """n, traced: a reference indexed by a Python int cannot be closed over by the accumulators of `dot`."""
        return self.me * 0 + n

    def values(self) -> list[Any]:
        return [self.at(n) for n in range(self.value_blocks)]

    def exponent(self, step: Any) -> jax.Array:
        """KDA: the sums of step `step` of KDA_STEPS, [C, 64]."""
        x = self.sums.sums(self.g.at[self.me])
        self.next(self.sums, step, len(KDA_STEPS))
        return x

    def spread(self, acc: jax.Array, step: Any, steps: int, tiles: list[Any]) -> jax.Array:
        """acc + the tiles' sum, given back to every decay that the step's exponents added up."""
        acc = self.adjoints.adjoint(acc, *tiles)
        self.next(self.adjoints, step, steps)
        return acc

    def next(self, window: Window, step: Any, steps: int) -> None:
        """Fetches the next pattern, but for the first of by_halving, which may not be needed."""
        plgpu.commit_smem()  # every warp is done with the pattern that the next one replaces
        wanted = (step + 1 < steps) & (step + 1 != 3 if steps == len(KDA_STEPS) else True)
        pl.when(wanted & (self.me < self.keys.blocks))(lambda: window.fetch(step + 1))

    def fetch(self, step: int) -> None:
        for window in (self.sums, self.adjoints):
            if window is not None:
                window.fetch(step)

    def meet(self) -> None:
        """Waits for the warpgroup of the other channels, if there is one."""
        plgpu.commit_smem()
        if self.keys.blocks > 1:
            plgpu.barrier_arrive(self.other)
            plgpu.barrier_wait(self.other)

    def scratch(self, n: int) -> Any:
        """A tile that is free once the states are read (0, 1) or once both warpgroups have met them (2, 3)."""
        return self.states.at[self.at(n)] if n < 2 else (self.do, self.dv)[n - 2].at[self.me]

    def split(self, z: jax.Array) -> list[Any]:
        """z as two bf16 tiles, in scratch 0 and 1."""
        high = z.astype(BF16)
        tiles = [self.scratch(0), self.scratch(1)]
        tiles[0][...] = high
        tiles[1][...] = (z - high.astype(F32)).astype(BF16)
        plgpu.commit_smem()
        return tiles
