"""What one warpgroup sees of a chunk whose gradients KDA makes: tiles, patterns, scratch, and the other warpgroup."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jfla.pallas import _patterns
from jfla.pallas._ends import Ends
from jfla.pallas._keys import BLOCK, KeyArrays, Keys
from jfla.pallas._patterns import Window
from jfla.pallas._tile import BF16, F32

ENDS = (_patterns.ALL, _patterns.BEFORE, _patterns.AFTER)
KDA_STEPS = (*ENDS, *_patterns.PAIRS)
FIRST_PAIRS = len(ENDS)  # the first step of _patterns.PAIRS


class Sources(NamedTuple):
    """Device memory. `sums` and `adjoints` are patterns."""

    keys: KeyArrays
    ends: Ends
    sums: Any
    adjoints: Any


class Tiles(NamedTuple):
    """Shared memory. Tiles are [C, 64], vectors [C]; `blocks` counts 64 channels, `value_blocks` 64 of V."""

    q: Any  # [blocks] tiles
    k: Any
    norms: Any  # [2, blocks] vectors
    states: Any  # [blocks, 4] tiles: S^T, then from 2 on dS^T; afterwards scratch
    v_new: Any  # [value_blocks] tiles
    do: Any
    dv: Any
    weights: Any  # [2] tiles: W_q and W_k, strictly lower
    whole: Any  # [blocks] vectors, by channels: what all decays of the chunk get
    along: Any  # [2, blocks] vectors: what of dq and dk lies along q and k (qk_norm)
    written: Any  # vector: dv . v_new
    own: Any  # vector: the diagonal of W_q
    flags: Any  # [blocks] vectors: the strongest sum of decays up to a token
    adjoints: Any  # [2] tiles: a pattern for each warpgroup
    g: Any  # [blocks] float16 tiles
    bias: Any  # [blocks, 64]
    resets: Any  # vector, where sequences are packed
    sums: Any  # [2] float16 tiles: as `adjoints`, for the sums


class Barriers(NamedTuple):
    """What was copied in is waited for in the order in which it is needed."""

    keys: Any
    values: Any
    states: Any
    met: Any
    sums: Any  # [2 warpgroups]
    adjoints: Any


class Chunk(NamedTuple):
    """One warpgroup at one chunk. `zero` is 0, which the compiler cannot know; so is `here`, in one stage."""

    me: Any
    zero: Any
    here: Any
    keys: Keys
    source: Sources
    s: Tiles
    barriers: Barriers
    value_blocks: int

    def anew(self, stage: int) -> "Chunk":
        """The same for another stage, 0 .. 31, of which the compiler knows nothing yet.

        It would compute addresses and masks once and keep them in registers from the first stage to the last. From
        stage 5 on that is still so of tiles as the tensor cores find them, in whose addresses 14 bits count.
        Which number is whose was tried out, until no K and V spilled a register.
        """
        here = self.zero & (1 << stage)
        keys = self.keys._replace(place=self.keys.place._replace(chunk=self.keys.place.chunk + here))
        return self._replace(me=self.me + here, keys=keys, here=here)

    @property
    def all_channels(self) -> bool:
        """Whether K has no other part."""
        return self.source.keys.q.shape[-1] == self.keys.blocks * BLOCK

    def state_source(self, ref: Any, n: Any) -> Any:
        """Of an array [B, HV, N, V, K], what goes to a tile: 64 rows of this program's part of V."""
        place = self.keys.place
        parts = jnp.int32(self.keys.value_heads // ref.shape[1])
        rows = pl.ds((lax.rem(place.head, parts) * self.value_blocks + n) * BLOCK, BLOCK)
        return place._replace(head=lax.div(place.head, parts)).tile(ref).at[rows, self.keys.columns(self.me)]

    @property
    def sums(self) -> Window:
        return Window(self.source.sums, self.s.sums.at[self.me], self.barriers.sums.at[self.me])

    @property
    def adjoints(self) -> Window:
        return Window(self.source.adjoints, self.s.adjoints.at[self.me], self.barriers.adjoints.at[self.me])

    def at(self, n: Any) -> Any:
        """n, traced: a reference indexed by a Python int cannot be closed over by the accumulators of `dot`."""
        return self.here + n

    def values(self) -> list[Any]:
        return [self.at(n) for n in range(self.value_blocks)]

    def exponent(self, step: Any, steps: Any, flat: bool = False) -> jax.Array:
        """The sums of step `step` of KDA_STEPS, [C, 64]; the next pattern comes, if that is below `steps`.

        `flat`: transposed, of a pattern that is its own transpose.
        """
        x = self.sums.sums(self.s.g.at[self.me], flat)
        self.next(self.sums, step, steps)
        return x

    def spread(self, acc: jax.Array, step: Any, steps: Any, tiles: list[Any], flat: bool = False) -> jax.Array:
        """acc + the tiles' sum, given back to every decay that the step's exponents added up."""
        acc = self.adjoints.adjoint(acc, *tiles, flat=flat)
        self.next(self.adjoints, step, steps)
        return acc

    def next(self, window: Window, step: Any, steps: Any) -> None:
        plgpu.commit_smem()  # every warp is done with the pattern that the next one replaces
        pl.when((step + 1 < steps) & (self.me < self.keys.blocks))(lambda: window.fetch(step + 1))

    def meet(self) -> None:
        """Waits for the other warpgroup."""
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.barriers.met)
        plgpu.barrier_wait(self.barriers.met)

    def meet_channels(self) -> None:
        """Waits for the warpgroup of the other channels, if there is one."""
        self.meet() if self.keys.blocks > 1 else plgpu.commit_smem()

    def state(self, n: Any) -> Any:
        return self.s.states.at[lax.rem(self.me, jnp.int32(self.keys.blocks)), self.at(n)]

    def scratch(self, n: int) -> Any:
        """A tile that is free once S is read (0, 1), once both warpgroups have (2, 3), or once dS is read (4, 5)."""
        if n in (2, 3):
            return (self.s.do, self.s.dv)[n - 2].at[self.me]
        return self.state({0: 0, 1: 1, 4: 2, 5: 3}[n])

    def split(self, z: jax.Array, first: int = 0) -> list[Any]:
        """z as two bf16 tiles, in scratch `first` and the next."""
        high = z.astype(BF16)
        tiles = [self.scratch(first), self.scratch(first + 1)]
        tiles[0][...] = high
        tiles[1][...] = (z - high.astype(F32)).astype(BF16)
        plgpu.commit_smem()
        return tiles
