"""Whether one case is right: against the recurrence in float64, and without it.

Values, and gradients where the transform has some, are compared on one query and key head with its
value heads, over all rows and tokens. Besides: all results are finite, padding is 0, the same call
gives the same bits twice, and no bit of a row depends on later tokens or on other rows.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jfla
from benchmarks.soak.cases import (
    GATE,
    MAIN,
    MAPPED,
    Arrays,
    Call,
    Case,
    Numbers,
    draw_arrays,
)

# Relative errors that 16-bit inputs may cost; what is not named here, 8e-3.
FLOORS = {"output": 5e-3, "final_state": 5e-3, "dg": 1.5e-2, "dbeta": 1.5e-2}
OTHERS = 8e-3
FLOAT32 = 1e-5
OF_FLOAT32 = 1.5  # times the error of "xla" in float32, rounded at the end
UNDERFLOW = 1e-35  # float32 has nothing smaller: what differs by less is the same
BLOCK = 256  # tokens between the states that the backward of the recurrence keeps

Compiled = Callable[[Any, Any, Any], dict[str, jax.Array]]


class Refused(Exception):
    """The implementation does not take a call; the message is the reason."""


# The call under test.


def _gate(call: Call, x: Any) -> jfla.SoftplusGate | jfla.SigmoidGate | None:
    if call.gate is None:
        return None
    kind = jfla.SoftplusGate if call.gate == "softplus" else jfla.SigmoidGate
    return kind(x["a_log"], x.get("dt_bias"))


def _static(call: Call) -> dict[str, Any]:
    with_states = call.segments and (call.final or call.state is not None)
    return {
        "beta_max": call.beta_max,
        "qk_norm": call.qk_norm,
        "scale": call.scale,
        "return_final_state": call.final,
        "num_segments": call.segments if with_states else None,
    }


def _function(call: Call) -> Callable[..., jfla.DeltaRuleOutput]:
    return getattr(jfla, f"{call.form}_{call.op}")


def _values(call: Call, implementation: str | None, x: Any, ids: Any) -> dict[str, Any]:
    out = _function(call)(
        *(x[name] for name in MAIN),
        gate=_gate(call, x),
        initial_state=x.get("initial_state"),
        segment_ids=ids,
        implementation=implementation,
        **_static(call),
    )
    return {name: a for name, a in out._asdict().items() if a is not None}


def _differentiated(
    forward: Callable[[Any], Any], x: Any, cotangents: Any
) -> dict[str, Any]:
    out, adjoint = jax.vjp(forward, x)
    return out | {f"d{name}": a for name, a in adjoint(cotangents)[0].items()}


def compiled(call: Call, implementation: str | None) -> Compiled:
    """Jitted (arrays, segment ids, cotangents) -> {"output", "final_state", "dq", ..}."""

    def run(x: Any, ids: Any, cotangents: Any) -> dict[str, Any]:
        def forward(x: Any) -> dict[str, Any]:
            return _values(call, implementation, x, ids)

        if call.transform == "jit":
            return forward(x)
        if call.transform == "checkpoint":
            return _differentiated(jax.checkpoint(forward), x, cotangents)
        if call.transform == "shard_map":
            return _differentiated(
                _over_devices(call, implementation, x, ids), x, cotangents
            )
        return _differentiated(forward, x, cotangents)

    return jax.jit(_mapped(run) if call.transform == "vmap" else run)


def _mapped(run: Compiled) -> Compiled:
    """`run` with its batch axis in two, one of them mapped; the gate's parameters are not."""

    def split(x: Any) -> Any:
        return x.reshape(MAPPED, -1, *x.shape[1:])

    def by_rows(x: Any, ids: Any, cotangents: Any) -> dict[str, Any]:
        shared = {name: a for name, a in x.items() if name in GATE}
        rows = {name: split(a) for name, a in x.items() if name not in GATE}
        others = jax.tree.map(split, (ids, cotangents))
        found = jax.vmap(lambda rows, others: run(rows | shared, *others))(rows, others)
        return {
            name: a.sum(axis=0)
            if name.removeprefix("d") in GATE
            else a.reshape(-1, *a.shape[2:])
            for name, a in found.items()
        }

    return by_rows


def _over_devices(
    call: Call, implementation: str | None, x: Any, ids: Any
) -> Callable[[Any], dict[str, Any]]:
    """The values with the batch split over all devices; the gate's parameters are on each."""
    kind = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((jax.device_count(),), ("batch",), axis_types=kind)
    rows = jax.P("batch")
    specs = {name: jax.P() if name in GATE else rows for name in x}
    of_device = functools.partial(_values, call, implementation)
    split = jax.shard_map(of_device, mesh=mesh, in_specs=(specs, rows), out_specs=rows)
    return lambda x: split(x, ids)


