"""Peer: tokamax's chunked KDA in JAX, "xla_chunked".

It takes heads first, and a raw gate whose decay is -5 sigmoid(x): x is made of the case's decay. So
the gradient of the gate is another one than ours, and is not compared.
"""

import jax
import jax.numpy as jnp
from tokamax._src.ops.kda import api  # type: ignore[import-not-found]

from benchmarks.inputs import MAIN, Arrays
from benchmarks.programs import JaxProgram, Program, Refused, Results
from benchmarks.shapes import Case

_LOWER_BOUND = -5.0


def build(case: Case) -> Program:
    """The program of a case."""
    if case.op != "kda":
        raise Refused("it has KDA alone")
    if case.timed not in ("forward", "forward+backward"):
        raise Refused(f'its "xla_chunked" has no {case.timed}')
    if case.shape.heads != case.shape.value_heads:
        raise Refused("it takes as many value heads as heads")
    rest = (
        {} if case.shape.packing is None else {"max_num_segments": case.shape.segments}
    )

    def run(q, k, v, gate, beta, segment_ids):
        return api.kimi_delta_attention(
            q,
            k,
            v,
            gate,
            beta,
            a_log=jnp.zeros(case.shape.heads),
            delta_time_bias=jnp.zeros(case.shape.heads * case.shape.dim),
            use_gate_in_kernel=True,
            lower_bound=_LOWER_BOUND,
            segment_ids=segment_ids,
            implementation="xla_chunked",
            **rest,
        )[0]

    def forward(x: Arrays) -> Results:
        return {
            "output": run(
                x["q"], x["k"], x["v"], x["g"], x["beta"], x.get("segment_ids")
            )
        }

    def both(x: Arrays) -> Results:
        segments = x.get("segment_ids")
        main = [x[name] for name in MAIN]
        output, adjoint = jax.vjp(
            lambda q, k, v, g, b: run(q, k, v, g, b, segments), *main
        )
        gradients = adjoint(x["do"].astype(output.dtype))
        # "raw" is under no name of ours, but it is computed.
        return {"output": output} | dict(
            zip(("dq", "dk", "dv", "raw", "dbeta"), gradients)
        )

    function = both if case.timed == "forward+backward" else forward
    return JaxProgram(function, _heads_first, _heads_third)


def _heads_first(arrays: Arrays) -> Arrays:
    part = arrays["g"] / _LOWER_BOUND
    arrays = arrays | {"g": jnp.log(part) - jnp.log1p(-part)}
    still = ("segment_ids", "cu_seqlens")
    return {
        name: x if name in still else jnp.moveaxis(x, 2, 0)
        for name, x in arrays.items()
    }


def _heads_third(results: Results) -> Results:
    return {name: jnp.moveaxis(x, 0, 2) for name, x in results.items()}
