"""Errors of a timed call against the recurrence in float64 on the same, already rounded inputs.

The recurrence is slow, and batch rows and heads do not know of each other; so the results of the
timed call are compared on the first batch row and the first `HEADS` query and key heads with their
value heads, over all T. Beyond `MAX_TIME` tokens the recurrence goes through all of them forward,
and back through the last `LAST` alone: outputs and gradients of those are compared, which depend on
every token before them, and the final state. Packed sequences are run side by side, as a batch.

An error is `||x - ref|| / ||ref||` of one tensor. Gradients of a gate's parameters are sums over all rows and tokens,
and are compared where all of these are run.
"""

import concurrent.futures
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from benchmarks import inputs
from benchmarks.gpu_lock import gpu_lock
from benchmarks.inputs import GATE_PARAMETERS, MAIN, Arrays
from benchmarks.programs import Program, Results
from benchmarks.shapes import Case, Op
from jfla import reference

HEADS = 2
MAX_TIME = 16384
LAST = 4096
CHECKED = f"{HEADS} heads of the first sequence; beyond T = {MAX_TIME} on the last {LAST} tokens"
BLOCK = 256  # tokens between the states that the backward of the recurrence keeps

References = dict[str, np.ndarray]


class Exact:
    """Errors, with the float64 results of the last inputs kept for the next implementation or pass.

    `gradients`: whether some pass will have them; they are then made together with the output.
    """

    def __init__(self, gradients: bool) -> None:
        self._gradients = gradients
        self._case: Case | None = None
        self._thread = concurrent.futures.ThreadPoolExecutor(1)
        self._found: concurrent.futures.Future[References] = concurrent.futures.Future()

    def begin(self, case: Case, arrays: Arrays) -> None:
        """Has a thread compile and run the recurrence, unless these inputs were the last ones.

        Traced at once: what is left needs no Python, and hardly slows another compilation down.
        """
        if self._case == inputs.case_of(case):
            return
        wanted = {
            name: x for name, x in arrays.items() if name != "do" or self._gradients
        }
        self._found = self._thread.submit(_started(case, wanted))
        self._case = inputs.case_of(case)

    def wait(self) -> None:
        """Returns when the recurrence that was begun, if any, has its results or has failed."""
        if self._case is not None:
            concurrent.futures.wait([self._found])

    def errors(
        self, case: Case, arrays: Arrays, program: Program, results: Results
    ) -> dict[str, float]:
        """Error of every result that can be compared, by its name."""
        self.begin(case, arrays)
        references = self._found.result()
        names = tuple(
            name
            for name in references
            if results.get(name) is not None and _is_comparable(case, name)
        )
        compared = program.compared(results, names, functools.partial(part, case))
        return {name: _distance(compared[name], references[name]) for name in names}


def _distance(x: np.ndarray, ref: np.ndarray) -> float:
    difference = x.astype(np.float64) - ref
    return float(np.linalg.norm(difference) / np.linalg.norm(ref))


def _is_comparable(case: Case, name: str) -> bool:
    """Whether the recurrence has gone through all that a result depends on."""
    if not _is_of_parameter(name):
        return True
    return case.shape.batch == 1 and not _before(case)


def _is_of_parameter(name: str) -> bool:
    """Whether an input is a parameter of a gate, or a gradient that of one."""
    return name in GATE_PARAMETERS or name[1:] in GATE_PARAMETERS


def part(case: Case, name: str, x: Any, whole: bool = False) -> Any:
    """What is compared of an input, result or gradient, or with `whole` of all T: tensors of JAX,
    PyTorch or NumPy.
    """
    heads = min(HEADS, case.shape.heads)
    if name not in ("q", "k", "dq", "dk"):
        heads *= case.shape.value_heads // case.shape.heads
    if _is_of_parameter(name):
        return x[:heads]
    if name in ("initial_state", "final_state"):
        return x[:1, :heads]
    start = 0 if whole else _before(case)
    return x[:1, start:, :heads]


def _before(case: Case) -> int:
    """Tokens that are run, but not compared."""
    long = case.shape.time > MAX_TIME and case.shape.packing is None
    return case.shape.time - LAST if long else 0


def _started(case: Case, arrays: Arrays) -> Callable[[], References]:
    """What is left to do for the float64 results of a case, after tracing."""
    lengths = None
    if "cu_seqlens" in arrays:
        lengths = tuple(int(length) for length in np.diff(arrays["cu_seqlens"]))
    dense = {
        name: x
        for name, x in arrays.items()
        if name not in ("cu_seqlens", "segment_ids")
    }

    @jax.jit
    def parts(x: Arrays) -> Arrays:
        return {name: part(case, name, a, whole=True) for name, a in x.items()}

    cut = parts(dense)
    compile_ = _compiler(case.op, _before(case), lengths, _described(cut))

    def finish() -> References:
        with jax.enable_x64(True):
            compiled = compile_()
            with gpu_lock():
                found = compiled(cut)
                return {name: np.asarray(x) for name, x in found.items()}

    return finish


