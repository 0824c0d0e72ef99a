"""Peer: FLA's own Triton kernels, called from JAX: the state scan and the output stage.

They run in the process and on the arrays of our kernel of the same stages, tuned over the
configurations that the library lists. Each is called by a kernel of ours that hands the arguments
on, because jax-triton passes inputs first and outputs last.
"""

from typing import Any

import jax
import jax.numpy as jnp
import jax_triton  # type: ignore[import-not-found]
import numpy as np
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from fla.ops.common.chunk_delta_h import (  # type: ignore[import-not-found]
    chunk_gated_delta_rule_fwd_kernel_h_blockdim64,
)
from fla.ops.common.chunk_o import chunk_fwd_kernel_o  # type: ignore[import-not-found]
from fla.ops.gla.chunk import chunk_gla_fwd_kernel_o  # type: ignore[import-not-found]

from benchmarks.inputs import Arrays
from benchmarks.internals import CHUNK
from benchmarks.programs import JaxProgram, Program, Refused, Results
from benchmarks.shapes import Case
from benchmarks.stages import chunk_operands

_LOG2E = 1.4426950408889634


def _bare(kernel: Any) -> Any:
    """The kernel without its heuristics and its tuner."""
    while not isinstance(kernel, triton.JITFunction):
        kernel = kernel.fn
    return kernel


def _tuned(kernel: Any, like: Any) -> Any:
    """The kernel, tuned over the configurations of another."""
    while not hasattr(like, "configs"):
        like = like.fn
    return triton.autotune(configs=like.configs, key=[])(kernel)


_states = _bare(chunk_gated_delta_rule_fwd_kernel_h_blockdim64)
_output_kda = _bare(chunk_gla_fwd_kernel_o)
_output_gdn = _bare(chunk_fwd_kernel_o)


@triton.jit
def _scan_kernel(
    k, u, w, g, T, v_new, h, final,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BT: tl.constexpr, BV: tl.constexpr, KDA: tl.constexpr,
):  # fmt: skip
    if KDA:
        _states(
            k, u, w, v_new, None, g, h, None, final, None, None, T, H, HV, K, V, BT, BV,
            USE_G=False, USE_GK=True, USE_INITIAL_STATE=False, STORE_FINAL_STATE=True,
            SAVE_NEW_VALUE=True, STATE_V_FIRST=False, IS_VARLEN=False,
        )  # fmt: skip
    else:
        _states(
            k, u, w, v_new, g, None, h, None, final, None, None, T, H, HV, K, V, BT, BV,
            USE_G=True, USE_GK=False, USE_INITIAL_STATE=False, STORE_FINAL_STATE=True,
            SAVE_NEW_VALUE=True, STATE_V_FIRST=False, IS_VARLEN=False,
        )  # fmt: skip


@triton.jit
def _output_kda_kernel(
    q, v, g, h, a, scale, T, o, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    _output_kda(
        q, v, g, h, o, a, None, None, scale, T, H, HV, K, V, BT, BK, BV,
        STATE_V_FIRST=False, IS_VARLEN=False, USE_GRAPH=False,
    )  # fmt: skip


@triton.jit
def _output_gdn_kernel(
    q, k, v, h, g, scale, T, o, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    _output_gdn(
        q, k, v, h, g, None, o, None, None, scale, T, H, HV, K, V, BT, BK, BV,
        USE_G=True, USE_G_GAMMA=False, STATE_V_FIRST=False, IS_VARLEN=False,
    )  # fmt: skip


SCAN = _tuned(_scan_kernel, chunk_gated_delta_rule_fwd_kernel_h_blockdim64)
OUTPUT_KDA = _tuned(_output_kda_kernel, chunk_gla_fwd_kernel_o)
OUTPUT_GDN = _tuned(_output_gdn_kernel, chunk_fwd_kernel_o)


def build(case: Case) -> Program:
    """The program of a case."""
    if case.timed != "scan+output":
        raise Refused(
            "it has the states and the output alone, not the work inside the chunks"
        )
    kda = case.op == "kda"
    shape = case.shape

    def arrange(arrays: Arrays) -> dict[str, jax.Array]:
        op = chunk_operands(case, arrays)
        wide = {"w": op.w, "u": op.u}
        if kda:
            wide |= {"k_out": op.k_to_end, "a_qk": op.a_qk}
        found = {name: x.astype(jnp.bfloat16) for name, x in wide.items()}
        g = op.g_cum * _LOG2E
        return found | {
            "q": arrays["q"],
            "k": arrays["k"],
            "g": g if kda else g[..., 0],
        }

    def run(x: dict[str, jax.Array]) -> Results:
        key = x["k_out"] if kda else x["k"]
        heads = shape.value_heads if kda else shape.heads
        v_new, h, final = scan(key, x["u"], x["w"], x["g"], heads, kda)
        if kda:
            arrays = (x["q"], v_new, x["g"], h, x["a_qk"])
            return {
                "output": output(OUTPUT_KDA, arrays, x["q"], v_new),
                "final_state": final,
            }
        return {
            "output": output(
                OUTPUT_GDN, (x["q"], key, v_new, h, x["g"]), x["q"], v_new
            ),
            "final_state": final,
        }

    return JaxProgram(run, arrange)


def scan(
    k: jax.Array, u: jax.Array, w: jax.Array, g: jax.Array, heads: int, kda: bool
) -> list[jax.Array]:
    """v_new, the state before every chunk [B, N, HV, K, V], and the last one."""
    batch, time, value_heads, value_dim = u.shape
    key_dim = k.shape[-1]
    states = (batch, time // CHUNK, value_heads, key_dim, value_dim)
    shapes = [
        jax.ShapeDtypeStruct(u.shape, u.dtype),
        jax.ShapeDtypeStruct(states, k.dtype),
        jax.ShapeDtypeStruct((batch, value_heads, key_dim, value_dim), jnp.float32),
    ]
    return jax_triton.triton_call(
        k,
        u,
        w,
        g,
        time,
        kernel=SCAN,
        out_shape=shapes,
        name="fla_state_scan",
        grid=lambda meta: (triton.cdiv(value_dim, meta["BV"]) * batch * value_heads,),
        H=heads,
        HV=value_heads,
        K=key_dim,
        V=value_dim,
        BT=CHUNK,
        KDA=kda,
    )


def output(
    kernel: Any, arrays: tuple[jax.Array, ...], q: jax.Array, v_new: jax.Array
) -> jax.Array:
    """o [B, T, HV, V]."""
    batch, time, value_heads, value_dim = v_new.shape
    chunks = time // CHUNK
    return jax_triton.triton_call(
        *arrays,
        np.float32(q.shape[-1] ** -0.5),
        time,
        kernel=kernel,
        name="fla_output",
        out_shape=jax.ShapeDtypeStruct(v_new.shape, v_new.dtype),
        grid=lambda meta: (
            triton.cdiv(value_dim, meta["BV"]) * chunks,
            batch * value_heads,
        ),
        H=q.shape[2],
        HV=value_heads,
        K=q.shape[-1],
        V=value_dim,
        BT=CHUNK,
    )
