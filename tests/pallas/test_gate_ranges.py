"""How many passes the pairs of KDA's chunks take in the kernels, by the gates that models begin with and by others."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.stage_oracle import to_chunks

import jfla
from jfla.gates import log_decay
from jfla.nn import KimiDeltaAttention
from jfla.pallas.common.decay_sums import (
    ALL_TOKENS,
    FROM_CHUNK_START,
    IN_BLOCK,
    ON_BY_ONE,
    ON_BY_TWO,
    TO_CHUNK_END,
    TO_NEXT_BLOCK,
    WITHIN,
    block_spans,
)
from jfla.pallas.common.gate import STRONGEST_OF_CHANNEL
from jfla.pallas.common.pair_passes import (
    BLOCK,
    NUM_BLOCKS,
    RANGE,
    SHIFT,
    growth,
    passes_of,
    row_factor,
)
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
    if name == "reset":
        return jnp.where(g > 0, 0.0, -1000.0), None
    if name == "bounded, raw":
        return g, jfla.SigmoidGate(lower_bound=-5.0)
    parameters = layer.a_log[...], layer.dt_bias[...]
    gate = (
        jfla.SigmoidGate(*parameters, bound)
        if bound
        else jfla.SoftplusGate(*parameters)
    )
    return g * (1.0 if "spread" in name else 0.1), gate


def passes(g: jax.Array, gate: Any) -> np.ndarray:
    """[B, HV, N, 2]: of the halves of 64 channels of every chunk."""
    decay = np.maximum(to_chunks(log_decay(g, gate)) / np.log(2), STRONGEST_OF_CHANNEL)
    blocks = decay.reshape(*decay.shape[:3], NUM_BLOCKS, BLOCK, 2, 64)
    # without their first tokens
    least = blocks[..., 1:, :, :].sum(axis=4).min(axis=(3, 5))
    return np.asarray(passes_of(jnp.asarray(least, jnp.float32)))


@pytest.mark.parametrize(
    ("name", "one", "most"),
    [
        ("published", 1.0, 1),
        ("published, spread", 1.0, 1),
        ("bounded", 1.0, 1),
        ("bounded, raw", 1.0, 1),
        ("log_sigmoid", 1.0, 1),
        ("reset", 0.0, 7),
    ],
)
def test_gates_of_models_take_one_pass(name, one, most):
    """Of 512 chunks; with 0 or -1000 at random as many passes as 15 tokens of -64 bits can take."""
    found = passes(*gates(name, 128, 256))
    assert np.mean(found == 1) == one
    assert found.max() <= most


def sums_of(matrix: np.ndarray, decay: np.ndarray) -> np.ndarray:
    return matrix.astype(np.float64) @ decay


@pytest.mark.parametrize("strength", [1e-3, 3.0, 40.0, 150.0])
def test_factors_of_all_passes_make_the_decay_of_every_pair(strength):
    """In float64 but for `exp2` in float32: rows times columns, summed over passes, is exp2(the decay between them)."""
    decay = -strength * np.random.default_rng(0).random((CHUNK, 3))
    spans = 2.0 ** sums_of(block_spans(), decay)
    in_block = jnp.asarray(sums_of(IN_BLOCK, decay), jnp.float32)
    to_next = jnp.asarray(sums_of(TO_NEXT_BLOCK, decay), jnp.float32)
    least = float(sums_of(block_spans()[WITHIN : WITHIN + NUM_BLOCKS], decay).min())
    total = np.zeros((CHUNK, CHUNK, 3))
    for which in range(int(passes_of(jnp.float32(least)))):
        bits = jnp.float32(RANGE * which)
        rows = np.asarray(row_factor(in_block + SHIFT, bits), np.float64)
        own = np.asarray(growth(in_block + SHIFT, bits), np.float64)
        later = np.asarray(jnp.exp2(to_next - SHIFT), np.float64) * (which == 0)
        for block in range(NUM_BLOCKS):
            columns = np.zeros((CHUNK, 3))
            here = slice(block * BLOCK, (block + 1) * BLOCK)
            columns[here] = own[here]
            for n in range(block):
                on = spans[ON_BY_ONE + n] if block - n > 1 else 1.0
                on = on * (spans[ON_BY_TWO] if block - n > 2 else 1.0)
                columns[n * BLOCK : (n + 1) * BLOCK] = (
                    later[n * BLOCK : (n + 1) * BLOCK] * on
                )
            total[here] += rows[here, None] * columns[None]
    cumulative = np.cumsum(decay, axis=0)
    row, column = np.indices((CHUNK, CHUNK))
    want = 2.0 ** np.where(
        (row >= column)[..., None], cumulative[:, None] - cumulative[None], 0.0
    )
    causal = (row >= column)[..., None]
    np.testing.assert_allclose(
        np.where(causal, total, 0), np.where(causal, want, 0), rtol=1e-4, atol=2.0**-66
    )


def test_spans_cover_the_chunk():
    """From the chunk's start to a block's first token, within it, and on to the end is every token once."""
    spans = block_spans().astype(int)
    for block in range(NUM_BLOCKS):
        next_first = np.arange(CHUNK) == (block + 1) * BLOCK
        parts = (FROM_CHUNK_START + block, WITHIN + block, TO_CHUNK_END + block)
        covered = sum(spans[part] for part in parts) + next_first
        np.testing.assert_array_equal(covered, spans[ALL_TOKENS])
