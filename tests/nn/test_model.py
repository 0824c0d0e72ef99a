"""DeltaLM: caches, packing, loss, rematerialisation, precision, initialisation, and what it refuses."""

import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.goldens import rms_error
from support.small_model import TIME, VOCAB, logits_of, make

import jfla.nn


@nnx.jit
def with_cache(model, tokens, cache, segment_ids=None):
    return model(tokens, segment_ids, cache=cache)


def test_logits_are_float32_and_causal(model, tokens):
    logits = logits_of(model, tokens)
    assert logits.shape == (3, TIME, VOCAB)
    assert logits.dtype == jnp.float32
    changed = logits_of(model, tokens.at[:, 10:].set(0))
    np.testing.assert_array_equal(changed[:, :10], logits[:, :10])
    assert (changed[:, 10:] != logits[:, 10:]).any()


def test_prefill_and_steps_equal_one_pass(model, tokens):
    expected = np.asarray(logits_of(model, tokens))
    logits, cache = with_cache(model, tokens[:, :18], model.init_cache(3, TIME))
    pieces = [logits]
    for t in range(18, TIME):
        logits, cache = with_cache(model, tokens[:, t : t + 1], cache)
        pieces.append(logits)
    assert rms_error(jnp.concatenate(pieces, axis=1), expected) < 1e-5


def test_packed_sequences_do_not_see_each_other(model, tokens):
    expected = np.asarray(logits_of(model, tokens))
    packed = jnp.stack([jnp.concatenate([tokens[0, :9], tokens[1, :15]])] * 3)
    ids = jnp.stack([jnp.array([1] * 9 + [2] * 15)] * 3)
    logits = logits_of(model, packed, ids)
    assert rms_error(logits[0, :9], expected[0, :9]) < 1e-5
    assert rms_error(logits[0, 9:], expected[1, :15]) < 1e-5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"op": "mamba"}, 'op must be "kda" or "gdn"'),
        ({"lower_bound": -5.0}, "lower_bound and output_gate_bias must be left out"),
        (
            {"attention_layers": (3,)},
            r"attention_layers must be in 0 \.\. 2, got \[3\]",
        ),
        (
            {"num_value_heads": 3, "num_heads": 2},
            "num_value_heads=3 must be a multiple of num_heads=2",
        ),
        (
            {"op": "kda", "lower_bound": 1.0},
            "lower_bound must be None or a number below 0",
        ),
        ({"head_dim": 0}, "head_dim must be at least 1, got 0"),
        ({"attention_heads": 5}, "must be num_heads=5 heads of even length"),
        (
            {"attention_heads": 4, "attention_kv_heads": 3},
            "num_heads=4 must be a multiple of num_kv_heads=3",
        ),
    ],
)
def test_bad_configurations(changes, message):
    with pytest.raises(ValueError, match=message):
        make(**changes)


def test_loss_counts_what_is_to_be_predicted():
    rng = np.random.default_rng(0)
    logits, tokens = (
        rng.normal(size=(2, 6, VOCAB)).astype(np.float32),
        rng.integers(0, VOCAB, (2, 6)),
    )
    ids = np.array([[1, 1, 2, 2, 2, 0], [1, 1, 1, 1, 1, 1]])
    mask = np.array([[True] * 6, [True, True, True, True, False, True]])
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    pairs = [(0, 0), (0, 2), (0, 3), (1, 0), (1, 1), (1, 2), (1, 4)]
    expected = -np.mean([log_p[b, t, tokens[b, t + 1]] for b, t in pairs])
    got = jfla.nn.next_token_loss(
        jnp.asarray(logits), jnp.asarray(tokens), jnp.asarray(ids), jnp.asarray(mask)
    )
    np.testing.assert_allclose(got, expected, rtol=1e-6)
    assert (
        jfla.nn.next_token_loss(
            jnp.asarray(logits), jnp.asarray(tokens), jnp.zeros((2, 6), int)
        )
        == 0
    )


def gradient(model, tokens):
    """Compiled as users do: without optimization the two programs round a little differently."""
    graph, state = nnx.split(model)
    loss = lambda state: jfla.nn.next_token_loss(
        nnx.merge(graph, state)(tokens), tokens
    )
    return jax.jit(
        jax.grad(loss), compiler_options={"xla_backend_optimization_level": 3}
    )(state)


def test_every_parameter_learns_and_remat_changes_nothing(tokens):
    plain = gradient(make(num_layers=2, tie_embeddings=False), tokens)
    for path, grad in nnx.to_flat_state(plain):
        assert jnp.any(grad[...] != 0), path
    policy = jax.checkpoint_policies.save_only_these_names("jfla_inverse")
    again = gradient(make(num_layers=2, tie_embeddings=False, remat=policy), tokens)
    for (path, a), (_, b) in zip(nnx.to_flat_state(plain), nnx.to_flat_state(again)):
        np.testing.assert_allclose(
            a[...], b[...], rtol=1e-4, atol=1e-7, err_msg=str(path)
        )


