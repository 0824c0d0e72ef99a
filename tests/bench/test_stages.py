"""The operands that other libraries' stages get, and our stages on a simulated GPU, against the recurrence."""

import jax
import jax.numpy as jnp
import pytest

from benchmarks import inputs, stages
from benchmarks.exact import Exact
from benchmarks.programs import JaxProgram, Refused
from benchmarks.shapes import OPS, Case, Shape
from jfla import pallas


@pytest.mark.parametrize("op", OPS)
def test_the_operands_make_the_output(op: str):
    """A loop over chunks, as the kernels of other libraries go through them."""
    case = Case(op, "scan+output", Shape(2, 192, 1, 16, value_heads=2))
    arrays = inputs.draw(case, 0)

    def run(arrays: inputs.Arrays) -> dict[str, jax.Array]:
        x = stages.chunk_operands(case, arrays)
        q = jnp.repeat(arrays["q"].astype(jnp.float32), 2, axis=2)
        state, outputs = jnp.zeros((2, 2, 16, 16)), []
        for start in range(0, 192, 64):
            at = slice(start, start + 64)
            v_new = x.u[:, at] - jnp.einsum("bchk,bhkv->bchv", x.w[:, at], state)
            read = q[:, at] * 16**-0.5 * jnp.exp(x.g_cum[:, at])
            inside = jnp.einsum("bchd,bdhv->bchv", x.a_qk[:, at], v_new)
            outputs.append(jnp.einsum("bchk,bhkv->bchv", read, state) + inside)
            state = state * jnp.exp(x.g_cum[:, start + 63])[..., None]
            state = state + jnp.einsum("bchk,bchv->bhkv", x.k_to_end[:, at], v_new)
        return {"output": jnp.concatenate(outputs, axis=1), "final_state": state}

    with jax.default_matmul_precision("highest"):
        program = JaxProgram(run)
        found = Exact(gradients=False).errors(
            case, arrays, program, program.first(arrays)
        )
    assert found.keys() == {"output", "final_state"}
    assert max(found.values()) < 1e-5


@pytest.mark.parametrize("op", OPS)
def test_our_stages_make_the_output(op: str):
    case = Case(op, "scan+output", Shape(1, 128, 1, 64, value_heads=2))
    arrays = inputs.draw(case, 0)
    with pallas.interpret():
        program = stages.ours(case)
        results = program.first(program.load(arrays))
    found = Exact(gradients=False).errors(case, arrays, program, results)
    assert found.keys() == {"output", "final_state"}
    assert 0 < max(found.values()) < 5e-3


def test_stages_refuse_what_they_are_not_timed_on():
    for shape in (
        Shape(1, 100, 1, 64),
        Shape(1, 128, 1, 64, packing="uniform", segments=2),
    ):
        with pytest.raises(Refused, match="whole chunks"):
            stages.ours(Case("kda", "scan+output", shape))


def test_our_stages_give_the_kernels_reason():
    case = Case("kda", "scan+output", Shape(1, 64, 1, 64))
    with pytest.raises(Refused, match="device is a CPU"):
        stages.ours(case).load(inputs.draw(case, 0))
