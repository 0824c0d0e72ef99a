"""With a cache, in any pieces and packed in any way, a layer gives what one pass over each sequence gives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.goldens import rms_error

import jfla.nn

TIME, DIM = 40, 24
TOLERANCE = 1e-5
ATTENTION = (jfla.nn.CausalAttention, jfla.nn.LatentAttention)


def make(name):
    sizes = {"hidden_size": DIM, "num_heads": 2}
    if name == "attention":
        options = {
            "qk_norm": "head",
            "output_gate": True,
            "head_dim": 16,
            "rotary_dims": 6,
        }
        return jfla.nn.CausalAttention(
            **sizes, num_kv_heads=1, **options, rngs=nnx.Rngs(0)
        )
    if name == "latent":
        parts = {"latent_dim": 10, "key_dim": 8, "shared_dim": 4, "value_dim": 14}
        return jfla.nn.LatentAttention(**sizes, **parts, rngs=nnx.Rngs(0))
    cls = jfla.nn.KimiDeltaAttention if name == "kda" else jfla.nn.GatedDeltaNet
    options = {"lower_bound": -4.0} if name == "kda" else {"allow_neg_eigval": True}
    return cls(
        **sizes,
        head_dim=16,
        num_value_heads=4,
        value_head_dim=8,
        **options,
        rngs=nnx.Rngs(0),
    )


@pytest.fixture(params=["kda", "gdn", "attention", "latent"], scope="module")
def layer(request):
    return make(request.param)


@nnx.jit
def without_cache(layer, x, segment_ids=None):
    return layer(x, segment_ids)


@nnx.jit
def with_cache(layer, x, cache, segment_ids=None):
    return layer(x, segment_ids, cache=cache)


def new_cache(layer, batch):
    return layer.init_cache(
        batch, *([3 * TIME] if isinstance(layer, ATTENTION) else [])
    )


@pytest.fixture(scope="module")
def x():
    return jax.random.normal(jax.random.key(0), (2, TIME, DIM))


@pytest.fixture(scope="module")
def alone(layer, x):
    """The outputs, and the caches, of x's rows from their first token on."""
    return without_cache(layer, x)


@pytest.mark.parametrize("seed", range(3))
def test_pieces_equal_one_pass(layer, x, alone, seed):
    # Both ways to run a piece, and pieces shorter than the convolution.
    pieces = np.random.default_rng(seed).permutation([16, 16, 5, 1, 1, 1])
    cache, outputs, at = new_cache(layer, 2), [], 0
    for size in pieces:
        y, cache = with_cache(layer, x[:, at : at + size], cache)
        outputs.append(y)
        at += size
    assert rms_error(jnp.concatenate(outputs, axis=1), np.asarray(alone)) < TOLERANCE


# Lengths of the sequences in each row; what is left is padding. The last row's last sequence is shorter than the tail.
PACKED = [[TIME], [7, 12, 13], [1, 9, 25, 2]]


def pack(x, rows):
    """Sequences that are all prefixes of x[0], behind one another."""
    ids = np.zeros((len(rows), TIME), np.int32)
    source = np.zeros((len(rows), TIME), np.int32)
    for row, lengths in enumerate(rows):
        at = 0
        for number, length in enumerate(lengths, start=1):
            ids[row, at : at + length] = number
            source[row, at : at + length] = np.arange(length)
            at += length
    return jnp.asarray(ids), source, x[0][source]


def test_packed_sequences_do_not_see_each_other(layer, x, alone):
    ids, source, packed = pack(x, PACKED)
    y = without_cache(layer, packed, ids)
    expected = np.asarray(alone[0])[source]
    real = np.asarray(ids) > 0
    assert rms_error(np.asarray(y)[real], expected[real]) < TOLERANCE
    if not isinstance(layer, ATTENTION):
        assert not np.asarray(y)[~real].any()


def test_packed_prompts_go_on_from_each_rows_last_token(layer, x, alone):
    ids, source, packed = pack(x, PACKED[1:])
    expected, real = np.asarray(alone[0]), np.asarray(ids) > 0
    y, cache = with_cache(layer, packed, new_cache(layer, 2), ids)
    assert rms_error(np.asarray(y)[real], expected[source][real]) < TOLERANCE
    last = np.array([lengths[-1] for lengths in PACKED[1:]])
    for step in range(3):
        y, cache = with_cache(layer, x[0][last + step][:, None], cache)
        assert rms_error(y[:, 0], expected[last + step]) < TOLERANCE


def test_a_packed_call_goes_on_with_the_first_sequence_and_leaves_with_the_last(
    layer, x, alone
):
    expected = np.asarray(alone[0])
    _, cache = with_cache(layer, jnp.stack([x[0, :5]] * 2), new_cache(layer, 2))
    # Row 0 goes on for 3 tokens and starts anew twice, whatever its ids are called; row 1 gets nothing but padding.
    ids = jnp.array([[7, 7, 7, 8, 9, 9], [0] * 6])
    source = np.array([5, 6, 7, 0, 0, 1])
    before = cache
    y, cache = with_cache(layer, jnp.stack([x[0][source], x[1, :6]]), cache, ids)
    assert rms_error(y[0], expected[source]) < TOLERANCE
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(cache)):
        np.testing.assert_array_equal(old[1], new[1])
    y, _ = with_cache(layer, x[0][np.array([2, 5])][:, None], cache)
    assert rms_error(y[:, 0], expected[[2, 5]]) < TOLERANCE


def test_drafted_tokens_that_are_refused_leave_no_trace(layer, x, alone):
    """The cache before the draft, and the draft again with id 0 behind each row's accepted prefix, none of it too."""
    _, cache = with_cache(layer, x[:, :10], new_cache(layer, 2))
    draft, accepted = jnp.stack([x[0, 10:14], x[0, 20:24]]), np.array([3, 0])
    with_cache(layer, draft, cache)
    _, cache = with_cache(
        layer, draft, cache, jnp.asarray(np.arange(4) < accepted[:, None], jnp.int32)
    )
    at = 10 + accepted
    y, _ = with_cache(layer, x[np.arange(2), at][:, None], cache)
    assert rms_error(y[:, 0], np.asarray(alone)[np.arange(2), at]) < TOLERANCE


def test_the_cache_is_a_pytree_of_the_documented_shapes():
    layer = make("kda")
    cache = layer.init_cache(3)
    assert cache.state.shape == (3, 4, 16, 8)
    assert cache.state.dtype == jnp.float32
    assert [tail.shape for tail in cache.tails] == [
        (3, 3, 2, 16),
        (3, 3, 2, 16),
        (3, 3, 4, 8),
    ]
    assert jax.tree.structure(
        jax.tree.map(lambda a: a + 1, cache)
    ) == jax.tree.structure(cache)


def test_an_attention_cache_that_is_full_says_so():
    layer = make("attention")
    cache = layer.init_cache(1, 4)
    _, cache = layer(jnp.ones((1, 3, DIM)), cache=cache)
    with pytest.raises(ValueError, match="room for 5 tokens, its max_len is 4"):
        layer(jnp.ones((1, 2, DIM)), cache=cache)
    with pytest.raises(ValueError, match="room for 5 tokens, its max_len is 4"):
        layer(jnp.ones((1, 3, DIM)), jnp.array([[1, 1, 0]]), cache=cache)
    layer(jnp.ones((1, 3, DIM)), jnp.array([[1, 0, 0]]), cache=cache)
