"""Calls of our own implementations as the bench makes them: what is donated, and what is refused with which reason."""

import contextlib
import functools
import sys
import types
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from support.kernel_cases import error

import jfla
from benchmarks import inputs, measure, runner
from benchmarks.ceilings import Ceilings
from benchmarks.exact import Exact
from benchmarks.providers import PROVIDERS
from benchmarks.results import Results, Row
from benchmarks.shapes import OPS, SETS, Case, Shape
from jfla import reference

TOKEN = Shape(2, 1, 2, 64)


def _row(case: Case, name: str, gradients: bool = False) -> Row:
    record = Results("a CPU", "cpu", "2000-01-02", None, {}, Ceilings(1.0, 1.0), [])
    return runner._row(
        case,
        name,
        [inputs.draw(case, seed) for seed in (0, 1)],
        2,
        record,
        Exact(gradients=gradients),
    )


@pytest.mark.parametrize("op", OPS)
def test_decoding_goes_on_from_the_state_it_left_and_writes_over_it(op: str):
    case = Case(op, "decode", TOKEN)
    arrays = inputs.draw(case, 0)
    program = PROVIDERS["xla"].build(case)
    loaded = program.load(arrays)
    before = loaded[1]
    program.first(loaded)
    assert before.is_deleted()
    second = program(loaded)
    assert not arrays["initial_state"].is_deleted()
    recurrent = functools.partial(
        getattr(reference, f"recurrent_{op}"), return_final_state=True
    )
    main = [arrays[name] for name in inputs.MAIN]
    state = recurrent(*main, initial_state=arrays["initial_state"]).final_state
    expected = recurrent(*main, initial_state=state)
    for name, x in expected._asdict().items():
        np.testing.assert_allclose(
            second[name].astype("float32"), x.astype("float32"), rtol=1e-5, atol=1e-6
        )


def test_decoding_has_time_error_and_speed():
    row = _row(Case("kda", "decode", TOKEN), "xla")
    assert row.refused is None
    assert row.ms > 0
    assert row.tb_per_s > 0
    assert 0 < row.errors["output"] < 4e-3
    assert row.errors["final_state"] < 1e-5


def test_decoding_takes_the_kernel_where_there_is_one(monkeypatch: pytest.MonkeyPatch):
    asked = []

    def recurrent(*main: jax.Array, implementation: str, **rest):
        asked.append(implementation)
        return reference.recurrent_gdn(*main, **rest)

    monkeypatch.setattr(jfla, "recurrent_gdn", recurrent)
    row = _row(Case("gdn", "decode", TOKEN), "pallas")
    assert set(asked) == {"pallas"}
    assert row.refused is None
    assert row.ms > 0


@pytest.mark.parametrize(
    ("case", "name", "reason"),
    [
        (
            Case("gdn", "forward+backward", Shape(2, 64, 1, 264)),
            "pallas",
            "K = 264; the kernels take",
        ),
        (
            Case("kda", "scan+output", Shape(2, 64, 1, 96)),
            "pallas",
            "K = 96; its stages are timed",
        ),
        (Case("kda", "decode", Shape(2, 1, 1, 256)), "pallas", ""),
        (
            Case("kda", "scan+output", Shape(1, 64, 1, 64)),
            "xla",
            "its stages are not kernels",
        ),
        (Case("gdn", "decode", TOKEN), "scan", 'one token of the scan is "xla"'),
    ],
)
def test_what_cannot_run_has_a_reason(case: Case, name: str, reason: str):
    row = _row(case, name)
    assert row.ms is None
    assert row.refused
    assert reason in row.refused


def test_the_decoders_inputs_do_not_stay_in_a_gpus_cache():
    for shape in SETS["decode"]:
        arrays = jax.eval_shape(
            lambda shape=shape: inputs._draw(Case("gdn", "decode", shape), 0)
        )
        size = sum(x.size * x.dtype.itemsize for x in arrays.values())
        assert size * measure.input_sets(size, gpu=True) >= 3 * measure.CACHE_BYTES


@pytest.mark.parametrize(("name", "number"), [("pallas", 3), ("pallas_chain", None)])
def test_the_number_of_packed_sequences_is_told_or_not(
    name: str, number: int | None, monkeypatch: pytest.MonkeyPatch
):
    case = Case("kda", "forward", Shape(1, 96, 1, 8, packing="random", segments=3))
    arrays = inputs.draw(case, 0)
    chunk = jfla.chunk_kda
    told = []

    def portable(
        *main: jax.Array, implementation: str, **rest: Any
    ) -> jfla.DeltaRuleOutput:
        assert implementation == "pallas"
        told.append(rest.get("num_segments"))
        return chunk(*main, **rest)

    monkeypatch.setattr(jfla, "chunk_kda", portable)
    results = PROVIDERS[name].build(case).first(arrays)
    assert set(told) == {number}
    scan = PROVIDERS["scan"].build(case).first(arrays)
    assert error(results["output"], scan["output"]) < 1e-2


