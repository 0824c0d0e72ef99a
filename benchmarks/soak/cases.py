"""Random calls of the ops for the soak run: what is static, what numbers they get, the arrays."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from benchmarks.internals import CHUNK

Arrays = dict[str, np.ndarray]
Indices = dict[str, np.ndarray]  # arguments without gradients, by name

MAIN = ("q", "k", "v", "g", "beta")
GATE = (
    "a_log",
    "dt_bias",
)  # arrays of heads alone: batch and time are summed in their gradients
TRANSFORMS = ("jit", "grad", "checkpoint", "vmap")
SPLIT = "shard_map"  # one more transform, where there are several devices
DECAYS = ("none", "weak", "usual", "strong", "mixed", "bounded")
BETAS = ("usual", "edge")
LAYOUTS = ("uniform", "skewed", "any")
STATES_EVERY = (64, 128, 320)  # tokens, of the chunked form
FREE_SLOTS = 2  # of a pool, which no row names
RUN = 16  # tokens in a row whose decays are of one size, where they are mixed
MAPPED = 2  # length of the axis that "vmap" maps over


@dataclasses.dataclass(frozen=True)
class Call:
    """What a compiled call is made for. `gate` is None, "softplus" or "sigmoid".

    `segments` is 0 without packing. `state` is the dtype of the initial state, or None. With
    segments, a state or `final` makes one state for each of them. `narrow` gives g and beta the
    dtype of q, too. `states_every` is n where the states after every n tokens come back, in the
    recurrent form 1; else 0. With `pool` the recurrent form's states are slots of a pool, and rows
    have different numbers of tokens.
    """

    op: str
    form: str = "chunk"
    transform: str = "grad"
    dtype: str = "float32"
    batch: int = 1
    time: int = 64
    heads: int = 1
    group: int = 1
    key_dim: int = 64
    value_dim: int = 64
    gate: str | None = None
    dt_bias: bool = False
    beta_max: float | None = None
    qk_norm: bool = False
    scale: float | None = None
    state: str | None = None
    final: bool = False
    segments: int = 0
    narrow: bool = False
    states_every: int = 0
    pool: bool = False

    @property
    def value_heads(self) -> int:
        return self.heads * self.group

    @property
    def state_shape(self) -> tuple[int, ...]:
        """Of the initial state."""
        if self.pool:
            return (self.batch + FREE_SLOTS, *self._one_state)
        slots = (self.segments,) if self.segments else ()
        return (self.batch, *slots, *self._one_state)

    @property
    def final_shape(self) -> tuple[int, ...]:
        """Of the states that come back."""
        if not self.states_every:
            return self.state_shape
        return (self.batch, -(-self.time // self.states_every), *self._one_state)

    @property
    def _one_state(self) -> tuple[int, ...]:
        return (self.value_heads, self.key_dim, self.value_dim)

    def dtype_of(self, name: str) -> str:
        """The dtype of an array that goes in, or of the cotangent of a result."""
        if name == "initial_state":
            return self.state or "float32"
        if name == "final_state":
            return "bfloat16" if self.state == "bfloat16" else "float32"
        if name in GATE:
            return "float32"
        return self.dtype if name not in ("g", "beta") or self.narrow else "float32"


@dataclasses.dataclass(frozen=True)
class Numbers:
    """What numbers a call gets, which it is not compiled for."""

    seed: int = 0
    decays: str = "usual"
    betas: str = "usual"
    layout: str = "any"
    repeated_keys: bool = False


@dataclasses.dataclass(frozen=True)
class Case:
    """One call with its numbers: all that a failure needs to be seen again."""

    call: Call
    numbers: Numbers


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How large calls may be: T, and tokens times value heads."""

    time: int
    tokens: int
    dims: tuple[int, ...]