def test_bfloat16_follows_float32(model, tokens):
    rough = make(dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
    nnx.update(
        rough,
        jax.tree.map(
            lambda a, b: a.astype(b.dtype), nnx.state(model), nnx.state(rough)
        ),
    )
    assert rough.blocks[0].mixer.q_proj.kernel.dtype == jnp.bfloat16
    assert rough.blocks[0].mixer.a_log.dtype == jnp.float32
    logits = logits_of(rough, tokens)
    assert logits.dtype == jnp.float32
    # Rounding the weights alone sets the scale of what bfloat16 can do in this model.
    expected = np.asarray(logits_of(model, tokens))
    rounded = make()
    nnx.update(
        rounded,
        jax.tree.map(
            lambda a, b: b.astype(a.dtype), nnx.state(rounded), nnx.state(rough)
        ),
    )
    assert (
        rms_error(logits, expected)
        < 3 * rms_error(logits_of(rounded, tokens), expected)
        < 0.2
    )
    _, cache = jax.eval_shape(
        lambda: rough(tokens[:, :3], cache=rough.init_cache(3, 8))
    )
    assert cache[0].state.dtype == jnp.float32
    assert cache[0].tails[0].dtype == cache[1].key.dtype == jnp.bfloat16


def test_gradients_of_a_shared_row_are_added_up_in_float32(tokens):
    """In bfloat16 they are rounded at each addition, and added one at a time on a GPU."""
    graph, state = nnx.split(
        make(
            num_layers=1, attention_layers=(), tie_embeddings=False, dtype=jnp.bfloat16
        )
    )
    loss = lambda state: nnx.merge(graph, state)(tokens).sum()
    found = re.findall(
        rf"(\w+)\[{VOCAB},16\] = scatter-add",
        str(jax.make_jaxpr(jax.grad(loss))(state)),
    )
    assert found == ["f32"]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("op", ["kda", "gdn"])
def test_no_array_gains_axes_silently(op, packed, tokens):
    """Forward, backward and decoding trace where JAX refuses to add leading axes by itself."""
    segment_ids = jnp.where(
        jnp.arange(TIME)[None] < jnp.array([[9], [20], [TIME]]), 1, 0
    )
    segment_ids = segment_ids if packed else None
    bias = op == "kda"
    graph, state = nnx.split(make(op=op, num_layers=2, output_gate_bias=bias))

    def loss(state):
        logits = nnx.merge(graph, state)(tokens, segment_ids)
        return jfla.nn.next_token_loss(logits, tokens, segment_ids)

    def decode(state):
        model = nnx.merge(graph, state)
        ids = segment_ids
        _, cache = model(tokens, ids, cache=model.init_cache(3, TIME + 2))
        return model(tokens[:, :2], None if ids is None else ids[:, :2], cache=cache)

    with jax.numpy_rank_promotion("raise"):
        gradients = jax.eval_shape(jax.grad(loss), state)
        logits, _ = jax.eval_shape(decode, state)
        with pytest.raises(ValueError, match="rank_promotion"):
            jax.eval_shape(jnp.add, jnp.ones((2, 3)), jnp.ones(3))
    assert jax.tree.map(jnp.shape, gradients) == jax.tree.map(jnp.shape, state)
    assert logits.shape == (3, 2, VOCAB)


@pytest.mark.parametrize("cls", [jfla.nn.KimiDeltaAttention, jfla.nn.GatedDeltaNet])
def test_gates_start_as_published(cls):
    layer = cls(2, num_heads=512, head_dim=2, rngs=nnx.Rngs(0))
    rate, step = (
        np.exp(layer.a_log[...]),
        np.asarray(jax.nn.softplus(layer.dt_bias[...])),
    )
    assert rate.min() >= 1
    assert rate.max() <= 16
    # uniform, so the mean is in the middle
    np.testing.assert_allclose(rate.mean(), 8.5, rtol=0.05)
    assert step.min() >= 0.999e-3
    assert step.max() <= 0.1001
    # log-uniform
    np.testing.assert_allclose(np.log(step).mean(), np.log(1e-2), rtol=0.05)
    if cls is jfla.nn.KimiDeltaAttention:
        assert not np.asarray(
            cls(2, num_heads=512, head_dim=2, lower_bound=-5.0, rngs=nnx.Rngs(0)).a_log[
                ...
            ]
        ).any()


def test_the_implementation_reaches_the_op(monkeypatch):
    calls = []
    for name in ("chunk_gdn", "recurrent_gdn"):

        def spy(q, k, v, g, beta, *, implementation, name=name, **options):
            calls.append((name, implementation))
            return jfla.DeltaRuleOutput(
                v, jnp.zeros((1, 1, 4, 4)) if options["return_final_state"] else None
            )

        monkeypatch.setattr(jfla.api, name, spy)
    layer = jfla.nn.GatedDeltaNet(
        8, num_heads=1, head_dim=4, implementation="xla", rngs=nnx.Rngs(0)
    )
    x, cache = jnp.ones((1, 20, 8)), layer.init_cache(1)
    layer(x), layer(x, cache=cache), layer(x[:, :1], cache=cache), layer(x[:, :1])
    assert calls == [
        ("chunk_gdn", "xla"),
        ("chunk_gdn", "xla"),
        ("recurrent_gdn", "xla"),
        ("chunk_gdn", "xla"),
    ]


def test_the_ops_do_not_need_flax():
    code = (
        "import sys, jfla; assert not {'flax', 'optax', 'jfla.nn'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