def test_packed_sequences_with_states_have_the_results_without(
    monkeypatch: pytest.MonkeyPatch,
):
    """By kernels on a GPU; here the call takes whatever it can."""
    case = Case(
        "gdn", "forward+backward", Shape(1, 96, 1, 8, packing="random", segments=3)
    )
    arrays = inputs.draw(case, 0)
    without = PROVIDERS["xla"].build(case).first(arrays)
    chunk = jfla.chunk_gdn

    def portable(
        *main: jax.Array, implementation: str, **rest: Any
    ) -> jfla.DeltaRuleOutput:
        assert implementation == "pallas"
        return chunk(*main, **rest)

    monkeypatch.setattr(jfla, "chunk_gdn", portable)
    program = PROVIDERS["pallas_states"].build(case)
    results = program.first(program.load(arrays))
    assert results.keys() == {*without, "dinitial_state"}
    for name, x in without.items():
        assert error(results[name], x) < 1e-2, name
    assert results["dinitial_state"].shape == (1, 3, 1, 8, 8)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    "shape",
    [Shape(1, 96, 2, 16), Shape(2, 96, 1, 16, value_heads=2)],
    ids=["one row", "two rows"],
)
def test_a_models_call_has_gradients_of_the_gates_parameters(op: str, shape: Shape):
    """Compared where the recurrence runs all rows, since they are sums over these."""
    case = Case(op, "forward+backward", shape, "model")
    row = _row(case, "xla", gradients=True)
    assert row.refused is None
    assert ("da_log" in row.errors) == ("ddt_bias" in row.errors) == (shape.batch == 1)
    assert {"output", "dq", "dk", "dv", "dg", "dbeta"} <= row.errors.keys()
    assert max(row.errors.values()) < 1e-2


def test_a_models_call_of_packed_sequences_has_their_gradients():
    shape = Shape(1, 96, 1, 8, packing="random", segments=3)
    row = _row(Case("kda", "forward+backward", shape, "model"), "xla", gradients=True)
    assert row.refused is None
    assert max(row.errors[name] for name in ("output", "dg", "da_log")) < 1e-2


@pytest.mark.parametrize("name", ["flash_qla", "cudnn", "jla"])
def test_peers_without_gates_are_not_asked_for_a_models_call(name: str):
    row = _row(Case("kda", "forward", Shape(1, 64, 1, 64), "model"), name)
    assert row.refused == "it is timed on decays and unit keys"


def test_fla_is_asked_for_a_models_call(monkeypatch: pytest.MonkeyPatch):
    """It is given the raw gate input, the gate's parameters, and keys to normalise."""
    told: dict[str, Any] = {}

    def chunk(**arguments: Any) -> tuple[Any, None]:
        told.update(arguments)
        return arguments["v"], None

    _install_fla(monkeypatch, chunk)
    case = Case("kda", "forward", Shape(1, 64, 2, 8), "model")
    program = PROVIDERS["fla"].build(case)
    arrays = {name: np.asarray(x) for name, x in inputs.draw(case, 0).items()}
    program(arrays)
    assert told["use_gate_in_kernel"]
    assert told["use_qk_l2norm_in_kernel"]
    assert told["A_log"].shape == (2,)
    assert told["dt_bias"].shape == (16,)
    assert told["g"] is arrays["g"]


def _install_fla(monkeypatch: pytest.MonkeyPatch, chunk: Callable[..., Any]) -> None:
    """Modules of the names that the peer imports, with this function in the place of each of its ops."""
    torch: Any = types.ModuleType("torch")
    torch.no_grad = contextlib.nullcontext
    names = {
        "fla.ops.kda": ("chunk_kda", "fused_recurrent_kda"),
        "fla.ops.gated_delta_rule": (
            "chunk_gated_delta_rule",
            "fused_recurrent_gated_delta_rule",
        ),
    }
    for name in ("fla", "fla.ops", *names):
        module = types.ModuleType(name)
        for op in names.get(name, ()):
            setattr(module, op, chunk)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "torch", torch)
    # Imported anew with these, and forgotten behind the test: set first, because what was never there is not put back.
    monkeypatch.setitem(sys.modules, "benchmarks.peer_fla", torch)
    monkeypatch.delitem(sys.modules, "benchmarks.peer_fla")
    for name in ("FLA_FLASH_QLA", "FLA_FLASH_KDA", "FLA_TILELANG"):
        monkeypatch.setenv(name, "0")


def test_states_of_sequences_that_are_not_packed_are_refused():
    row = _row(Case("gdn", "forward", Shape(2, 64, 1, 64)), "pallas_states")
    assert row.refused == "the sequences are not packed"