CPU_SIZES = Sizes(time=300, tokens=1200, dims=(8, 16, 64, 96))
INTERPRETED_SIZES = Sizes(time=70, tokens=280, dims=(16, 64))
GPU_SIZES = Sizes(time=8192, tokens=2**16, dims=(32, 64, 96, 128, 192, 256))


def draw_call(rng: np.random.Generator, sizes: Sizes, devices: int = 1) -> Call:
    """Any call that the public ops take; with several devices, also split over all of them."""

    def one(*values: Any) -> Any:
        return values[rng.integers(len(values))]

    form = one("chunk", "chunk", "chunk", "recurrent")
    transform = one(*TRANSFORMS, *([SPLIT] if devices > 1 else []))
    batches = {"vmap": (MAPPED, 2 * MAPPED), SPLIT: (devices, 2 * devices)}
    batch = one(*batches.get(transform, (1, 1, 2, 3)))
    heads, group = one((1, 1), (1, 2), (2, 1), (2, 2), (3, 1), (4, 2))
    most = max(1, sizes.tokens // (batch * heads * group))
    time = _time(rng, min(sizes.time, most) if form == "chunk" else min(24, most))
    dtype = one("float32", "bfloat16", "bfloat16", "float16")
    state = one(None, "float32", "float32", "bfloat16")
    final = one(False, True)
    segments = one(0, 0, 1, 3, 8)
    states_every = 0
    pool = False
    if final and not segments:
        states_every = one(0, 0, *(STATES_EVERY if form == "chunk" else (1, 1)))
        mapped = transform in batches
        may_be_pool = form == "recurrent" and state and not states_every
        pool = bool(may_be_pool and not mapped and one(False, True))
    return Call(
        op=one("kda", "gdn"),
        form=form,
        transform=transform,
        dtype=dtype,
        batch=batch,
        time=time,
        heads=heads,
        group=group,
        key_dim=one(*sizes.dims),
        value_dim=one(*sizes.dims),
        gate=one(None, None, "softplus", "sigmoid"),
        dt_bias=one(False, True),
        beta_max=one(None, 1.0, 2.0),
        qk_norm=one(False, True),
        scale=one(None, None, 1.0),
        state=state,
        final=final,
        segments=segments,
        narrow=one(False, True),
        states_every=states_every,
        pool=pool,
    )


def draw_numbers(rng: np.random.Generator) -> Numbers:
    """Numbers of any kind."""

    def one(*values: Any) -> Any:
        return values[rng.integers(len(values))]

    seed = int(rng.integers(2**32))
    repeated = one(False, False, False, True)
    return Numbers(seed, one(*DECAYS), one(*BETAS), one(*LAYOUTS), repeated)


def _time(rng: np.random.Generator, most: int) -> int:
    """Around multiples of the chunk's length, or anything, each order of magnitude alike."""
    if rng.random() < 0.4:
        edge = CHUNK * int(2 ** rng.integers(0, 8)) + int(rng.integers(-1, 2))
        return max(1, min(edge, most))
    return max(1, round(float(most ** rng.random())))


def draw_arrays(case: Case) -> tuple[Arrays, Indices, Arrays]:
    """(arrays that have gradients, segment ids and slots, cotangents), in the dtypes of the call."""
    call = case.call
    numbers = case.numbers
    rng = np.random.default_rng(numbers.seed)
    tokens = (call.batch, call.time)
    values = (*tokens, call.value_heads)
    per_token = (
        (call.value_heads, call.key_dim) if call.op == "kda" else (call.value_heads,)
    )
    keys = (*tokens, call.heads, call.key_dim)
    x = {
        "q": _unit(rng.standard_normal(keys)),
        "k": _unit(rng.standard_normal(keys)),
        "v": rng.standard_normal((*values, call.value_dim)),
    }
    if numbers.repeated_keys:
        again = rng.random((*tokens, 1, 1)) < 0.8
        x["k"] = np.where(again, x["k"][:, :1], x["k"])
    raw = rng.standard_normal((*tokens, *per_token))
    if call.gate is None:
        x["g"] = _decays(rng, raw, numbers.decays)
    else:
        x["g"] = raw * (3.0 if numbers.decays == "strong" else 1.0)
        x["a_log"] = np.log(rng.uniform(0.1, 16.0, call.value_heads))
    if call.gate is not None and call.dt_bias:
        x["dt_bias"] = rng.standard_normal(per_token)
    x["beta"] = _betas(rng, values, call, numbers)
    if call.state is not None:
        x["initial_state"] = rng.standard_normal(call.state_shape)
    indices: Indices = {}
    if call.segments:
        rows = [
            _ids(rng, call.time, call.segments, numbers.layout)
            for _ in range(call.batch)
        ]
        indices["segment_ids"] = np.stack(rows)
    if call.pool:
        lengths = rng.integers(0, call.time + 1, (call.batch, 1))
        indices["segment_ids"] = (np.arange(call.time) < lengths).astype(np.int32)
        slots = rng.permutation(call.state_shape[0])[: call.batch]
        is_idle = rng.random(call.batch) < 0.2
        indices["state_slots"] = np.where(is_idle, -1, slots).astype(np.int32)
    cotangents = {"output": rng.standard_normal(x["v"].shape)}
    if call.final:
        cotangents["final_state"] = rng.standard_normal(call.final_shape)
    return _rounded(call, x), indices, _rounded(call, cotangents)


def _rounded(call: Call, arrays: Arrays) -> Arrays:
    return {
        name: a.astype(jnp.dtype(call.dtype_of(name))) for name, a in arrays.items()
    }


def _unit(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def _decays(rng: np.random.Generator, x: np.ndarray, kind: str) -> np.ndarray:
    """Natural-log decays of normal numbers.

    - none: 0. weak: log-sigmoid / 16. usual: log-sigmoid.
    - bounded: -5 sigmoid. strong: 0 to -30.
    - mixed: runs of tokens of one size each, 0 to -1000.
    """
    log_sigmoid = -np.logaddexp(0.0, -x)
    if kind == "none":
        return np.zeros_like(x)
    if kind == "bounded":
        return -5.0 * np.exp(log_sigmoid)
    if kind == "strong":
        return -30.0 * rng.random(x.shape)
    if kind == "mixed":
        runs = -(-x.shape[1] // RUN)
        size = rng.choice(
            [0.0, 1e-3, 1.0, 50.0, 1000.0], (x.shape[0], runs, *x.shape[2:])
        )
        return -np.repeat(size, RUN, axis=1)[:, : x.shape[1]]
    return log_sigmoid / 16 if kind == "weak" else log_sigmoid


def _betas(
    rng: np.random.Generator, shape: Any, call: Call, numbers: Numbers
) -> np.ndarray:
    """In 0 to 1, or 0, 1 and 2 alone; or logits of normal size."""
    if call.beta_max is not None:
        return 2.0 * rng.standard_normal(shape)
    if numbers.betas == "edge":
        return rng.choice([0.0, 1.0, 2.0], shape)
    return rng.random(shape)


def _ids(rng: np.random.Generator, time: int, segments: int, layout: str) -> np.ndarray:
    """Segment ids of one row: 1 .. S, then 0 on padding; "any" leaves some segments empty."""
    used = time if rng.random() < 0.5 else int(rng.integers(0, time + 1))
    if layout == "uniform":
        ends = np.arange(1, segments + 1) * used // segments
    elif layout == "skewed":
        ends = used - (segments - 1) + np.arange(segments)
    else:
        ends = np.sort(rng.integers(0, used + 1, segments))
        ends[-1] = used
    ids = 1 + np.searchsorted(np.maximum(ends, 0), np.arange(time), side="right")
    return np.where(np.arange(time) < used, np.minimum(ids, segments), 0).astype(
        np.int32
    )
