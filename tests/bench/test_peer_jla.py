"""The peer jax-linear-attention by its own plain JAX: its conventions are ours, its refusals keep its words."""

import jax
import pytest

from benchmarks import inputs, runner
from benchmarks.ceilings import Ceilings
from benchmarks.exact import Exact
from benchmarks.programs import Refused
from benchmarks.results import Results
from benchmarks.shapes import OPS, Case, Shape

pytest.importorskip("jla", reason="no package jax-linear-attention")

from benchmarks import peer_jla

SHAPES = (Shape(2, 200, 2, 64), Shape(1, 200, 2, 64, packing="random", segments=3))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("op", OPS)
def test_its_conventions_are_ours(
    op: str, shape: Shape, monkeypatch: pytest.MonkeyPatch
):
    """Output, final state and every gradient of its chunked form: bfloat16 is all that is lost."""
    monkeypatch.setattr(peer_jla, "IMPLEMENTATION", "chunked")
    record = Results("a CPU", "cpu", "2000-01-02", None, {}, Ceilings(1.0, 1.0), [])
    found = {}
    for timed in ("forward", "forward+backward"):
        case = Case(op, timed, shape, "production")
        monkeypatch.setitem(
            runner.PROVIDERS,
            "jla",
            runner.PROVIDERS["jla"]._replace(build=peer_jla.build),
        )
        row = runner._row(
            case, "jla", [inputs.draw(case, 0)], 1, record, Exact(gradients=True)
        )
        assert row.refused is None
        found |= row.errors
    names = {"output", "dq", "dk", "dv", "dg", "dbeta"} | (
        {"final_state"} if shape.packing is None else set()
    )
    assert found.keys() == names
    assert all(error < 8e-3 for error in found.values()), found


def test_what_its_kernels_do_not_take_is_refused_in_its_words():
    if jax.default_backend() == "gpu":
        with pytest.raises(Refused, match=r"head dims must be in \(64, 128\)"):
            peer_jla.build(Case("kda", "forward", Shape(1, 64, 8, 256)))
        return
    with pytest.raises(Refused, match="mosaic_gpu KDA: the kernels need an sm_90"):
        peer_jla.build(Case("kda", "forward", SHAPES[0]))
    with pytest.raises(Refused, match=r"mosaic_gpu gated_delta_rule: .* need an sm_90"):
        peer_jla.build(Case("gdn", "forward", SHAPES[0]))


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (Case("gdn", "decode", Shape(2, 1, 2, 64)), "no decode"),
        (
            Case("kda", "forward", Shape(1, 64, 2, 64, value_heads=4)),
            "as many value heads",
        ),
    ],
)
def test_what_it_lacks_is_refused(case: Case, reason: str):
    with pytest.raises(Refused, match=reason):
        peer_jla.build(case)
