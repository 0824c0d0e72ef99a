"""What a state predicts of v may be far smaller than v, token after token: it is erased all the same."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jfla
from jfla.types import CHUNK

DIM = 64


def kernels_of(machine: str) -> contextlib.AbstractContextManager[None]:
    """Where calls take the kernels of a machine."""
    return (
        jfla.pallas.mma_kernels() if machine == "ampere" else contextlib.nullcontext()
    )


@pytest.mark.parametrize("machine", ["hopper", "ampere"])
@pytest.mark.parametrize("op", ["kda", "gdn"])
def test_a_prediction_below_half_of_the_last_digit_of_v(op, machine):
    """Of v = 1 or -1 and a prediction of 0.0017, bfloat16 has a difference of 1 or -1."""
    predicted, beta = 0.0017, 0.01
    unit = np.zeros((1, CHUNK, 1, DIM), np.float32)
    unit[..., 0] = 1
    signs = np.where(np.arange(CHUNK) % 2 == 0, 1.0, -1.0)
    v = np.ones_like(unit) * signs[:, None, None]
    state = np.zeros((1, 1, DIM, DIM), np.float32)
    state[..., 0, :] = predicted
    narrow = [jnp.asarray(x, jnp.bfloat16) for x in (unit, unit, v)]
    g = jnp.zeros(unit.shape if op == "kda" else unit.shape[:3])
    rest = (g, jnp.full(unit.shape[:3], beta))
    function = getattr(jfla, f"chunk_{op}")
    with jfla.pallas.interpret(), kernels_of(machine):
        out = function(*narrow, *rest, initial_state=state, return_final_state=True)
    kept = 1 - beta
    wanted = predicted
    for sign in signs:
        wanted = kept * wanted + beta * sign
    erased = predicted * (1 - kept**CHUNK)
    error = np.abs(np.asarray(out.final_state)[0, 0, 0] - wanted).max()
    # Four fifths of what is erased would be left; rounding a_inv and v_new costs a fifth of it.
    assert error < 0.4 * erased


@pytest.mark.gpu
@pytest.mark.parametrize("machine", ["hopper", "ampere"])
@pytest.mark.parametrize("op", ["kda", "gdn"])
def test_two_thousand_chunks_with_little_written(op, machine):
    """Whole erasures take a million tokens: a prediction is mostly below the last digit of v."""
    rng = np.random.default_rng(0)
    shape = (1, 2048 * CHUNK, 1, 128)
    q, k, v = (rng.standard_normal(shape, np.float32) for _ in range(3))
    g = np.full(shape if op == "kda" else shape[:3], -2e-6)
    beta = np.full(shape[:3], 1e-4)
    narrow = [jnp.asarray(x, jnp.bfloat16) for x in (q, k, v)]
    decays = [jnp.asarray(x, jnp.float32) for x in (g, beta)]

    def run(implementation: str, *main):
        call = {"implementation": implementation, "return_final_state": True}
        return getattr(jfla, f"chunk_{op}")(*main, qk_norm=True, **call)

    with kernels_of(machine):
        got = jax.jit(run, static_argnums=0)("pallas", *narrow, *decays)
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(x, float)) for x in (*narrow, *decays)]
        exact = jax.jit(run, static_argnums=0)("xla", *wide)
    for name in ("output", "final_state"):
        want = np.asarray(getattr(exact, name))
        error = np.asarray(getattr(got, name), float) - want
        assert np.linalg.norm(error) <= 5e-3 * np.linalg.norm(want), name