def taken(call: Call, implementation: str | None, arrays: tuple[Any, Any, Any]) -> str:
    """The implementation that takes the call here. Raises `Refused` with the reason."""
    if implementation == "xla":
        return "xla"  # it takes every call
    x, ids, _ = jax.tree.map(jnp.asarray, arrays)
    try:
        choice = jfla.explain(
            _function(call),
            *(x[name] for name in MAIN),
            gate=_gate(call, x),
            initial_state=x.get("initial_state"),
            segment_ids=ids,
            implementation=implementation,
            **_static(call),
        )
    except NotImplementedError as reason:
        raise Refused(str(reason)) from reason
    return choice.implementation


# The reference.


def part(call: Call, name: str, a: Any, head: int) -> Any:
    """What is compared of an array, by its name: one query and key head with its value heads."""
    name = name.removeprefix("d") if name != "dt_bias" else name
    heads = slice(head * call.group, (head + 1) * call.group)
    if name in ("q", "k"):
        return a[:, :, head : head + 1]
    if name in GATE:
        return a[heads]
    if name.endswith("_state"):
        return a[..., heads, :, :]
    return a[:, :, heads]


def exact(call: Call) -> Callable[[Arrays, Any, Arrays], Arrays]:
    """The recurrence in float64 on arrays of one query and key head."""

    def run(x: Any, ids: Any, cotangents: Any) -> dict[str, Any]:
        def forward(x: Any) -> dict[str, Any]:
            return _recurrence(call, x, ids)

        return (
            forward(x)
            if call.transform == "jit"
            else _differentiated(forward, x, cotangents)
        )

    jitted = jax.jit(run)

    def call_(x: Arrays, ids: Any, cotangents: Arrays) -> Arrays:
        with jax.enable_x64(True):
            wide = jax.tree.map(
                lambda a: jnp.asarray(a.astype(np.float64)), (x, cotangents)
            )
            found = jitted(wide[0], ids, wide[1])
            return {name: np.asarray(a) for name, a in found.items()}

    return call_


def _recurrence(call: Call, x: Any, ids: Any) -> dict[str, Any]:
    """In blocks, so that its backward keeps one state for each; padding behind the end is inert."""
    op = getattr(jfla.reference, f"recurrent_{call.op}")
    rest = -call.time % min(BLOCK, call.time)
    if ids is None:
        ids = jnp.ones((call.batch, call.time), jnp.int32)
    static = _static(call) | {"return_final_state": True, "num_segments": None}

    def blocks(a: Any) -> Any:
        a = jnp.pad(a, ((0, 0), (0, rest), *[(0, 0)] * (a.ndim - 2)))
        return jnp.moveaxis(
            a.reshape(call.batch, -1, min(BLOCK, call.time), *a.shape[2:]), 1, 0
        )

    slots = call.segments or 1
    shape = (call.batch, slots, call.group, call.key_dim, call.value_dim)
    state = (
        jnp.zeros(shape) if call.state is None else x["initial_state"].reshape(shape)
    )

    @jax.checkpoint
    def body(state: Any, tokens: Any) -> tuple[Any, Any]:
        ids, *main = tokens
        out = op(
            *main, gate=_gate(call, x), initial_state=state, segment_ids=ids, **static
        )
        return out.final_state, out.output

    tokens = (blocks(ids), *(blocks(x[name]) for name in MAIN))
    state, output = lax.scan(body, state, tokens)
    output = jnp.moveaxis(output, 0, 1).reshape(call.batch, -1, *output.shape[3:])
    found = {"output": output[:, : call.time]}
    if call.final:
        found["final_state"] = state if call.segments else state[:, 0]
    return found


# What is right.


def error(got: np.ndarray, want: np.ndarray) -> float:
    """||got - want|| / ||want|| in float64; 0 where they differ by nothing that float32 holds.

    What is rounded to 0 in got's dtype has to be 0.
    """
    step = float(jnp.finfo(got.dtype).smallest_subnormal)
    want = np.where(np.abs(want) < step / 2, 0.0, want)
    difference = np.linalg.norm(got.astype(np.float64) - want)
    return (
        0.0
        if difference <= UNDERFLOW
        else float(difference / max(np.linalg.norm(want), 1e-300))
    )


def terms(call: Call, name: str, x: Arrays, dg: np.ndarray) -> np.ndarray:
    """What is summed to a cotangent of the gate's parameters, in the shape of dg; of other cotangents nothing."""
    if name == "ddt_bias":
        return dg
    if name != "da_log":
        return np.zeros(0)
    raw = x["g"].astype(np.float64) + x.get("dt_bias", 0.0)
    if call.gate == "sigmoid":
        return dg * raw
    # The derivative of exp(a_log) softplus(raw) by a_log, over that by raw, which is 1 far below 0.
    raw = np.maximum(raw, -100.0)
    softplus = np.logaddexp(0.0, raw)
    return dg * softplus * np.exp(softplus - raw)


def beside_terms(got: np.ndarray, want: np.ndarray, terms: np.ndarray) -> str:
    """How a message ends that tells of a sum: with ||got - want|| / ||terms||; empty where there are no terms.

    The terms have the errors of dg, token by token. Where they cancel, their sum is small, and its error is not.
    """
    if not terms.size:
        return ""
    difference = np.linalg.norm(got.astype(np.float64) - want)
    return f", {difference / max(np.linalg.norm(terms), 1e-300):.2e} of its terms"