def _described(arrays: Arrays) -> tuple[tuple[str, jax.ShapeDtypeStruct], ...]:
    return tuple(
        (name, jax.ShapeDtypeStruct(x.shape, x.dtype)) for name, x in arrays.items()
    )


@functools.cache
def _compiler(
    op: Op, before: int, lengths: tuple[int, ...] | None, arrays: tuple
) -> Callable[[], Callable]:
    """Traces now; what it returns compiles, once."""
    with jax.enable_x64(True):
        run = functools.partial(_run, op, before, lengths)
        return functools.cache(jax.jit(run).lower(dict(arrays)).compile)


def _run(
    op: Op, before: int, lengths: tuple[int, ...] | None, rounded: Arrays
) -> Arrays:
    """Output, final state (but for packed sequences) and, where there is a cotangent, the
    gradients: those behind the first `before` tokens, which are run for the state that they leave.
    """
    arrays = {name: x.astype(jnp.float64) for name, x in rounded.items()}
    if lengths is not None:
        arrays = _of_tokens(functools.partial(_side_by_side, lengths=lengths), arrays)
    initial = arrays.pop("initial_state", None)
    recurrent = getattr(reference, f"recurrent_{op}")
    if before:
        first = _of_tokens(lambda x: x[:, :before], arrays)
        _, initial = _in_blocks(recurrent, initial, first)
        arrays = _of_tokens(lambda x: x[:, before:], arrays)

    forward = functools.partial(_in_blocks, recurrent, initial)
    if "do" not in arrays:
        output, final = forward(arrays)
        gradients: Arrays = {}
    else:
        given = inputs.differentiated(arrays)
        output, adjoint, final = jax.vjp(forward, given, has_aux=True)
        (gradients,) = adjoint(arrays["do"])
    found = {"output": output} | {f"d{name}": x for name, x in gradients.items()}
    if lengths is not None:
        return _of_tokens(functools.partial(_end_to_end, lengths=lengths), found)
    return found | {"final_state": final}


def _of_tokens(change: Callable[[Array], Array], arrays: Arrays) -> Arrays:
    """`change` of every array that has tokens."""
    return {
        name: x if _is_of_parameter(name) else change(x) for name, x in arrays.items()
    }


def _side_by_side(x: Array, lengths: tuple[int, ...]) -> Array:
    """[1, T, ...] of packed sequences as [S, longest, ...].

    Zeros behind the end of each: there the state stays.
    """
    longest = max(lengths)
    longest += -longest % min(BLOCK, longest)
    offsets = np.arange(longest)
    starts = np.cumsum([0, *lengths[:-1]])[:, None]
    ends = np.cumsum(lengths)[:, None]
    index = starts + offsets
    feature_axes = [1] * (x.ndim - 2)
    inside = jnp.asarray(index < ends).reshape(*index.shape, *feature_axes)
    tokens = x[0, np.minimum(index, ends - 1)]
    return jnp.where(inside, tokens, 0)


def _end_to_end(x: Array, lengths: tuple[int, ...]) -> Array:
    """The opposite."""
    sequence = np.repeat(np.arange(len(lengths)), lengths)
    offset = np.concatenate([np.arange(length) for length in lengths])
    return x[sequence, offset][None]


def _in_blocks(
    recurrent: Callable[..., Any], initial: Array | None, arrays: Arrays
) -> tuple[Array, Array]:
    """The recurrence with one state a block kept for its backward, the others recomputed."""
    main = [arrays[name] for name in MAIN]
    options = inputs.call_options(arrays)
    q, _, v = main[:3]
    batch, time = q.shape[:2]
    block = math.gcd(time, BLOCK)
    if initial is None:
        state_shape = (batch, v.shape[2], q.shape[-1], v.shape[-1])
        initial = jnp.zeros(state_shape, q.dtype)

    def by_block(x: Array) -> Array:
        cut = x.reshape(batch, time // block, block, *x.shape[2:])
        return jnp.moveaxis(cut, 1, 0)

    @jax.checkpoint
    def body(state: Array, xs: tuple[Array, ...]) -> tuple[Array, Array]:
        output, final = recurrent(
            *xs, initial_state=state, return_final_state=True, **options
        )
        return final, output

    final, outputs = lax.scan(body, initial, tuple(map(by_block, main)))
    return jnp.moveaxis(outputs, 0, 1).reshape(v.shape), final
