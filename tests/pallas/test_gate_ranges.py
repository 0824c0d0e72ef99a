"""Which chunks take which form: the gates that the kernels of KDA find too strong for their fast forms."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.kernel_cases import MAIN, Call, inputs, validated
from support.stage_oracle import to_chunks

import jfla
from jfla.gates import log_decay
from jfla.nn import KimiDeltaAttention
from jfla.pallas import chunk
from jfla.pallas.arrays import kernel_arrays, qk_options, qkg_operands
from jfla.pallas.common.decay_sums import FAST_RANGE, GRAD_NEAR_STEPS, MIDDLE_RANGE, NEAR_STEPS
from jfla.pallas.heuristics import dims_of, schedule
from jfla.pallas.mgpu.overlap import run
from jfla.pallas.sm90.grads_kda import kernel as grads_kernel
from jfla.pallas.sm90.grads_kda.smem import FIRST_STEP, GRAD_MATRICES
from jfla.pallas.sm90.intra_kda import kernel as intra_kernel
from jfla.pallas.sm90.intra_kda.smem import STEP_MATRICES
from jfla.stages import ScanResults
from jfla.types import CHUNK


def gates(name: str, heads: int, time: int) -> tuple[jax.Array, Any]:
    """(g [1, T, HV, 128], gate). "published" and "bounded" are those that the layer begins with."""
    bound = -5.0 if "bounded" in name else None
    layer = KimiDeltaAttention(
        8, heads, 128, value_head_dim=64, lower_bound=bound, rngs=nnx.Rngs(0)
    )
    g = jax.random.normal(jax.random.key(3), (1, time, heads, 128))
    if name == "log_sigmoid":
        return jax.nn.log_sigmoid(g), None
    if name == "strong chunks":
        # One of them in blocks of 16 too, and of both only one half of the channels.
        g = jax.nn.log_sigmoid(g).at[:, :CHUNK, 0, :64].set(-4.0)
        return g.at[:, CHUNK : 2 * CHUNK, 0, 64:].set(-50.0), None
    if name == "bounded, raw":
        return g, jfla.SigmoidGate(lower_bound=-5.0)
    parameters = layer.a_log[...], layer.dt_bias[...]
    gate = jfla.SigmoidGate(*parameters, bound) if bound else jfla.SoftplusGate(*parameters)
    return g * (1.0 if "spread" in name else 0.1), gate


def out_of_range(decay: np.ndarray, bits: float = FAST_RANGE) -> np.ndarray:
    """[B, HV, N, 2]: the halves of 64 channels, of [B, HV, N, channels], with one that decays by 2^-bits."""
    return (decay.reshape(*decay.shape[:3], 2, 64) / np.log(2)).min(axis=-1) <= -bits


def too_strong(g: jax.Array, gate: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """[B, HV, N, 2]: the halves of chunks whose gates are too strong from the chunk's start.

    Then those that are so from the start of a block of 16, too, and those from the middle of a block of 32.
    """
    decay = to_chunks(log_decay(g, gate))
    strong = out_of_range(decay.sum(axis=3))
    blocks = decay.reshape(*decay.shape[:3], 4, 16, -1)[..., 1:, :]  # without their first tokens
    in_blocks = out_of_range(blocks.sum(axis=4).min(axis=3))
    blocks = decay.reshape(*decay.shape[:3], 2, 32, -1)
    sides = np.stack([blocks[..., 1:17, :].sum(axis=4), blocks[..., 17:, :].sum(axis=4)])
    from_middle = out_of_range(sides.min(axis=(0, 4)), MIDDLE_RANGE)
    return strong, strong & in_blocks, strong & from_middle


def who_reads(
    first: tuple[int, int], g: jax.Array, gate: Any, monkeypatch: pytest.MonkeyPatch
) -> tuple[np.ndarray, np.ndarray]:
    """[B, HV, N] of intra, [B, HV, N, 2] of the gradients: who reads the matrices of its steps from `first` on.

    NaN in these tells.
    """
    in_intra, in_grads = first

    def spoiled(matrices: tuple[Any, ...], first: int) -> tuple[Any, ...]:
        nan = np.full((CHUNK, CHUNK), np.nan)
        return (*matrices[:first], *[nan] * len(matrices[first:]))

    monkeypatch.setattr(intra_kernel, "STEP_MATRICES", spoiled(STEP_MATRICES, in_intra))
    monkeypatch.setattr(
        grads_kernel, "GRAD_MATRICES", spoiled(GRAD_MATRICES, FIRST_STEP + in_grads)
    )
    batch, time, heads, _ = g.shape
    arrays, rest = inputs(Call("kda", batch=batch, time=time, heads=heads, group=1, key_dim=128))
    main = [(arrays | {"g": g})[name] for name in MAIN]
    rest["initial_state"] = arrays["initial_state"]
    given, options = validated("kda", *main, **rest, gate=gate)
    x = kernel_arrays(given, options)
    states = jnp.ones((batch, heads, time // CHUNK, 64, 128), "bfloat16")
    v = arrays["v"]
    scans = ScanResults(states, states, v, v, v)
    with jfla.pallas.interpret():
        plan = schedule(options.op, dims_of(given))
        pairs = run(chunk.intra_kernel(x, given, options, plan)).intra
        operands = qkg_operands(x, given)
        static = qk_options(x, given, options)
        grads = grads_kernel.grads_kda(operands, scans, static, jnp.float32)
    in_a_qk, in_a_inv = (np.isnan(a.astype("float32")).any(axis=(3, 4)) for a in pairs)
    np.testing.assert_array_equal(in_a_qk, in_a_inv)
    dq = to_chunks(grads.dq)
    return in_a_qk, np.isnan(dq.reshape(*dq.shape[:4], 2, 64)).any(axis=(3, 5))


@pytest.mark.parametrize("which", ["strong", pytest.param("strongest", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("name", "heads", "time", "strong_chunks"),
    [
        pytest.param("published", 3, 64, (1, 0), marks=pytest.mark.slow),
        pytest.param("bounded", 2, 64, (0, 0), marks=pytest.mark.slow),
        ("strong chunks", 1, 192, (2, 1)),
    ],
)
def test_only_chunks_with_too_strong_gates_take_the_other_forms(
    name, heads, time, strong_chunks, which, monkeypatch
):
    n = ("strong", "strongest").index(which)
    g, gate = gates(name, heads, time)
    first = ((0, 0), (NEAR_STEPS, GRAD_NEAR_STEPS))[n]
    intra, differentiated = who_reads(first, g, gate, monkeypatch)
    strong, in_blocks, from_middle = too_strong(g, gate)
    np.testing.assert_array_equal(differentiated, (strong, from_middle)[n])
    np.testing.assert_array_equal(intra, (strong, in_blocks)[n].any(axis=-1))
    assert intra.sum() == strong_chunks[n]


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        pytest.param("published", 0.65, 0.75, marks=pytest.mark.slow),
        pytest.param("published, spread", 0.35, 0.45, marks=pytest.mark.slow),
        ("bounded", 1.0, 1.0),
        ("bounded, raw", 0.0, 0.0),
        ("log_sigmoid", 1.0, 1.0),
    ],
)
def test_how_many_chunks_take_the_fast_form(name, least, most):
    """Of 512. With the gates that the layer begins with, 0.70: heads whose rate exp(a_log) is above some 12 do not.

    For all of these, blocks of 16 tokens are in range, and those of 32 from their middle.
    """
    strong, in_blocks, from_middle = too_strong(*gates(name, 128, 256))
    assert least <= 1 - strong.any(axis=-1).mean() <= most
    assert not in_blocks.any()
    assert not from_middle.any()