def floor(call: Call, name: str, dtype: np.dtype) -> float:
    """The largest error that a result may have: one of 16 bit is rounded, whatever q is."""
    if call.dtype == "float32" and dtype == np.float32:
        return FLOAT32
    return FLOORS.get(name, OTHERS)


class Checked:
    """A call, compiled for its numbers to come, and the recurrence beside it."""

    def __init__(self, call: Call, implementation: str | None) -> None:
        self.call = call
        self._implementation = implementation
        self._op = compiled(call, implementation)
        self._exact = exact(call)
        self._float32: Compiled | None = None

    def problems(self, numbers: Numbers) -> list[str]:
        """What is wrong with one case; a failure of the compiler or the device is one, too."""
        try:
            return self._problems(numbers)
        except Exception as failure:
            text = str(failure).strip().splitlines() or [""]
            return [f"{type(failure).__name__}: {text[0][:200]}"]

    def _problems(self, numbers: Numbers) -> list[str]:
        arrays = draw_arrays(Case(self.call, numbers))
        found = self._run(arrays)
        wrong = [f"{name} is not finite" for name, a in found.items() if not _finite(a)]
        again = self._run(arrays)
        wrong += [
            f"{name} has other bits the second time"
            for name, a in found.items()
            if a.tobytes() != again[name].tobytes()
        ]
        wrong += self._of_padding(found, arrays[1])
        wrong += self._of_others(found, arrays, numbers)
        return wrong + self._of_errors(found, arrays, numbers)

    def _run(self, arrays: Any, op: Compiled | None = None) -> Arrays:
        found = (op or self._op)(*jax.tree.map(jnp.asarray, arrays))
        return {name: np.asarray(a) for name, a in found.items()}

    def _of_padding(self, found: Arrays, ids: np.ndarray | None) -> list[str]:
        if ids is None:
            return []
        of_tokens = ("output", *(f"d{name}" for name in MAIN))
        names = [name for name in of_tokens if name in found]
        return [
            f"{name} is not 0 on padding"
            for name in names
            if found[name][ids == 0].any()
        ]

    def _of_others(self, found: Arrays, arrays: Any, numbers: Numbers) -> list[str]:
        """Other tokens from some t on in the first row, and other rows."""
        rng = np.random.default_rng(numbers.seed + 1)
        t = int(rng.integers(1, self.call.time + 1))
        x = dict(arrays[0])
        strange, _, _ = draw_arrays(
            Case(self.call, dataclasses.replace(numbers, seed=numbers.seed + 1))
        )
        for name in MAIN:
            x[name] = strange[name].copy()
            x[name][0, :t] = arrays[0][name][0, :t]
        output = self._run((x, *arrays[1:]))["output"]
        if output[0, :t].tobytes() == found["output"][0, :t].tobytes():
            return []
        return [f"output before token {t} depends on later tokens or other rows"]

    def _of_errors(self, found: Arrays, arrays: Any, numbers: Numbers) -> list[str]:
        call = self.call
        head = numbers.seed % call.heads
        x, ids, cotangents = arrays
        cut = [
            {name: part(call, name, a, head) for name, a in part_of.items()}
            for part_of in (x, cotangents)
        ]
        want = self._exact(cut[0], ids, cut[1])
        wrong = []
        rounded: Arrays | None = None
        for name, ref in want.items():
            got = part(call, name, found[name], head)
            with np.errstate(over="ignore"):
                if not _finite(ref.astype(got.dtype)):
                    continue  # beyond the range of its dtype
            limit = floor(call, name, got.dtype)
            if (e := error(got, ref)) <= limit:
                continue
            # What kernels lose may be what float32 loses; "xla" is no measure of itself.
            if call.dtype != "float32" and self._by_kernels(arrays):
                rounded = rounded or self._rounded_float32(arrays)
                narrow = part(call, name, rounded[name], head).astype(got.dtype)
                limit += OF_FLOAT32 * error(narrow, ref)
            if not e <= limit:
                dg = want.get("dg", np.zeros(0))
                summed = terms(call, name, cut[0], dg)
                of_terms = beside_terms(got, ref, summed)
                wrong.append(f"{name}: error {e:.2e} > {limit:.2e}{of_terms}")
        return wrong

    def _by_kernels(self, arrays: Any) -> bool:
        return taken(self.call, self._implementation, arrays) == "pallas"

    def _rounded_float32(self, arrays: Any) -> Arrays:
        """Results of "xla" in float32 on the same, already rounded inputs."""
        if self._float32 is None:
            call = dataclasses.replace(self.call, dtype="float32", narrow=False)
            self._float32 = compiled(call, "xla")
        x, ids, cotangents = arrays
        wide = jax.tree.map(lambda a: a.astype(np.float32), (x, cotangents))
        return self._run((wide[0], ids, wide[1]), self._float32)


def _finite(a: np.ndarray) -> bool:
    return bool(np.isfinite(a.astype(np.float64)).all())
