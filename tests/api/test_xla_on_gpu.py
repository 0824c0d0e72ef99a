""" "xla" on a GPU, whose matmuls round their operands: weak gates over thousands of chunks, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jfla

TIME, HEADS, DIM = 65536, 1, 128


@pytest.mark.gpu
@pytest.mark.parametrize("op", ["kda", "gdn"])
def test_weak_gates_over_a_long_time(op):
    """A state of which 0.7 is left behind all tokens, and into which little is written at a time."""
    rng = np.random.default_rng(0)
    shape = (1, TIME, HEADS, DIM)
    q, k, v = (rng.standard_normal(shape, np.float32) for _ in range(3))
    g = np.full(shape if op == "kda" else shape[:3], -5e-6)
    beta = np.full(shape[:3], 1e-3)
    narrow = [jnp.asarray(x, jnp.bfloat16) for x in (q, k, v)]
    decays = [jnp.asarray(x, jnp.float32) for x in (g, beta)]

    @jax.jit
    def run(*main):
        function = getattr(jfla, f"chunk_{op}")
        call = {"qk_norm": True, "return_final_state": True, "implementation": "xla"}
        out, adjoint = jax.vjp(lambda *x: function(*x, **call), *main)
        ones = jax.tree.map(jnp.ones_like, out)
        return {**out._asdict(), **dict(zip("qkv", adjoint(ones)))}

    got = run(*narrow, *decays)
    with jax.enable_x64(True):
        exact = run(*(jnp.asarray(np.asarray(x, float)) for x in (*narrow, *decays)))
    limits = {"output": 5e-3, "final_state": 5e-3} | dict.fromkeys("qkv", 8e-3)
    for name, limit in limits.items():
        want = np.asarray(exact[name])
        error = np.asarray(got[name], float) - want
        assert np.linalg.norm(error) <= limit * np.linalg.norm(want), name
