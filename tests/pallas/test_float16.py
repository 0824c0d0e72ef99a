"""float16 through the kernels of a scalar gate: its own digits, at any size of the loss."""

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
def drawn(qk_norm: bool) -> tuple[dict[str, jax.Array], jax.Array, jax.Array]:
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
    arrays = {
        "q": q,
        "k": k,
        "v": 100 * normal(*tokens, value_heads, DIM),
        "g": jax.nn.log_sigmoid(normal(*tokens, value_heads)),
        "beta": jax.nn.sigmoid(normal(*tokens, value_heads)),
        "initial_state": 100 * normal(BATCH, value_heads, DIM, DIM),
    }
    return (
        arrays,
        normal(*tokens, value_heads, DIM),
        normal(BATCH, value_heads, DIM, DIM),
    )


def results(
    arrays: dict[str, jax.Array],
    do: jax.Array,
    d_final: jax.Array,
    qk_norm: bool,
    implementation: str,
) -> dict[str, Any]:
    """Of chunk_gdn: output, final state and all gradients, in float32."""

    def run(*inputs: jax.Array) -> tuple[jax.Array, jax.Array]:
        call = dict(zip(NAMES, inputs))
        out = jfla.chunk_gdn(
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
def test_errors_are_less_than_half_of_those_of_bfloat16(qk_norm: bool):
    arrays, do, d_final = drawn(qk_norm)
    errors = {}
    for dtype in ("float16", "bfloat16"):
        given = rounded(arrays, dtype)
        do_rounded = do.astype(dtype).astype(jnp.float32)
        got = results(given, do_rounded, d_final, qk_norm, "pallas")
        wide = {name: x.astype(jnp.float32) for name, x in given.items()}
        want = results(wide, do_rounded, d_final, qk_norm, "xla")
        errors[dtype] = {name: error(got[name], want[name]) for name in want}
    for name in errors["float16"]:
        if qk_norm and name in ("dq", "dk"):
            continue  # beyond float16: 1e4 and more
        assert errors["float16"][name] < 0.5 * errors["bfloat16"][name], name


@pytest.mark.parametrize(
    "loss_scale", [pytest.param(2.0**13, marks=pytest.mark.slow), 2.0**-30]
)
def test_gradients_are_right_at_any_size_of_the_loss(loss_scale: float):
    """Those in float32: dq, dk and dv are as large or small as the loss, and are float16."""
    arrays, do, d_final = drawn(False)
    arrays = rounded(arrays, "float16")
    # Without a cotangent of the output, which is float16 itself.
    of_state = [
        results(arrays, jnp.zeros_like(do), scale * d_final, False, "pallas")
        for scale in (1.0, loss_scale)
    ]
    for name in ("dg", "dbeta", "dinitial_state"):
        np.testing.assert_allclose(
            of_state[1][name], loss_scale * of_state[0][name], rtol=1e-6, atol=1e-37
        )


def test_a_write_strength_of_0_has_its_gradient():
    """dbeta is read off what a token wrote: of nothing at all it could not be."""
    arrays, do, _ = drawn(False)
    arrays = rounded(arrays, "float16")
    token = jnp.arange(TIME)[None, :, None]
    arrays["beta"] = jnp.where(token % 3 == 0, 0.0, arrays["beta"])
    arrays["v"] = arrays["v"] * 1e-2
    arrays["initial_state"] = arrays["initial_state"] * 1e-2
    d_final = jnp.zeros_like(arrays["initial_state"])
    do = do.astype("float16").astype(jnp.float32)
    got = results(arrays, do, d_final, False, "pallas")
    wide = {name: x.astype(jnp.float32) for name, x in arrays.items()}
    want = results(wide, do, d_final, False, "xla")
    for name, limit in {"dbeta": 1.5e-2, "output": 1e-3, "final_state": 1e-3}.items():
        assert error(got[name], want[name]) < limit, name


def test_a_row_has_its_bits_beside_any_other():
    arrays, do, d_final = drawn(False)
    arrays = rounded(arrays, "float16")
    factor = jnp.array([1.0, 1e3])
    per_row = lambda x: x * factor.reshape(-1, *(1,) * (x.ndim - 1))
    alone = results(arrays, do, d_final, False, "pallas")
    beside = results(arrays, per_row(do), per_row(d_final), False, "pallas")
    for name, x in alone.items():
        np.testing.assert_array_equal(x[0], beside[name][0])
