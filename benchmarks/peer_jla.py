"""Peer: the Hopper kernels for KDA and GDN of jax-linear-attention, in JAX.

Asked for by name: its "auto" falls to plain JAX where its kernels refuse. Its conventions are ours
(natural-log decay per token, scale K ** -0.5, `segment_ids`); GDN takes grouped value heads. It pins
JAX 0.11.2, so it is run in an environment of its own:

    uv run --isolated --with jax-linear-attention==0.1.0 jfla bench
"""

import jax
from jla.ops import linear_attention  # type: ignore[import-not-found]

import jfla
from benchmarks import inputs
from benchmarks.programs import Program, Refused
from benchmarks.providers import jax_program
from benchmarks.shapes import Case

KINDS = {"kda": "kda", "gdn": "gated_deltanet"}
IMPLEMENTATION = "mosaic_gpu"


def build(case: Case) -> Program:
    """The program of a case. Raises `Refused` with the package's own words where its kernels do."""
    if case.timed not in ("forward", "forward+backward"):
        raise Refused(f"its kernels have no {case.timed}")
    if case.op == "kda" and case.shape.heads != case.shape.value_heads:
        raise Refused("its KDA takes as many value heads as heads")

    def op(
        *main: jax.Array, return_final_state: bool, **rest: jax.Array
    ) -> jfla.DeltaRuleOutput:
        q, k, v, g, beta = main
        output, final = linear_attention(
            KINDS[case.op],
            q,
            k,
            v,
            impl=IMPLEMENTATION,
            g=g,
            beta=beta,
            output_final_state=return_final_state,
            **rest,
        )
        return jfla.DeltaRuleOutput(output, final)

    main = [inputs.described(case)[name] for name in inputs.MAIN]
    try:
        jax.eval_shape(lambda *main: tuple(op(*main, return_final_state=False)), *main)
    except (ValueError, NotImplementedError) as refusal:
        raise Refused(str(refusal)) from refusal
    return jax_program(op, case)
