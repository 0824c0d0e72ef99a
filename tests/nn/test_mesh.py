"""On a mesh of two by four devices: one training step as on one device, and no array gathered around the op."""

import collections
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from support.goldens import rms_error

import jfla.nn

RULES = (
    ("batch", "data"),
    ("heads", "model"),
    ("mlp", "model"),
    ("vocab", "model"),
    ("embed", None),
)
BATCH, TIME, VOCAB = 4, 70, 32


def mesh(kind=AxisType.Auto):
    return jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind, kind))


def make(op, heads=4):
    config = jfla.nn.DeltaLMConfig(
        vocab_size=VOCAB, hidden_size=32, num_layers=2, num_heads=heads, head_dim=8, num_value_heads=2 * heads, op=op,
        attention_layers=(1,), intermediate_size=64,
    )  # fmt: skip
    model = jfla.nn.DeltaLM(config, rngs=nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)


@nnx.jit
def step(model, optimizer, tokens, segment_ids):
    def loss(model):
        return jfla.nn.next_token_loss(model(tokens, segment_ids), tokens, segment_ids)

    value, grads = nnx.value_and_grad(loss)(model)
    optimizer.update(model, grads)
    return value


def test_one_step_is_that_of_one_device():
    tokens = jax.random.randint(jax.random.key(0), (BATCH, TIME), 0, VOCAB)
    segment_ids = jnp.broadcast_to(jnp.arange(TIME) // 30 + 1, (BATCH, TIME))
    model, optimizer = make("gdn")
    devices = mesh()
    with jax.set_mesh(devices), nnx.logical_axis_rules(RULES):
        spread, spread_optimizer = make("gdn")
        kernel = spread.blocks[0].mixer.v_proj.kernel[...]
        assert kernel.sharding.spec == P(None, "model", None)
        assert kernel.addressable_shards[0].data.shape == (32, 2, 8)
        rows = [
            jax.device_put(x, jax.NamedSharding(devices, P("data")))
            for x in (tokens, segment_ids)
        ]
        program = step.lower(spread, spread_optimizer, *rows).compile()
        loss = program(spread, spread_optimizer, *rows)

    before = nnx.to_flat_state(nnx.state(make("gdn")[0], nnx.Param))
    np.testing.assert_allclose(
        loss, step(model, optimizer, tokens, segment_ids), rtol=1e-6
    )
    after, got = (nnx.to_flat_state(nnx.state(m, nnx.Param)) for m in (model, spread))
    for (path, old), (_, new), (_, there) in zip(before, after, got):
        old, new, there = (np.asarray(x[...]) for x in (old, new, there))
        assert rms_error(there - old, new - old) < 1e-4, path

    compiled = program.as_text()
    # Each device holds the states [B, HV, K, V] of its own rows and heads.
    assert "f32[2,2,8,8]" in compiled
    assert "f32[4,8,8,8]" not in compiled
    # The row-parallel projections add up their parts; nothing else moves, least of all around the op.
    assert re.search(r"\ball-reduce(-start)?\(", compiled)
    assert not re.findall(
        r".*\b(?:all-gather|all-to-all|collective-permute)(?:-start)?\(.*", compiled
    )


TIME_RULES = (*RULES, ("time", "sequence"))


def mesh_with_time(*shape):
    axes = ("data", "sequence", "model")
    return jax.make_mesh(shape, axes, axis_types=(AxisType.Auto,) * 3)


def moved(compiled):
    """(kind, shape of the result) of what goes from device to device, all-reduces apart."""
    kinds = "all-gather|all-to-all|collective-permute|reduce-scatter"
    return collections.Counter(
        (kind, tuple(map(int, shape.split(","))))
        for shape, kind in re.findall(
            rf"= \w+\[([\d,]*)\]\S* ({kinds})(?:-start)?\(", compiled
        )
    )


def value_and_grads(model, tokens, segment_ids):
    def loss(model):
        return jfla.nn.next_token_loss(model(tokens, segment_ids), tokens, segment_ids)

    return nnx.value_and_grad(loss)(model)


@pytest.mark.parametrize(
    ("op", "shape", "lengths"),
    [
        (
            "gdn",
            (2, 2, 2),
            (25, 10, 24, 5),
        ),  # the second crosses the border; 5 of padding
        pytest.param("kda", (1, 4, 2), None, marks=pytest.mark.slow),
    ],
)
def test_loss_and_gradients_of_one_device_with_time_split(op, shape, lengths):
    """Data x sequence x model. What moves: states' maps, convolutions' last tokens, keys and values, and ids."""
    batch, time, heads = 4, 64, 2
    tokens = jax.random.randint(jax.random.key(0), (batch, time), 0, VOCAB)
    ids = None
    if lengths is not None:
        ids = np.tile(np.repeat((1, 2, 3, 0), lengths), (batch, 1)).astype(np.int32)
    want_loss, want = nnx.jit(value_and_grads)(make(op, heads)[0], tokens, ids)
    devices = mesh_with_time(*shape)
    with jax.set_mesh(devices), nnx.logical_axis_rules(TIME_RULES):
        spread = make(op, heads)[0]
        by_time = jax.NamedSharding(devices, P("data", "sequence"))
        arrays = jax.tree.map(lambda x: jax.device_put(x, by_time), (tokens, ids))
        program = nnx.jit(value_and_grads).lower(spread, *arrays).compile()
        loss, got = program(spread, *arrays)
    np.testing.assert_allclose(loss, want_loss, rtol=1e-6)
    flat = (nnx.to_flat_state(nnx.state(grads)) for grads in (got, want))
    for (path, x), (_, y) in zip(*flat, strict=True):
        assert rms_error(np.asarray(x[...]), np.asarray(y[...])) < 1e-5, path

    rows, stretches, here = batch // shape[0], shape[1], heads // shape[2]
    halos = {
        ("collective-permute", (rows, 3, here, 8)): 4,
        ("collective-permute", (rows, 3, 2 * here, 8)): 2,
    }
    maps = {("all-gather", (rows, 2 * here, stretches, 8, 16)): 2}
    keys_and_values = {("all-gather", (rows, time, here, 16)): 2}
    next_tokens = {("collective-permute", (rows, 1)): 1}
    of_ids = {}
    if ids is not None:
        next_tokens = {("collective-permute", (rows, 1)): 2}
        of_ids = {
            ("collective-permute", (rows, 3)): 1,  # convolutions
            ("all-gather", (stretches, 2, rows)): 1,  # the op
            ("all-gather", (rows, time)): 1,  # attention's mask
        }
    found = {
        (kind, tuple(sorted(shape))): count
        for (kind, shape), count in moved(program.as_text()).items()
    }
    expected = halos | maps | keys_and_values | next_tokens | of_ids
    assert found == {
        (kind, tuple(sorted(shape))): n for (kind, shape), n in expected.items()
    }


@pytest.mark.slow
def test_prompts_with_time_split_go_on_as_on_one_device():
    """The caches that a prompt leaves, of rows of different lengths."""
    prompt = jax.random.randint(jax.random.key(1), (BATCH, 32), 0, VOCAB)
    ids = (jnp.arange(32)[None] < jnp.array([32, 20, 7, 1])[:, None]).astype(jnp.int32)
    arguments = {"key": jax.random.key(0), "temperature": 0.0, "segment_ids": ids}
    expected = make("kda")[0].generate(prompt, 3, **arguments)
    with jax.set_mesh(mesh_with_time(1, 4, 2)), nnx.logical_axis_rules(TIME_RULES):
        spread = make("kda")[0]
        np.testing.assert_array_equal(spread.generate(prompt, 3, **arguments), expected)


def test_decoding_on_a_mesh():
    prompt = jax.random.randint(jax.random.key(1), (BATCH, 5), 0, VOCAB)
    expected = make("kda")[0].generate(
        prompt, 3, key=jax.random.key(0), temperature=0.0
    )
    with jax.set_mesh(mesh()), nnx.logical_axis_rules(RULES):
        spread = make("kda")[0]
        np.testing.assert_array_equal(
            spread.generate(prompt, 3, key=jax.random.key(0), temperature=0.0), expected
        )
        # A single row cannot be split over the data axis, so every device holds it.
        assert jax.eval_shape(lambda: spread(prompt[:1])).shape == (1, 5, VOCAB)


@pytest.mark.parametrize("op", ["kda", "gdn"])
def test_every_parameter_names_its_axes(op):
    model, _ = make(op)
    known = {"embed", "heads", "mlp", "vocab", None}
    for path, param in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        (axes,) = (
            param.get_metadata()[name]
            for name in ("out_sharding", "sharding_names")
            if param.has_metadata(name)
        )
        assert len(axes) == param.ndim, path
        assert set(axes) <= known, path


def test_explicit_axes_are_refused_with_the_remedy():
    layer = jfla.nn.GatedDeltaNet(8, num_heads=4, head_dim=4, rngs=nnx.Rngs(0))
    with (
        jax.set_mesh(mesh(AxisType.Explicit)),
        nnx.logical_axis_rules(RULES),
        pytest.raises(ValueError, match=r"must be AxisType\.Auto, got Explicit"),
    ):
        layer(jnp.ones((2, 3, 8)))


def test_arrays_over_explicit_axes_are_refused_and_whole_ones_taken():
    """Types alone say so: nothing is computed."""
    graph, state = nnx.split(nnx.eval_shape(lambda: make("gdn")[0]))
    tokens, devices = jnp.zeros((2, 20), int), mesh(AxisType.Explicit)
    over_rows = jax.NamedSharding(devices, P("data"))
    x = jax.ShapeDtypeStruct((2, 20, 32), jnp.float32, sharding=over_rows)
    loss = lambda state, tokens: jfla.nn.next_token_loss(
        nnx.merge(graph, state)(tokens), tokens
    )
    layer = lambda number: (
        lambda state, x: nnx.merge(graph, state).blocks[number].mixer(x)
    )
    with jax.set_mesh(devices):
        assert jax.tree.map(
            jnp.shape, jax.eval_shape(jax.grad(loss), state, tokens)
        ) == jax.tree.map(jnp.shape, state)
        with pytest.raises(
            ValueError,
            match=r"mesh axes of tokens must be AxisType\.Auto, got .*'data'.*axis_types=",
        ):
            jax.eval_shape(loss, state, jax.device_put(tokens, over_rows))
        for number in range(2):
            with pytest.raises(
                ValueError, match=r"mesh axes of x must be AxisType\.Auto"
            ):
                jax.eval_shape(layer(number), state, x)
