"""Whether one case is right: against the recurrence in float64, and without it.

Values, and gradients where the transform has some, are compared on one query and key head with its
value heads, over all rows and tokens. Besides: all results are finite, padding is 0, the same call
gives the same bits twice, and no bit of a row depends on later tokens or on other rows; slots of a
pool that no row names keep theirs.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.soak.cases import MAIN, Arrays, Call, Case, Numbers, draw_arrays
from benchmarks.soak.computed import Compiled, compiled, taken
from benchmarks.soak.recurrence import exact, part

# Relative errors that 16-bit inputs may cost; what is not named here, 8e-3.
FLOORS = {"output": 5e-3, "final_state": 5e-3, "dg": 1.5e-2, "dbeta": 1.5e-2}
OTHERS = 8e-3
FLOAT32 = 1e-5
OF_FLOAT32 = 1.5  # times the error of "xla" in float32, rounded at the end
UNDERFLOW = 1e-35  # float32 has nothing smaller: what differs by less is the same


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
        wrong += self._of_padding(found, arrays[1].get("segment_ids"))
        wrong += self._of_free_slots(found, arrays)
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

    def _of_free_slots(self, found: Arrays, arrays: Any) -> list[str]:
        """Slots of a pool that no row names, or one without tokens."""
        if not self.call.pool:
            return []
        x, indices, _ = arrays
        has_tokens = indices["segment_ids"].any(axis=1)
        named = indices["state_slots"][has_tokens]
        free = np.setdiff1d(np.arange(self.call.state_shape[0]), named)
        before = x["initial_state"][free]
        if found["final_state"][free].tobytes() == before.tobytes():
            return []
        return ["final_state has other bits in slots that no row writes"]

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
        others = self._run((x, *arrays[1:]))
        before = {"output": t}
        if self.call.states_every:
            before["final_state"] = t // self.call.states_every
        return [
            f"{name} before token {t} depends on later tokens or other rows"
            for name, end in before.items()
            if others[name][0, :end].tobytes() != found[name][0, :end].tobytes()
        ]

    def _of_errors(self, found: Arrays, arrays: Any, numbers: Numbers) -> list[str]:
        call = self.call
        head = numbers.seed % call.heads
        x, indices, cotangents = arrays
        cut = [
            {name: part(call, name, a, head) for name, a in part_of.items()}
            for part_of in (x, cotangents)
        ]
        want = self._exact(cut[0], indices, cut[1])
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
        x, indices, cotangents = arrays
        wide = jax.tree.map(lambda a: a.astype(np.float32), (x, cotangents))
        return self._run((wide[0], indices, wide[1]), self._float32)


def _finite(a: np.ndarray) -> bool:
    return bool(np.isfinite(a.astype(np.float64)).all())
