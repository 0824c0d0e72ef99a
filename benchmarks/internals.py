"""The only door to jfla's inner rooms: what the cost model, the stages and the records need of them.

Every other file here uses jfla's public interface and this file.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from jfla import pallas
from jfla._inputs.chunking import prepare_chunks, to_tokens
from jfla._inputs.validate import DEFAULTS, validate
from jfla.cli.cpu import cpu_name as cpu_name
from jfla.gates import inverse_softplus_step as inverse_softplus_step
from jfla.gates import log_uniform_rate as log_uniform_rate
from jfla.pallas import chunk
from jfla.pallas.arrays import kernel_arrays
from jfla.pallas.common.scan.spec import ScanConfig
from jfla.pallas.common.scan.steps import output_scan_kernel
from jfla.pallas.dims import Dims
from jfla.pallas.heuristics import HOPPER_SMS, scan_v_block, schedule
from jfla.pallas.heuristics import SUPPORTED_DIMS as SUPPORTED_DIMS
from jfla.pallas.mgpu.overlap import run as run_kernel
from jfla.pallas.support import num_sms
from jfla.parallel.hand_over import MAX_GATHERED as MAX_GATHERED
from jfla.types import CHUNK as CHUNK
from jfla.types import OPS, Inputs, Options
from jfla.xla.forward import decayed_qk, intra


class ChunkOperands(NamedTuple):
    """What the states and the output are made of, [B, T, HV, ...], T a multiple of 64, in float32.

    `g_cum` is the running sum of the decay inside a chunk, a natural logarithm, [..., G]; `k_to_end`
    is k decayed to the chunk's end, `w` and `u` are X (beta k exp(g_cum)) and X (beta v), `a_qk`
    [..., C].
    """

    g_cum: Float[Array, "B T HV G"]
    k_to_end: Float[Array, "B T HV K"]
    w: Float[Array, "B T HV K"]
    u: Float[Array, "B T HV V"]
    a_qk: Float[Array, "B T HV C"]


def chunk_operands(op: str, main: list[Array]) -> ChunkOperands:
    """The operands of q, k, v, g, beta by the portable stages."""
    inputs, options = _validated(op, main)
    x, _ = prepare_chunks(inputs, options)
    qk = decayed_qk(x)
    pairs = intra(x, options.op.scalar_gate)
    beta = x.beta[..., None]
    return ChunkOperands(
        g_cum=to_tokens(jnp.cumsum(x.g, axis=-2)),
        k_to_end=to_tokens(qk.k_to_end),
        w=to_tokens(pairs.inverse @ (beta * qk.k_from_start)),
        u=to_tokens(pairs.inverse @ (beta * x.v)),
        a_qk=to_tokens(pairs.a_qk),
    )


def why_not_pallas(op: str, main: list[Array]) -> str | None:
    """Why the chunk kernels do not take a call, or None where they do."""
    return pallas.unsupported("chunk", *_validated(op, main))


def scan_operands(op: str, main: list[Array]) -> tuple:
    """What the kernel of states and output reads, by the kernel that runs before it."""
    inputs, options = _validated(op, main)
    x = kernel_arrays(inputs, options)
    plan = schedule(options.op, x.dims, num_sms(inputs))
    results = run_kernel(chunk.intra_kernel(x, inputs, options, plan))
    return results.qk, results.intra, x.v, x.initial


def scan_output(operands_of_scan: tuple) -> tuple[Array, Array]:
    """Output and final state by the kernel that scans the states."""
    qk, pairs, v, initial = operands_of_scan
    batch, time, heads, value_dim = v.shape
    dims = Dims(batch, heads, time // CHUNK, value_dim, qk.key_dim)
    config = ScanConfig(scan_v_block(dims, HOPPER_SMS))
    scanned = run_kernel(
        output_scan_kernel(qk, pairs, v, initial, config, final_dtype=jnp.float32)
    )
    return scanned.stores[0], scanned.last


def _validated(op: str, main: list[Array]) -> tuple[Inputs, Options]:
    """The five arrays as the ops take them, with the final state asked for."""
    return validate(OPS[op], *main, **(DEFAULTS | {"return_final_state": True}))
