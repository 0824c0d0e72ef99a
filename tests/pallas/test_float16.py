"""float16 through the chunked kernels: its own digits, at any size of the loss."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jfla

BATCH, TIME, HEADS, GROUP, DIM = 2, 70, 1, 2, 64
NAMES = ("q", "k", "v", "g", "beta", "initial_state")


@functools.cache
def drawn(op: str, qk_norm: bool) -> tuple[dict[str, jax.Array], jax.Array, jax.Array]:
    """Arguments, and cotangents of the output and of the final state."""
    keys = iter(jax.random.split(jax.random.key(5), 8))
    tokens = (BATCH, TIME)
    value_heads = HEADS * GROUP

    def normal(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape)

    q = normal(*tokens, HEADS, DIM)
    k = normal(*tokens, HEADS, DIM)
    if qk_norm:  # so short that 1 / norm times a value is out of float16's range
        q = q * 1e-5
        k = k * 1e-4
    else:
        q = q / jnp.linalg.norm(q, axis=-1, keepdims=True)
        k = k / jnp.linalg.norm(k, axis=-1, keepdims=True)
    gate_shape = (DIM,) if op == "kda" else ()
    arrays = {
        "q": q,
        "k": k,
        "v": 100 * normal(*tokens, value_heads, DIM),
        "g": jax.nn.log_sigmoid(normal(*tokens, value_heads, *gate_shape)),
        "beta": jax.nn.sigmoid(normal(*tokens, value_heads)),
        "initial_state": 100 * normal(BATCH, value_heads, DIM, DIM),
    }
    return (
        arrays,
        normal(*tokens, value_heads, DIM),
        normal(BATCH, value_heads, DIM, DIM),
    )


def results(
    op: str,
    arrays: dict[str, jax.Array],
    do: jax.Array,
    d_final: jax.Array,
    qk_norm: bool,
    implementation: str,
) -> dict[str, Any]:
    """Output, final state and all gradients, in float32."""
    chunk = getattr(jfla, f"chunk_{op}")

    def run(*inputs: jax.Array) -> tuple[jax.Array, jax.Array]:
        call = dict(zip(NAMES, inputs))
        out = chunk(
            **call,
            qk_norm=qk_norm,
            return_final_state=True,
            implementation=implementation,
        )
        return out.output, out.final_state

    with jfla.pallas.interpret():
        out, adjoint = jax.vjp(run, *(arrays[name] for name in NAMES))
        gradients = adjoint((do.astype(out[0].dtype), d_final))
    named = dict(
        zip(
            ("output", "final_state", *(f"d{name}" for name in NAMES)),
            (*out, *gradients),
        )
    )
    return {name: np.asarray(x.astype(jnp.float32)) for name, x in named.items()}


def rounded(arrays: dict[str, jax.Array], dtype: str) -> dict[str, jax.Array]:
    return {name: x.astype(dtype) if name in "qkv" else x for name, x in arrays.items()}


def error(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


@pytest.mark.parametrize("qk_norm", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("op", ["gdn", "kda"])
def test_errors_are_less_than_half_of_those_of_bfloat16(op: str, qk_norm: bool):
    arrays, do, d_final = drawn(op, qk_norm)
    errors = {}
    for dtype in ("float16", "bfloat16"):
        given = rounded(arrays, dtype)
        do_rounded = do.astype(dtype).astype(jnp.float32)
        got = results(op, given, do_rounded, d_final, qk_norm, "pallas")
        wide = {name: x.astype(jnp.float32) for name, x in given.items()}
        want = results(op, wide, do_rounded, d_final, qk_norm, "xla")
        errors[dtype] = {name: error(got[name], want[name]) for name in want}
    for name in errors["float16"]:
        if qk_norm and name in ("dq", "dk"):
            continue  # beyond float16: 1e4 and more
        assert errors["float16"][name] < 0.5 * errors["bfloat16"][name], name


@pytest.mark.parametrize(
    ("op", "loss_scale"),
    [
        pytest.param("gdn", 2.0**13, marks=pytest.mark.slow),
        ("gdn", 2.0**-30),
        pytest.param("kda", 2.0**13, marks=pytest.mark.slow),
        ("kda", 2.0**-30),
    ],
)
def test_gradients_are_right_at_any_size_of_the_loss(op: str, loss_scale: float):
    """Those in float32: dq, dk and dv are as large or small as the loss, and are float16."""
    arrays, do, d_final = drawn(op, False)
    arrays = rounded(arrays, "float16")
    # Without a cotangent of the output, which is float16 itself.
    of_state = [
        results(op, arrays, jnp.zeros_like(do), scale * d_final, False, "pallas")
        for scale in (1.0, loss_scale)
    ]
    for name in ("dg", "dbeta", "dinitial_state"):
        np.testing.assert_allclose(
            of_state[1][name], loss_scale * of_state[0][name], rtol=1e-6, atol=1e-37
        )


@pytest.mark.parametrize("op", ["gdn", "kda"])
def test_gradients_are_right_at_values_of_thousands(op: str):
    """What kernels make of cotangents and such values stays in float16's range."""
    arrays, do, d_final = drawn(op, False)
    arrays = rounded(arrays, "float16")
    for name in ("v", "initial_state"):
        arrays[name] = arrays[name] * 30
    do = (do * 1e-2).astype("float16").astype(jnp.float32)
    d_final = d_final * 1e-2
    got = results(op, arrays, do, d_final, False, "pallas")
    wide = {name: x.astype(jnp.float32) for name, x in arrays.items()}
    want = results(op, wide, do, d_final, False, "xla")
    for name in want:
        assert error(got[name], want[name]) < 5e-3, name


