"""Errors of a timed call against the recurrence in float64 on the same, already rounded inputs.

The recurrence is slow, and batch rows and heads do not know of each other; so the results of the timed call are
compared on the first batch row and the first `HEADS` query and key heads with their value heads, over all T. Beyond
`MAX_TIME` tokens only the output of the first `PREFIX` tokens is compared, which later tokens cannot change; gradients
and final state are then not checked, and have no error in the record.

An error is `||x - ref|| / ||ref||` of one tensor.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from jfla import reference
from jfla.bench.inputs import MAIN, Arrays
from jfla.bench.programs import Program, Results
from jfla.bench.shapes import Case, Op

HEADS = 2
MAX_TIME, PREFIX = 16384, 4096
BLOCK = 1024  # tokens between the states that the backward of the recurrence keeps


class Exact:
    """Errors, with the float64 results of the last inputs kept for the next implementation or pass.

    `gradients`: whether some pass will have them; they are then made together with the output.
    """

    def __init__(self, gradients: bool) -> None:
        self._gradients = gradients
        self._case: Case | None = None
        self._reference: dict[str, np.ndarray] = {}

    def errors(self, case: Case, arrays: Arrays, program: Program, results: Results) -> dict[str, float]:
        """Error of every result that can be compared, by its name."""
        inputs = case if case.timed == "decode" else dataclasses.replace(case, timed="forward")
        if self._case != inputs:
            wanted = [name for name in arrays if name != "do" or self._gradients]
            self._reference = _references(case, {name: part(case, name, arrays[name]) for name in wanted})
            self._case = inputs
        found, results = {}, program.restored(results)
        for name, ref in self._reference.items():
            if results.get(name) is not None:
                x = np.asarray(program.numpy(part(case, name, results[name])), np.float64)
                found[name] = float(np.linalg.norm(x - ref) / np.linalg.norm(ref))
        return found


def part(case: Case, name: str, x: Any) -> Any:
    """What is compared of an input, result or gradient: tensors of JAX, PyTorch or NumPy."""
    if name in ("segment_ids", "cu_seqlens"):
        return x
    heads = min(HEADS, case.shape.heads)
    if name not in ("q", "k", "dq", "dk"):
        heads *= case.shape.value_heads // case.shape.heads
    if name in ("initial_state", "final_state"):
        return x[:1, :heads]
    return x[:1, : PREFIX if _prefix_only(case) else case.shape.time, :heads]


def _prefix_only(case: Case) -> bool:
    return case.shape.time > MAX_TIME


def _references(case: Case, arrays: Arrays) -> dict[str, np.ndarray]:
    arrays = {name: x for name, x in arrays.items() if name != "cu_seqlens"}
    with jax.enable_x64(True):
        exact = {n: x.astype(jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x for n, x in arrays.items()}
        results = _run(case.op, _prefix_only(case), exact)
        return {name: np.asarray(x) for name, x in results.items()}


@functools.partial(jax.jit, static_argnames=("op", "prefix_only"))
def _run(op: Op, prefix_only: bool, arrays: Arrays) -> Arrays:
    """Output, final state (but for packed sequences) and, where there is a cotangent, the gradients."""
    rest = {name: x for name, x in arrays.items() if name not in (*MAIN, "do")}

    def forward(*main: Array) -> tuple[Array, Array | None]:
        recurrent = functools.partial(getattr(reference, f"recurrent_{op}"), **rest)
        return recurrent(*main) if "segment_ids" in rest else _in_blocks(recurrent, *main)

    main = [arrays[name] for name in MAIN]
    if prefix_only or "do" not in arrays:
        output, final = forward(*main)
        gradients: tuple = ()
    else:
        output, adjoint, final = jax.vjp(forward, *main, has_aux=True)
        gradients = adjoint(arrays["do"])
    found = {"output": output} | {f"d{name}": x for name, x in zip(MAIN, gradients)}
    return found if final is None or prefix_only else found | {"final_state": final}


def _in_blocks(recurrent: functools.partial, *main: Array) -> tuple[Array, Array]:
    """The recurrence with its states kept for the backward only once in a block, recomputed inside."""
    q, _, v = main[:3]
    batch, time = q.shape[:2]
    block = math.gcd(time, BLOCK)
    cut = lambda x: jnp.moveaxis(x.reshape(batch, time // block, block, *x.shape[2:]), 1, 0)
    initial = recurrent.keywords.get("initial_state")
    if initial is None:
        initial = jnp.zeros((batch, v.shape[2], q.shape[-1], v.shape[-1]), q.dtype)

    @jax.checkpoint
    def body(state: Array, xs: tuple[Array, ...]) -> tuple[Array, Array]:
        output, final = recurrent(*xs, initial_state=state, return_final_state=True)
        return final, output

    final, outputs = lax.scan(body, initial, tuple(map(cut, main)))
    return jnp.moveaxis(outputs, 0, 1).reshape(v.shape), final
