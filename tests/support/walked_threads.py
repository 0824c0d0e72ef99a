"""Interpreted threads that Python walks, equation by equation, where JAX compiles them with XLA: `run_thread`.

Compiling took most of the time of an interpreted test. A jaxpr becomes a plan once, and the plan runs in every thread
and in every turn of a loop. A callback is called at once, control flow is Python's, other primitives are NumPy's where
`numpy_primitives` has a form of them. JAX runs the rest, and compiles each for each shape: `bound` counts them.
"""

import collections
import contextlib
import dataclasses
import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import callback as callbacks
from jax._src import core, dtypes
from jax._src.pallas.mosaic.interpret import thread_map
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

from support import numpy_primitives

_map_threads_of_jax = thread_map.thread_map

bound: collections.Counter[str] = collections.Counter()  # by a primitive's name

Many = Callable[..., Sequence[Any]]  # all outputs of an equation


class Progress:
    """That of all threads."""

    equations = 0  # begun; threads may lose some of one another's, but while any goes on it changes


@dataclasses.dataclass(frozen=True)
class Step:
    """One equation: which slots it reads and writes."""

    run: Callable[..., Any]
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    is_single: bool  # `run` returns the one output itself


class Plan:
    """The steps of a jaxpr. Values lie in slots: first the inputs, then literals, then what the steps write."""

    def __init__(self, jaxpr: core.Jaxpr) -> None:
        self._slots: list[Any] = []
        self._places: dict[core.Var, int] = {}
        for var in jaxpr.all_invars:
            self._place(var)
        self._num_inputs = len(self._slots)
        self._steps = [self._step(equation) for equation in jaxpr.eqns]
        self._results = [self._read(atom) for atom in jaxpr.outvars]

    def _place(self, var: core.Var) -> int:
        self._places[var] = len(self._slots)
        return self._slot(None)

    def _slot(self, value: Any) -> int:
        self._slots.append(value)
        return len(self._slots) - 1

    def _read(self, atom: core.Atom) -> int:
        if isinstance(atom, core.Literal):
            return self._slot(_value(np.asarray(atom.val, atom.aval.dtype)))
        return self._places[atom]

    def _step(self, equation: core.JaxprEqn) -> Step:
        reads = tuple(map(self._read, equation.invars))
        form = numpy_primitives.form_of(equation)
        run = _many(equation) if form is None else form
        writes = tuple(map(self._place, equation.outvars))
        return Step(run, reads, writes, form is not None)

    def __call__(self, *inputs: Any) -> list[Any]:
        slots = self._slots.copy()
        slots[: self._num_inputs] = inputs
        for step in self._steps:
            Progress.equations += 1
            results = step.run(*[slots[i] for i in step.reads])
            if step.is_single:
                slots[step.writes[0]] = results
            else:
                for i, result in zip(step.writes, results, strict=True):
                    slots[i] = result
        return [slots[i] for i in self._results]


_plans: weakref.WeakKeyDictionary[core.Jaxpr, Plan] = weakref.WeakKeyDictionary()
_planning = threading.RLock()  # the threads of a kernel begin with the same jaxpr


def plan_of(jaxpr: core.Jaxpr) -> Plan:
    """The plan of a jaxpr and of all within it, the same for each call."""
    with _planning:
        plan = _plans.get(jaxpr)
        if plan is None:
            plan = _plans[jaxpr] = Plan(jaxpr)
    return plan


def run_thread(jaxpr: core.Jaxpr, consts: Sequence[Any], *args: Any) -> None:
    """Runs one thread: `_run_jaxpr` of `jax._src.pallas.mosaic.interpret.thread_map`."""
    with _failing_together():
        plan = plan_of(jaxpr)
        with np.errstate(all="ignore"):
            plan(*map(_value, [*consts, *args]))


def map_threads(
    function: Callable[..., Any],
    num_threads: int,
    token: Any,
    *args: Any,
    **options: Any,
) -> Any:
    """`thread_map` of the same module, which would leave a lone thread in the caller's computation, for XLA to compile.

    Here it is called back, as several are.
    """
    if num_threads != 1:
        return _map_threads_of_jax(function, num_threads, token, *args, **options)

    def thread(index: Any, *args: Any) -> Any:
        return function(index, jnp.int32(thread_map.NESTED_TOKEN_VALUE), *args)

    jaxpr = jax.make_jaxpr(thread)(jnp.int32(0), *args)
    return thread_map._call_threadmap_callback(
        token,
        options.get("device_id"),
        jaxpr,
        num_threads,
        jaxpr.consts,
        args,
        options.get("use_ordered_callback", False),
        options["on_exception"],
    )


