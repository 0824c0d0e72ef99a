"""Kernels that were never run on a GPU like the one at hand: compiled first, and turned off by a variable."""

import warnings
from typing import Any

import jax
import pytest
from support.kernel_cases import validated

import jfla
from jfla import dispatch
from jfla.pallas import support, trial


def described(op: str) -> tuple[Any, ...]:
    x = jax.ShapeDtypeStruct((1, 64, 2, 64), "bfloat16")
    scalar = jax.ShapeDtypeStruct((1, 64, 2), "float32")
    return x, x, x, x if op == "kda" else scalar, scalar


def choose(op: str, compiles: bool, wanted: Any = None) -> jfla.Choice:
    inputs, options = validated(op, *described(op))
    return dispatch.choose("chunk", inputs, options, wanted, compiles)


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[trial.Trial]:
    """The trials that a call compiles if this device is an Ada GPU."""
    compiled: list[trial.Trial] = []
    monkeypatch.setattr(support, "unsupported_target", lambda _: None)
    monkeypatch.setattr(support, "capability_of", lambda _: "8.9")
    monkeypatch.setattr(trial, "_FAILED", {})
    monkeypatch.setattr(
        trial, "compile_trial", lambda trial, device: compiled.append(trial)
    )
    return compiled


def test_an_op_is_compiled_once_before_it_takes_the_kernels(tried):
    assert choose("kda", compiles=False).implementation == "pallas"
    assert not tried
    for _ in range(2):
        assert choose("kda", compiles=True).implementation == "pallas"
    here = jax.devices()[0].device_kind
    assert [(x.op, x.key_dim, x.device_kind) for x in tried] == [("kda", 64, here)]
    choose("gdn", compiles=True)
    assert [x.op for x in tried] == ["kda", "gdn"]


def test_an_op_that_does_not_compile_takes_xla_with_a_warning(tried, monkeypatch):
    def fails(_: Any, device: Any) -> None:
        raise RuntimeError("ptxas died\nand more")

    monkeypatch.setattr(trial, "compile_trial", fails)
    with pytest.warns(
        RuntimeWarning, match='chunk_kda takes "xla", not the kernels.*ptxas died'
    ):
        choice = choose("kda", compiles=True)
    assert choice.implementation == "xla"
    assert choice.reasons["pallas"].endswith("RuntimeError: ptxas died")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choose("kda", compiles=True) == choice
        assert choose("kda", compiles=False) == choice
        assert choose("kda", compiles=True, wanted="pallas").implementation == "pallas"


def test_a_variable_turns_them_off_unless_named(tried, monkeypatch):
    monkeypatch.setenv("JFLA_UNMEASURED_KERNELS", "0")
    choice = choose("kda", compiles=True)
    assert choice.implementation == "xla"
    reason = "compiled for 8.9, but not measured there, and JFLA_UNMEASURED_KERNELS=0"
    assert choice.reasons["pallas"] == reason
    assert choose("kda", compiles=True, wanted="pallas").implementation == "pallas"
    assert not tried
    monkeypatch.setattr(support, "capability_of", lambda _: "9.0")
    assert choose("kda", compiles=True).detail == "Hopper kernels"


@pytest.mark.interpreted  # each kernel that is lowered for a GPU is compiled as a program of its own, too
@pytest.mark.parametrize("form", ["chunk", "recurrent"])
@pytest.mark.parametrize("op", ["kda", "gdn"])
def test_the_trial_is_a_call_of_the_kernels(form, op, monkeypatch):
    """Up to where it is lowered, here in interpret mode, and inside a trace."""
    made = []
    monkeypatch.setattr(
        jax.stages.Lowered, "compile", lambda self: made.append(self.as_text())
    )
    small = trial.Trial(form, op, "bfloat16", 64, 64, "a CPU")

    def traced(x: jax.Array) -> jax.Array:
        with jfla.pallas.interpret(), jfla.pallas.mma_kernels():
            trial.compile_trial(small, jax.devices()[0])
        return x

    jax.jit(traced)(1.0)
    assert len(made) == 1
