"""The backends under the stage tests: what each reads of an oracle's results, and how near it must come."""

import contextlib
import dataclasses
import functools
import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jfla
from jfla.pallas.dims import dims_of
from jfla.pallas.heuristics import SMEM_BYTES, Schedule, schedule
from jfla.pallas.machine import Machine
from jfla.stages import DecayedQK, FactoredQK, IntraChunk, JoinedQK, ScanResults
from jfla.types import Inputs, Options
from support import kernel_cases
from support.kernel_cases import Call
from support.stage_oracle import Tokens, pad_time, to_chunks, to_tokens, tokens


@dataclasses.dataclass(frozen=True)
class Backend:
    """A module with the stages, the dtype that it reads q, k, v, matrices and states in, and that of the rest.

    Kernels are those of a machine, in the shared memory of the smallest of its GPUs.
    """

    module: str
    dtype: str
    scalars: str
    machine: Machine = "hopper"

    def run(self, stage: str, inputs: Inputs, options: Options, *rest: Any) -> Any:
        """A stage of `jfla.stages.Stages`, by name."""
        function = getattr(importlib.import_module(self.module), stage)
        if self.machine != "hopper":
            function = functools.partial(function, plan=self.schedule(inputs, options))
        with self.context():
            return jax.jit(function, static_argnums=1)(inputs, options, *rest)

    def schedule(self, inputs: Inputs, options: Options) -> Schedule:
        """Of the call on a small GPU that its kernels are for."""
        dims = dims_of(inputs, options)
        return schedule(options.op, dims, 58, SMEM_BYTES["8.9"], self.machine)

    @contextlib.contextmanager
    def context(self) -> Any:
        """Where its stages run."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(jax.enable_x64(self.scalars == "float64"))
            if "pallas" in self.module:
                stack.enter_context(jfla.pallas.interpret())
            else:
                # A GPU rounds float32 operands to tensorfloat32 otherwise.
                stack.enter_context(jax.default_matmul_precision("highest"))
            yield

    def rounded(self, tree: Any, dtype: str = "") -> Any:
        """As it reads numpy arrays."""
        with self.context():
            return jax.tree.map(
                lambda a: jnp.asarray(a).astype(dtype or self.dtype), tree
            )

    def inputs(self, call: Call) -> tuple[Inputs, Options, Tokens]:
        """The call as the stages take it, and as the oracle does."""
        arrays, rest = kernel_cases.inputs(call)
        x = tokens(call, arrays, rest)
        with self.context():
            if self.dtype == "float64":
                arrays = {
                    name: jnp.asarray(a).astype("float64") for name, a in arrays.items()
                }
            main, more = kernel_cases.main_and_rest(arrays)
            inputs, options = kernel_cases.validated(call.op, *main, **more, **rest)
            # zeros where segments begin empty
            initial = jnp.asarray(x.initial).astype(self.scalars)
        return inputs._replace(initial_state=initial), options, x

    def qk(self, inputs: Inputs, x: Tokens, qk: DecayedQK) -> tuple[Any, DecayedQK]:
        """An oracle's q and k as this backend keeps them: rounded, and those same numbers in float64."""
        if inputs.g.shape[-1] > 1:
            rounded = self.rounded(qk)._replace(
                chunk_decay=self.rounded(qk.chunk_decay, self.scalars)
            )
            with self.context():
                kept = JoinedQK.join(rounded)
            return kept, exact(rounded)
        q, k = self.rounded([pad_time(np.asarray(a)) for a in (inputs.q, inputs.k)])
        factors = self.rounded(_factors(x, qk), self.scalars)
        rows = np.moveaxis(exact(factors), 3, 0)
        expanded = DecayedQK(
            q_from_start=rows[0][..., None] * x.q,
            k_from_start=rows[1][..., None] * x.k,
            k_to_end=rows[2][..., None] * x.k,
            chunk_decay=rows[3][..., :1],
        )
        return FactoredQK(q, k, factors), expanded

    def pairs(self, pairs: IntraChunk) -> tuple[IntraChunk, IntraChunk]:
        """The same of a_qk and a_inv."""
        kept = self.rounded(pairs)
        return kept, exact(kept)

    def scans(self, scans: ScanResults) -> tuple[ScanResults, ScanResults]:
        """The same of an oracle's `ScanResults`, which are in chunks; what is kept has tokens where a stage has."""
        kept = self.rounded(scans)
        by_token = {
            name: to_tokens(getattr(kept, name)) for name in ("v_new", "do", "dv")
        }
        return kept._replace(**by_token), exact(kept)