@contextlib.contextmanager
def _failing_together() -> Iterator[None]:
    """Inside, an error ends the other threads too: JAX tells them only of one in a callback, and they would wait on."""
    try:
        yield
    except BaseException as error:
        memory = gpu_callbacks._shared_memory
        if memory is not None:
            memory.set_failed(error, top_level=False)
        raise


def _value(array: Any) -> Any:
    """An array, or the scalar that an array without axes holds."""
    return np.asarray(array)[()]


# Equations with several outputs, or of primitives without a form.


def _many(equation: core.JaxprEqn) -> Many:
    make = _MANY.get(equation.primitive.name, _bound)
    return make(equation)


def _callback(equation: core.JaxprEqn) -> Many:
    params = equation.params
    avals = params["result_avals"]

    def call(*operands: Any) -> list[Any]:
        results = callbacks.io_callback_impl(*operands, **params)
        return [_returned(x, aval) for x, aval in zip(results, avals, strict=True)]

    return call


def _returned(result: Any, aval: core.ShapedArray) -> Any:
    """A copy of what a callback returned, which may be memory that others write."""
    array = np.array(result)
    if array.dtype != aval.dtype:
        array = np.asarray(dtypes.canonicalize_value(array))
    if array.dtype != aval.dtype or array.shape != aval.shape:
        raise RuntimeError(
            f"a callback returned {array.dtype}{array.shape}, not {aval}"
        )
    return _value(array)


def _call(equation: core.JaxprEqn) -> Many:
    return _closed(equation.params["jaxpr"])


def _closed(jaxpr: core.Jaxpr) -> Many:
    return functools.partial(plan_of(jaxpr), *map(_value, jaxpr.consts))


def _while(equation: core.JaxprEqn) -> Many:
    params = equation.params
    condition = _closed(params["cond_jaxpr"])
    body = _closed(params["body_jaxpr"])
    first_of_body = params["cond_nconsts"]
    first_carried = first_of_body + params["body_nconsts"]

    def loop(*operands: Any) -> Sequence[Any]:
        of_condition = operands[:first_of_body]
        of_body = operands[first_of_body:first_carried]
        carried: Sequence[Any] = operands[first_carried:]
        while condition(*of_condition, *carried)[0]:
            carried = body(*of_body, *carried)
        return carried

    return loop


def _cond(equation: core.JaxprEqn) -> Many:
    branches = list(map(_closed, equation.params["branches"]))
    last = len(branches) - 1

    def choose(index: Any, *operands: Any) -> Sequence[Any]:
        return branches[min(max(int(index), 0), last)](*operands)

    return choose


def _scan(equation: core.JaxprEqn) -> Many:
    params = equation.params
    num_consts, num_carried, _ = map(len, params["ft_in"].unpack())
    first_each = num_consts + num_carried
    body = _closed(params["jaxpr"])
    turns = range(params["length"])
    if params["reverse"]:
        turns = turns[::-1]
    stacked_avals = [var.aval for var in equation.outvars[num_carried:]]

    def scan(*operands: Any) -> list[Any]:
        consts = operands[:num_consts]
        carried: Sequence[Any] = operands[num_consts:first_each]
        stacked = [np.empty(aval.shape, aval.dtype) for aval in stacked_avals]
        for turn in turns:
            each = [x[turn] for x in operands[first_each:]]
            results = body(*consts, *carried, *each)
            carried = results[:num_carried]
            for whole, part in zip(stacked, results[num_carried:], strict=True):
                whole[turn] = part
        return [*carried, *stacked]

    return scan


def _unchanged(equation: core.JaxprEqn) -> Many:
    del equation
    return lambda *operands: operands


def _bound(equation: core.JaxprEqn) -> Many:
    """What JAX does with an equation that has no other form here."""
    primitive = equation.primitive
    params = primitive.get_bind_params(equation.params)

    def bind(*operands: Any) -> list[Any]:
        bound[primitive.name] += 1
        with equation.ctx.manager:
            results = primitive.bind(*map(jnp.asarray, operands), **params)
        if not primitive.multiple_results:
            results = [results]
        return list(map(_value, results))

    return bind


_MANY: dict[str, Callable[[core.JaxprEqn], Many]] = {
    "cond": _cond,
    "io_callback": _callback,
    "jit": _call,
    "optimization_barrier": _unchanged,
    "scan": _scan,
    "while": _while,
}
