"""The only door to jfla's private parts: what the cost model, the stages and the records need of
them.

Every other file here uses jfla's public interface and this file.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from jfla import pallas
from jfla._types import CHUNK as CHUNK
from jfla._types import Inputs, Options
from jfla._validate import DEFAULTS, validate
from jfla.cli.cpu import cpu_name as cpu_name
from jfla.gradients import operands
from jfla.pallas import _config, delta_rule
from jfla.pallas._arrays import kernel_arrays
from jfla.pallas._jobs import run as run_kernel
from jfla.pallas.scan import Kept, output_scan
from jfla.prepare import prepare_chunks
from jfla.reference import chunked


class ChunkOperands(NamedTuple):
    """What the states and the output are made of, [B, T, HV, ...], T a multiple of 64, in float32.

    `g_cum` is the running sum of the decay inside a chunk, a natural logarithm, [..., G]; `k_out`
    is k decayed to the chunk's end, `w` and `u` are X (beta k exp(g_cum)) and X (beta v), `a_qk`
    [..., C].
    """

    g_cum: Float[Array, "B T HV G"]
    k_out: Float[Array, "B T HV K"]
    w: Float[Array, "B T HV K"]
    u: Float[Array, "B T HV V"]
    a_qk: Float[Array, "B T HV C"]


def chunk_operands(op: str, main: list[Array]) -> ChunkOperands:
    """The operands of q, k, v, g, beta by the portable stages."""
    x, _ = prepare_chunks(*_validated(op, main))
    decayed = operands(x)
    intra = chunked.pairwise(x)
    beta = x.beta[..., None]
    chunks, batch, heads, chunk = x.beta.shape

    def by_token(a: Array) -> Array:
        return a.transpose(1, 0, 3, 2, 4).reshape(batch, chunks * chunk, heads, a.shape[-1])

    return ChunkOperands(
        g_cum=by_token(jnp.cumsum(x.g, axis=-2)),
        k_out=by_token(decayed.k_out),
        w=by_token(intra.inverse @ (beta * decayed.k_in)),
        u=by_token(intra.inverse @ (beta * x.v)),
        a_qk=by_token(intra.a_qk),
    )


def why_not_pallas(op: str, main: list[Array]) -> str | None:
    """Why the chunk kernels do not take a call, or None where they do."""
    return pallas.unsupported("chunk", *_validated(op, main))


def scan_operands(op: str, main: list[Array]) -> tuple:
    """What the kernel of states and output reads, by the kernel that runs before it."""
    inputs, options = _validated(op, main)
    x = kernel_arrays(inputs, options)
    carried, pairs, _ = run_kernel(delta_rule.prepare(x, inputs, options))
    return carried, pairs, x.v, x.initial


def scan_output(operands_of_scan: tuple) -> tuple[Array, Array]:
    """Output and final state by the kernel that scans the states."""
    carried, pairs, v, initial = operands_of_scan
    batch, _, heads, value_dim = v.shape
    config = _config.scan_config(carried.k_in.shape[-1], value_dim, batch * heads)
    kernel = output_scan(carried, pairs, v, initial, config, Kept(last=True))
    output, _, final = run_kernel(kernel)
    return output, final


def _validated(op: str, main: list[Array]) -> tuple[Inputs, Options]:
    """The five arrays as the ops take them, with the final state asked for."""
    return validate(op, *main, **(DEFAULTS | {"return_final_state": True}))
