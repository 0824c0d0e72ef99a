"""The mma.sync kernels through the public ops, in interpret mode: every feature against the recurrence in float64."""

import jax
import numpy as np
import pytest
from support.kernel_cases import MAIN, Call, by_kernels, check, error, inputs, results

import jfla

CALLS = [
    Call("kda", "raw", time=70, segments=2, group=1),
    Call("gdn", "raw", time=70),
    Call("gdn", "strong", time=64, dtype="float16", group=1),
    *(
        pytest.param(call, marks=pytest.mark.slow)
        for call in (
            Call("kda", "raw", time=70),
            Call("kda", "strong", key_dim=128, value_dim=128),
            Call("kda", "mixed", time=65, betas="edge", repeated_keys=True),
            Call("kda", "raw", time=70, key_dim=48, value_dim=96),
            Call("kda", "weak", time=130, segments=2, segment_states=True),
            Call("kda", "strong", time=64, dtype="float16", group=1),
            Call("kda", "raw", time=70, key_dim=128, dtype="float16"),
            Call("gdn", "mixed", time=130, segments=3, betas="edge"),
            Call("gdn", "strong", key_dim=128, value_dim=128, dtype="float16"),
            Call("gdn", "raw", time=70, key_dim=128, value_dim=64, dtype="float16"),
            Call("gdn", "weak", time=130, segments=2, segment_states=True),
            Call("gdn", "raw", time=64, key_dim=24, value_dim=100),
        )
    ),
]


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_values_and_gradients(call):
    """Raw gates with norms, packing, states that go in and come out, of segments too, padded sizes, float16."""
    with jfla.pallas.interpret(), jfla.pallas.mma_kernels():
        check(call, by_kernels(call.op))


@pytest.mark.parametrize("op", [pytest.param("kda", marks=pytest.mark.slow), "gdn"])
def test_chunks_without_tokens_are_left_out(op):
    """Of four segments three are empty. Two chunks without tokens would write to one place."""
    call = Call(op, time=66, group=1, segments=4, segment_states=True)
    arrays, rest = inputs(call)
    rest["segment_ids"] = rest["segment_ids"].at[:].set(1)
    with jfla.pallas.interpret(), jfla.pallas.mma_kernels():
        got = results(by_kernels(op), arrays, rest)
    want = results(getattr(jfla, f"chunk_{op}"), arrays, rest)
    for name, x in want.items():
        assert error(got[name], x) < 1.5e-2, name


@pytest.mark.parametrize("op", [pytest.param("kda", marks=pytest.mark.slow), "gdn"])
def test_states_along_time(op):
    arrays, rest = inputs(Call(op, "weak", time=192, group=1))
    del rest["return_final_state"]
    main = [arrays[name] for name in MAIN]
    call = {"initial_state": arrays["initial_state"], "return_states_every": 64}
    with jfla.pallas.interpret(), jfla.pallas.mma_kernels():
        got = by_kernels(op)(*main, **call)
    want = getattr(jfla, f"chunk_{op}")(*main, **call, implementation="xla")
    assert error(got.output, want.output) < 5e-3
    assert error(got.final_state, want.final_state) < 5e-3


def test_rows_under_vmap_are_those_of_a_batch():
    """Under `vmap` a kernel is traced anew, behind all that chose its instructions."""
    arrays, _ = inputs(Call("gdn", batch=2, time=20, group=1))
    main = [arrays[name] for name in MAIN]
    op = by_kernels("gdn")

    def row(*main: jax.Array) -> jax.Array:
        return op(*(x[None] for x in main)).output[0]

    with jfla.pallas.interpret(), jfla.pallas.mma_kernels():
        mapped = jax.vmap(row)(*main)
        batched = op(*main).output
    np.testing.assert_array_equal(
        *(np.asarray(x.astype("float32")) for x in (mapped, batched))
    )


@pytest.mark.parametrize("factor", [1e3, pytest.param(0.5, marks=pytest.mark.slow)])
def test_causal_to_the_bit(factor):
    """Also where a later token's gate is so strong that its rows, and only they, take a pass of their own."""
    arrays, _ = inputs(Call("kda", time=64, group=1))
    at = 21
    changed = {
        name: arrays[name].at[:, at:].set(arrays[name][:, :1] * 0.5) for name in MAIN
    }
    changed["g"] = changed["g"].at[:, at:].multiply(factor)
    with jfla.pallas.interpret(), jfla.pallas.mma_kernels():
        first, second = (
            by_kernels("kda")(*(x[name] for name in MAIN)).output
            for x in (arrays, changed)
        )
    first, second = (np.asarray(x.astype("float32")) for x in (first, second))
    np.testing.assert_array_equal(first[:, :at], second[:, :at])
    assert (first[:, at:] != second[:, at:]).any()


@pytest.mark.parametrize("op", ["kda", "gdn"])
def test_the_kernels_are_those_of_mma_sync(op):
    """Forward and backward, though the backward is traced outside of the context."""
    arrays, rest = inputs(Call(op, time=64, group=1))
    chunk = getattr(jfla, f"chunk_{op}")
    main = [arrays[name] for name in MAIN]
    del rest

    def run(*main: jax.Array) -> jax.Array:
        with jfla.pallas.mma_kernels():
            return chunk(*main, implementation="pallas").output

    with jfla.pallas.compiling_for("9.0"):
        names = str(jax.make_jaxpr(lambda *x: jax.vjp(run, *x)[1](x[2]))(*main))
        hopper = str(
            jax.make_jaxpr(lambda *x: chunk(*x, implementation="pallas"))(*main)
        )
    assert f"jfla_grads_{op}_mma" in names
    assert f"jfla_grads_{op} " not in names
    assert "_mma" not in hopper
