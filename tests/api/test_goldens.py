"""Ops and gates against other libraries' own code in float64: chunked, token by token, without a derivative rule."""

import functools

import jax
import jax.numpy as jnp
import pytest
from support import goldens

import jfla

FORWARD = {"o", "final_state"}


def limit(name: str, array: str) -> float:
    """1e-5 forward and 1e-4 for gradients, or what the golden says of its own conditioning."""
    return max(goldens.TOLERANCES[name][array], 1e-5 if array in FORWARD else 1e-4)


def check(name: str, results: dict, arrays: dict, expected: set[str]) -> None:
    assert results.keys() == expected
    errors = {
        array: goldens.rms_error(x, arrays[array])
        for array, x in results.items()
        if array in arrays
    }
    wrong = {
        array: (e, limit(name, array))
        for array, e in errors.items()
        if not e <= limit(name, array)
    }
    assert not wrong
    # nothing that the golden stores went unread
    assert errors.keys() == goldens.TOLERANCES[name].keys()


@pytest.mark.parametrize("form", ["chunk", "recurrent"])
@pytest.mark.parametrize("name", goldens.OPS)
def test_outputs_and_gradients(name, form):
    arrays, options = goldens.load(name)
    op = functools.partial(
        getattr(jfla, f"{form}_{options['op']}"), implementation="xla"
    )
    results = jax.jit(lambda arrays: goldens.results(op, arrays, options))(arrays)
    expected = FORWARD | {f"d{x}" for x in goldens.differentiable(arrays, options)}
    check(name, results, arrays, expected)


@pytest.mark.parametrize("name", ["op_kda_gva2_softplus.npz", "op_gdn_varlen.npz"])
def test_outputs_of_the_undecorated_chunked_form(name):
    arrays, options = goldens.load(name)
    op = getattr(jfla.reference, f"chunk_{options['op']}")
    run = jax.jit(
        lambda arrays: goldens.run(
            op, goldens.differentiable(arrays, options), arrays, options
        )
    )
    out = run(arrays)
    for array, x in (("o", out.output), ("final_state", out.final_state)):
        assert goldens.rms_error(x, arrays[array]) <= limit(name, array)


@pytest.mark.parametrize("case", goldens.GATES)
def test_gates(case):
    arrays, lower_bound, tolerances = goldens.load_gate(case)
    inputs = goldens.gate_inputs(arrays)

    @jax.jit
    def run(inputs, dy):
        y, adjoint = jax.vjp(
            lambda inputs: goldens.gate(inputs, lower_bound)(inputs["g"]), inputs
        )
        return {"y": y} | {f"d{name}": x for name, x in adjoint(dy)[0].items()}

    results = run(inputs, jnp.asarray(arrays["dy"]).reshape(inputs["g"].shape))
    assert results.keys() == tolerances.keys()
    for array, x in results.items():
        assert goldens.rms_error(x, arrays[array]) <= tolerances[array], array
