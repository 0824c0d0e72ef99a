"""The pass "scan+output": what follows the work inside the chunks, by our kernel, on operands that are made before.

`chunk_operands` makes the same operands by the portable stages for kernels of other libraries.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from jfla import pallas
from jfla._types import Inputs, Options
from jfla._validate import DEFAULTS, validate
from jfla.bench.inputs import MAIN, Arrays
from jfla.bench.programs import JaxProgram, Program, Refused, Results
from jfla.bench.shapes import Case
from jfla.gradients import operands
from jfla.pallas import _config, delta_rule
from jfla.pallas._arrays import kernel_arrays
from jfla.pallas._jobs import run as run_job
from jfla.pallas.scan import Kept, output_scan
from jfla.prepare import prepare_chunks
from jfla.reference import chunked


class ChunkOperands(NamedTuple):
    """What the states and the output are made of, [B, T, HV, ...] with T a multiple of 64, in float32.

    `g_cum` is the running sum of the decay inside a chunk, a natural logarithm, [..., G]; `k_out` is k at the chunk's
    end, `w` and `u` are X (beta k exp(g_cum)) and X (beta v), `a_qk` [..., C].
    """

    g_cum: Float[Array, "B T HV G"]
    k_out: Float[Array, "B T HV K"]
    w: Float[Array, "B T HV K"]
    u: Float[Array, "B T HV V"]
    a_qk: Float[Array, "B T HV C"]


def ours(case: Case) -> Program:
    """The kernel that scans the states and writes the output."""
    _whole_chunks(case)

    def arrange(arrays: Arrays) -> tuple:
        inputs, options = validated(case, arrays)
        if reason := pallas.unsupported("chunk", inputs, options):
            raise Refused(reason)
        x = kernel_arrays(inputs, options)
        carried, pairs, _ = run_job(delta_rule.prepare(x, inputs, options))
        return carried, pairs, x.v, x.initial

    def run(x: tuple) -> Results:
        carried, pairs, v, initial = x
        batch, _, heads, value_dim = v.shape
        config = _config.scan_config(carried.k_in.shape[-1], value_dim, batch * heads)
        output, _, final = run_job(output_scan(carried, pairs, v, initial, config, Kept(last=True)))
        return {"output": output, "final_state": final}

    return JaxProgram(run, arrange)


def chunk_operands(case: Case, arrays: Arrays) -> ChunkOperands:
    """By the portable stages, in float32."""
    _whole_chunks(case)
    x, _ = prepare_chunks(*validated(case, arrays))
    op, pair = operands(x), chunked.pairwise(x)
    scaled = x.beta[..., None]
    found = ChunkOperands(
        jnp.cumsum(x.g, axis=-2), op.k_out, pair.inverse @ (scaled * op.k_in), pair.inverse @ (scaled * x.v), pair.a_qk
    )
    chunks, batch, heads, chunk = x.beta.shape
    tokens = lambda a: a.transpose(1, 0, 3, 2, 4).reshape(batch, chunks * chunk, heads, a.shape[-1])
    return ChunkOperands(*map(tokens, found))


def validated(case: Case, arrays: Arrays) -> tuple[Inputs, Options]:
    """The case's arrays as the ops take them, with the final state asked for."""
    return validate(case.op, *(arrays[name] for name in MAIN), **(DEFAULTS | {"return_final_state": True}))


def _whole_chunks(case: Case) -> None:
    if case.shape.packing is not None or case.shape.time % 64:
        raise Refused("its stages are timed on whole chunks without packing")