@pytest.mark.parametrize("op", ["gdn", "kda"])
def test_a_write_strength_of_0_has_its_gradient(op: str):
    """dbeta is read off what a token wrote: of nothing at all it could not be."""
    arrays, do, _ = drawn(op, False)
    arrays = rounded(arrays, "float16")
    token = jnp.arange(TIME)[None, :, None]
    arrays["beta"] = jnp.where(token % 3 == 0, 0.0, arrays["beta"])
    arrays["v"] = arrays["v"] * 1e-2
    arrays["initial_state"] = arrays["initial_state"] * 1e-2
    d_final = jnp.zeros_like(arrays["initial_state"])
    do = do.astype("float16").astype(jnp.float32)
    got = results(op, arrays, do, d_final, False, "pallas")
    wide = {name: x.astype(jnp.float32) for name, x in arrays.items()}
    want = results(op, wide, do, d_final, False, "xla")
    for name, limit in {"dbeta": 1.5e-2, "output": 1e-3, "final_state": 1e-3}.items():
        assert error(got[name], want[name]) < limit, name


@pytest.mark.parametrize("op", ["gdn", "kda"])
def test_a_row_has_its_bits_beside_any_other(op: str):
    arrays, do, d_final = drawn(op, False)
    arrays = rounded(arrays, "float16")
    factor = jnp.array([1.0, 1e3])
    per_row = lambda x: x * factor.reshape(-1, *(1,) * (x.ndim - 1))
    alone = results(op, arrays, do, d_final, False, "pallas")
    beside = results(op, arrays, per_row(do), per_row(d_final), False, "pallas")
    for name, x in alone.items():
        np.testing.assert_array_equal(x[0], beside[name][0])


@pytest.mark.parametrize("op", ["gdn", "kda"])
def test_a_packed_sequence_has_its_gradients_beside_any_other(op: str):
    """Of a loss of 2^-40 beside one of 2^13: each has those of a loss of 1, times that, where they are float32."""
    arrays, _, d_final = drawn(op, False)
    arrays = rounded(arrays, "float16")
    of_row = {name: x[:1] for name, x in arrays.items() if name != "initial_state"}
    states = arrays["initial_state"][None]
    ids = (jnp.arange(TIME)[None] >= 30) + 1
    chunk = getattr(jfla, f"chunk_{op}")

    def final_states(g: jax.Array, beta: jax.Array, states: jax.Array) -> jax.Array:
        return chunk(
            **(of_row | {"g": g, "beta": beta}),
            initial_state=states,
            segment_ids=ids,
            return_final_state=True,
            implementation="pallas",
        ).final_state

    with jfla.pallas.interpret():
        main = (of_row["g"], of_row["beta"], states)
        adjoint = jax.jit(jax.vjp(final_states, *main)[1])
        of_segment = jnp.array([2.0**-40, 2.0**13])
        alike = adjoint(d_final[None])
        unlike = adjoint(d_final[None] * of_segment[:, None, None, None])
    of_token = of_segment[ids - 1]
    factors = (of_token, of_token, of_segment[None])
    for one, other, factor in zip(alike, unlike, factors, strict=True):
        factor = factor.reshape(*factor.shape, *(1,) * (one.ndim - factor.ndim))
        np.testing.assert_allclose(other, factor * one, rtol=1e-6, atol=1e-37)
        assert np.any(one)


def test_ids_of_packed_sequences_may_be_any():
    """More than there are tokens; they have no states, so that nothing says how many there are."""
    arrays, do, _ = drawn("gdn", False)
    arrays = rounded(arrays, "float16")
    main = [arrays[name][:1] for name in ("q", "k", "v", "g", "beta")]
    second = jnp.arange(TIME)[None] >= 30

    def gradients(ids: jax.Array) -> tuple[jax.Array, ...]:
        call = lambda *x: (
            jfla.chunk_gdn(*x, segment_ids=ids, implementation="pallas").output
        )
        with jfla.pallas.interpret():
            out, adjoint = jax.vjp(call, *main)
            return adjoint(do[:1].astype(out.dtype))

    dense = gradients(jnp.where(second, 2, 1))
    sparse = gradients(jnp.where(second, 900, 7))
    for one, other in zip(dense, sparse, strict=True):
        np.testing.assert_array_equal(one, other)
        assert np.all(np.isfinite(one))
        assert np.any(one)
