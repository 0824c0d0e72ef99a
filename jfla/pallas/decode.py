"""Kernel: the recurrence itself for a few tokens, in one pass over the state: gate, norms, update and output.

A program holds a block of V columns of one state in registers, rows (K) over lanes and registers, so that sums over K
are a few shuffles. It reads the block from device memory with 16 bytes per thread and writes it back where it was; what
belongs to the tokens is a thousandth of that, and is prepared through shared memory while the block is on its way.
Where the state after every token is wanted, each is written to a place of its own, and the initial one is only read.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from jfla._types import DeltaRuleOutput, Inputs, Options
from jfla.gates import NORM_EPSILON
from jfla.pallas import _config
from jfla.pallas._gate import GateKind, gate_kind, log2_decay
from jfla.pallas._launch import interpreted, launch
from jfla.pallas._tile import F32

_WARPS, _LANES, _VECTOR = 4, 32, 4  # of a warpgroup; of a warp; float32 in 16 bytes


class Arrays(NamedTuple):
    """The arguments of the kernel, each an array, a reference or None."""

    q: Any  # [B, T, H, K]
    k: Any
    v: Any  # [B, T, HV, V]
    g: Any  # [B, T, HV, G]
    beta: Any  # [B, T, HV]
    a_log: Any  # [HV] float32
    dt_bias: Any  # [HV, G] float32
    state: Any  # [B, HV, K, V] float32; written in place where the final state, and no other, is wanted


class Tokens(NamedTuple):
    """Shared memory, [T, ...] float32: what the update reads, token by token."""

    q: Any
    k: Any
    v: Any
    decay: Any
    beta: Any  # K times the same number: a lone one cannot be stored


class Block(NamedTuple):
    """What a program works on: some columns of one value head of one sequence; the head of q and k that it reads."""

    batch: Any
    value_head: Any
    head: Any
    columns: Any


class Layouts(NamedTuple):
    """How arrays lie over the threads of a warpgroup."""

    state: Any  # [K, v_block]
    rows: Any  # [K] beside it
    columns: Any  # [.., v_block] above it
    keys: Any  # [T, K]
    tokens: Any  # [T]


def layouts(time: int, key_dim: int, v_block: int) -> Layouts:
    """A thread holds squares of (usually) 4 by 4 of the state. Warps share its columns, and the tokens to prepare."""
    across = v_block // _WARPS // _VECTOR
    down = _LANES // across
    run = min(4, key_dim // down)
    tiles = (down * run, v_block), (down * run, v_block // _WARPS), (run, _VECTOR)
    state = plgpu.Layout.TILED(plgpu.Tiling(tiles), warp_dims=(-5,), lane_dims=(-4, -3), vector_dim=-1)
    apart = math.gcd(time, _WARPS)
    copies = (plgpu.Replicated(_WARPS // apart),) if apart < _WARPS else ()
    row = min(key_dim, _LANES * _VECTOR)
    keys = plgpu.Layout.TILED(
        plgpu.Tiling(((apart, row), (row // _LANES,))),
        warp_dims=((-3,) if apart > 1 else ()) + copies,
        lane_dims=(-2,),
        vector_dim=-1,
    )
    return Layouts(state, state.reduce(1), state.reduce(0), keys, keys.reduce(1))


def _load(ref: Any, layout: Any) -> jax.Array:
    return plgpu.load(ref, layout=layout, optimized=False)


def _store(ref: Any, x: jax.Array) -> None:
    if hasattr(plgpu, "store"):
        plgpu.store(ref, x, optimized=False)
    else:  # JAX 0.11
        ref[...] = x


def _spread(x: jax.Array, shape: tuple[int, ...], axis: int, layout: Any) -> jax.Array:
    return plgpu.layout_cast(lax.broadcast_in_dim(x, shape, [axis]), layout)


def _softplus(x: jax.Array) -> jax.Array:
    """To float32 also where it is small, because decays multiply over thousands of steps: 2 atanh(u / (2 + u))."""
    u = jnp.exp(-jnp.abs(x))
    s = u / (u + 2.0)
    square, series = s * s, s * 0.0 + 1.0 / 15
    for n in (13, 11, 9, 7, 5, 3, 1):
        series = series * square + 1.0 / n
    return jnp.maximum(x, 0.0) + 2.0 * s * series


class Decode:
    """The static part of a call, and the kernel's body."""

    def __init__(self, x: Arrays, gate: GateKind, options: Options, v_block: int):
        self.batch, self.time, self.heads, self.key_dim = x.q.shape
        self.value_heads, self.value_dim = x.v.shape[2:]
        self.gdn = x.g.shape[-1] == 1
        self.gate, self.options, self.v_block = gate, options, v_block
        self.layouts = layouts(self.time, self.key_dim, v_block)

    def block(self) -> Block:
        """Blocks of a state side by side, then heads: programs that run together work on memory that lies together."""
        number, blocks = lax.axis_index("program"), jnp.int32(self.value_dim // self.v_block)
        state, heads = lax.div(number, blocks), jnp.int32(self.value_heads)
        value_head = lax.rem(state, heads)
        head = lax.div(value_head, jnp.int32(self.value_heads // self.heads))
        start = pl.multiple_of(lax.rem(number, blocks) * self.v_block, self.v_block)
        return Block(lax.div(state, heads), value_head, head, pl.ds(start, self.v_block))

    def body(self, x: Arrays, output: Any, final: Any, tokens: Tokens) -> None:
        at = self.block()
        if x.state is None:
            state = plgpu.layout_cast(jnp.zeros((self.key_dim, self.v_block), F32), self.layouts.state)
        else:
            state = _load(x.state.at[at.batch, at.value_head, :, at.columns], self.layouts.state)
        # A barrier, or the compiler moves the state's loads behind the wait for the tokens.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        self.prepare(self.read(x, at), tokens)
        plgpu.commit_smem()
        out = output.at[at.batch, :, at.value_head, at.columns]
        every = self.options.return_states

        def step(t: Any, state: jax.Array) -> jax.Array:
            state = self.step(t, state, tokens, out)
            if every:
                _store(final.at[at.batch, t, at.value_head, :, at.columns], state)
            return state

        state = step(0, state) if self.time == 1 else lax.fori_loop(0, self.time, step, state)
        if final is not None and not every:
            _store(final.at[at.batch, at.value_head, :, at.columns], state)

    def read(self, x: Arrays, at: Block) -> Arrays:
        """What belongs to the block's tokens and head, in registers."""
        keys, by_token = self.layouts.keys, self.layouts.tokens
        q, k = (_load(ref.at[at.batch, :, at.head], keys) for ref in (x.q, x.k))
        v = _load(x.v.at[at.batch, :, at.value_head, at.columns], self.layouts.columns)
        g = x.g.at[at.batch, :, at.value_head]
        g = _load(g.at[:, 0], by_token) if self.gdn else _load(g, keys)
        beta = _load(x.beta.at[at.batch, :, at.value_head], by_token)
        a_log = None if x.a_log is None else x.a_log[at.value_head]
        dt_bias = x.dt_bias
        if dt_bias is not None and self.gdn:
            dt_bias = dt_bias[at.value_head, 0]
        elif dt_bias is not None:
            dt_bias = _load(dt_bias.at[at.value_head], keys.reduce(0))
        return Arrays(q, k, v, g, beta, a_log, dt_bias, None)

    def prepare(self, x: Arrays, tokens: Tokens) -> None:
        """Norms, scale, gate and beta of all tokens."""
        shape, keys = (self.time, self.key_dim), self.layouts.keys
        a_log = jnp.broadcast_to(0.0 if x.a_log is None else x.a_log, shape)
        bias = 0.0 if x.dt_bias is None else x.dt_bias if self.gdn else _spread(x.dt_bias, shape, 1, keys)
        rate = a_log, jnp.exp(jnp.minimum(a_log, 60.0))
        g, beta = (self.beside_keys(y.astype(F32)) for y in (x.g, x.beta))
        tokens.decay[...] = jnp.exp2(log2_decay(self.gate, g, rate, bias, softplus=_softplus))
        if self.options.beta_max is not None:
            beta = self.options.beta_max / (1.0 + jnp.exp(-beta))
        tokens.beta[...] = beta
        tokens.q[...] = self.normed(x.q.astype(F32)) * self.options.scale
        tokens.k[...] = self.normed(x.k.astype(F32))
        tokens.v[...] = x.v.astype(F32)

    def beside_keys(self, x: jax.Array) -> jax.Array:
        """[T] or [T, K] to [T, K]."""
        return x if x.ndim == 2 else _spread(x, (self.time, self.key_dim), 0, self.layouts.keys)

    def normed(self, x: jax.Array) -> jax.Array:
        if not self.options.qk_norm:
            return x
        return x * self.beside_keys(lax.rsqrt(jnp.sum(x * x, axis=1) + NORM_EPSILON))

    def step(self, t: Any, state: jax.Array, tokens: Tokens, output: Any) -> jax.Array:
        """One token: decay, correct, write, read."""
        shape, lie = state.shape, self.layouts
        rows = lambda ref: _spread(_load(ref.at[t], lie.rows), shape, 0, lie.state)
        k = rows(tokens.k)
        state = state * rows(tokens.decay)
        error = (_load(tokens.v.at[t], lie.columns) - jnp.sum(state * k, axis=0)) * tokens.beta[t, 0]
        state = state + k * _spread(error, shape, 1, lie.state)
        out = jnp.sum(state * rows(tokens.q), axis=0)
        _store(output.at[t], out.astype(output.dtype))
        return state

    def buffers(self) -> Tokens:
        keys, values = (plgpu.SMEM((self.time, size), F32) for size in (self.key_dim, self.v_block))
        return Tokens(keys, keys, values, keys, keys)


def _decode(inputs: Inputs, options: Options) -> tuple[Array, Array | None]:
    """(output, final state). The final state is written over the initial one where the caller gave that away."""
    state: Any = inputs.initial_state
    in_place_wanted = options.return_final_state and not options.return_states
    # Where shard_map tracks what varies over its mesh, a kernel cannot be handed what it may write.
    if state is None or not in_place_wanted or jax.typeof(state).manual_axis_type.varying:
        return _call(inputs, options, state, options.return_final_state)

    def in_place(refs: Any) -> None:
        state, output = refs
        output[...] = _call(inputs, options, state, separate=False)[0]

    unwritten = jnp.zeros(inputs.v.shape, inputs.v.dtype)
    state, output = pl.run_state(in_place)((state, unwritten))
    return output, state


def _call(inputs: Inputs, options: Options, state: Any, separate: bool) -> tuple[Array, Array | None]:
    """The final state (or all of them) goes to a `separate` array, or to `state` if that is a reference, or nowhere."""
    value_heads, value_dim = inputs.v.shape[2:]
    parameter = lambda x, *shape: None if x is None else x.astype(F32).reshape(value_heads, *shape)
    a_log = parameter(getattr(inputs.gate, "a_log", None))
    dt_bias = parameter(getattr(inputs.gate, "dt_bias", None), inputs.g.shape[-1])
    x = Arrays(inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta, a_log, dt_bias, state)
    batch, time, _, key_dim = x.q.shape
    v_block = _config.decode_v_block(value_dim, batch * value_heads)
    call = Decode(x, gate_kind(inputs.gate), options, v_block)
    given = [name for name in Arrays._fields if getattr(x, name) is not None]
    out_type = [jax.ShapeDtypeStruct(x.v.shape, x.v.dtype)]
    if separate:
        every = (time,) if options.return_states else ()
        out_type.append(jax.ShapeDtypeStruct((batch, *every, value_heads, key_dim, value_dim), F32))

    def kernel(*refs: Any) -> None:
        *global_refs, (buffers,) = refs
        arrays = Arrays(**(dict.fromkeys(Arrays._fields) | dict(zip(given, global_refs))))
        output, *final = global_refs[len(given) :]
        written = final[0] if final else arrays.state if options.return_final_state else None
        call.body(arrays, output, written, Tokens(*buffers))

    output, *final = launch(
        kernel,
        tuple(getattr(x, name) for name in given),
        out_type=tuple(out_type),
        grid={"program": batch * value_heads * (value_dim // v_block)},
        warpgroups=1,
        buffers=call.buffers(),
        barriers=(),
        name="jfla_decode",
        auto_barriers=False,  # what is shared is written once, before anything of it is read
    )
    return output, final[0] if final else None


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2, 3))
def _recurrent(
    inputs: Inputs, options: Options, definition: Callable[[Inputs, Options], DeltaRuleOutput], interpret: bool
) -> DeltaRuleOutput:
    with interpreted(interpret), jax.named_scope("jfla_decode"):
        run = lambda inputs: _decode(inputs, options)
        return DeltaRuleOutput(*jax.custom_batching.sequential_vmap(run)(inputs))


@_recurrent.defjvp
def _jvp(options: Options, definition: Any, interpret: bool, primals: tuple[Inputs], tangents: tuple[Inputs]) -> Any:
    return jax.jvp(lambda inputs: definition(inputs, options), primals, tangents)


# `interpret` is part of the key under which the compiled function is kept.
apply = jax.jit(_recurrent, static_argnames=("options", "definition", "interpret"))