def _factors(x: Tokens, qk: DecayedQK) -> np.ndarray:
    """[B, HV, N, 4, C]: what rows of q and k as the caller passed them are multiplied with."""

    def ratio(rows: np.ndarray, of: np.ndarray) -> np.ndarray:
        largest = np.argmax(np.abs(of), axis=-1)[..., None]
        rows, of = (np.take_along_axis(a, largest, axis=-1)[..., 0] for a in (rows, of))
        return rows / np.where(of == 0, 1, of)

    rows = [
        ratio(qk.q_from_start, x.q),
        ratio(qk.k_from_start, x.k),
        ratio(qk.k_to_end, x.k),
    ]
    return np.stack([*rows, np.broadcast_to(qk.chunk_decay, rows[0].shape)], axis=3)


def exact(tree: Any) -> Any:
    """In numpy's float64."""
    return jax.tree.map(lambda a: np.asarray(a, np.float64), tree)


BACKENDS = {
    "xla": Backend("jfla.xla.stages", "float32", "float32"),
    "xla-float64": Backend("jfla.xla.stages", "float64", "float64"),
    "sm90": Backend("jfla.pallas.stages", "bfloat16", "float32"),
    "mma": Backend("jfla.pallas.stages", "bfloat16", "float32", "ampere"),
}


def cases(small: list[Call], others: list[Call]) -> list[Any]:
    """(backend, call) for `pytest.mark.parametrize`; the others only with -m slow."""
    params = []
    for name in BACKENDS:
        for call in [*small, *others]:
            marks = [] if call in small else [pytest.mark.slow]
            params.append(pytest.param(name, call, marks=marks, id=f"{name}-{call}"))
    return params


def cotangents(call: Call, x: Tokens) -> tuple[np.ndarray, np.ndarray]:
    """Of the output in chunks, in bfloat16's digits and 0 where there are no tokens, and of the final state."""
    first, second = jax.random.split(jax.random.key(7))
    do = jax.random.normal(first, x.v.shape).astype("bfloat16")
    do = np.where(x.keep[..., None], np.asarray(do, np.float64), 0)
    return do, np.asarray(jax.random.normal(second, x.initial.shape), np.float64)


def worst(got: Any, want: Any) -> float:
    """The largest error in any chunk, [B, HV, N, ...], beside the chunk's largest element; NaN where there is one."""
    got, want = (np.asarray(a, np.float64) for a in (got, want))
    assert got.shape == want.shape

    def largest(a: np.ndarray) -> np.ndarray:
        return np.abs(a.reshape(*a.shape[:3], -1)).max(axis=-1)

    return float(np.max(largest(got - want) / np.maximum(largest(want), 1e-6)))


def hold(bounds: dict[str, float], **pairs: tuple[Any, Any]) -> None:
    """Every (got, want) in chunks within the bound of its name."""
    found = {name: worst(*pair) for name, pair in pairs.items()}
    over = {
        name: f"{error:.1e} > {bounds[name]:.1e}"
        for name, error in found.items()
        if not error <= bounds[name]
    }
    assert not over, f"{over}"


def chunked(a: Any) -> np.ndarray:
    """[B, T, HV, ...] of a backend in chunks, in float64."""
    return to_chunks(np.asarray(a, np.float64))
