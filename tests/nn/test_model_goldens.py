"""Whole published models against their authors' code: states of every layer, logits, greedy tokens, packed rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support import golden_models, variant_models
from support.goldens import rms_error

import jfla.nn


@pytest.fixture(params=golden_models.FAMILIES, scope="module")
def family(request):
    return request.param


@pytest.fixture(scope="module")
def model(family):
    return jfla.nn.load_hf(golden_models.FOLDER / family)


@pytest.fixture(scope="module")
def golden(family):
    return golden_models.golden(family)


@pytest.fixture(scope="module")
def states(model, golden):
    """Without a cache, as one batch: a whole row, a padded one, two packed ones, one with its continuation."""
    tokens = np.zeros((4, 48), np.int32)
    ids = np.zeros((4, 48), np.int32)
    tokens[:2, :37] = golden["input_ids"]
    ids[:2, :37] = golden["attention_mask"]
    start, middle, end = golden["packed_cu_seqlens"]
    tokens[2, :end] = golden["packed_ids"]
    ids[2, start:middle] = 1
    ids[2, middle:end] = 2
    tokens[3] = [*golden["input_ids"][0], *golden["generated_ids"][:-1]]
    ids[3] = 1
    states = nnx.jit(type(model).hidden_states)(
        model, jnp.asarray(tokens), jnp.asarray(ids)
    )
    return [np.asarray(x) for x in (*states, model.logits(states[-1]))]


def test_states_of_every_layer(states, golden, family):
    tolerance = golden_models.TOLERANCES[family]["hidden_states"]
    assert len(states) - 1 == len(golden["hidden_states"])
    for got, expected in zip(states, golden["hidden_states"]):
        assert rms_error(got[0, :37], expected) <= tolerance


def test_logits_of_whole_padded_and_packed_rows(states, golden, family):
    tolerances = golden_models.TOLERANCES[family]
    whole, padded, packed, continued = states[-1]
    assert rms_error(whole[:37], golden["logits_0"]) <= tolerances["logits_0"]
    assert rms_error(padded[:28], golden["logits_1"]) <= tolerances["logits_1"]
    assert (
        rms_error(packed[:31], golden["packed_logits"]) <= tolerances["packed_logits"]
    )
    assert (
        rms_error(continued[36:], golden["generated_logits"])
        <= tolerances["generated_logits"]
    )


def test_greedy_tokens(model, golden):
    """With a cache, token by token; the padded row beside it does not matter."""
    prompt, mask = (
        jnp.asarray(golden[name]) for name in ("input_ids", "attention_mask")
    )
    greedy = {"key": jax.random.key(0), "temperature": 0.0, "segment_ids": mask}
    got = model.generate(prompt, len(golden["generated_ids"]), **greedy)
    np.testing.assert_array_equal(got[0], golden["generated_ids"])


@pytest.mark.parametrize("name", ["kimi_linear", "qwen3_next"])
def test_routers(name):
    """The experts of every token and their weights, from the golden's own states."""
    model, golden = (
        jfla.nn.load_hf(golden_models.FOLDER / name),
        golden_models.golden(name),
    )
    sparse = [i for i, block in enumerate(model.blocks) if hasattr(block.mlp, "route")]
    assert len(sparse) == len(golden["router_experts"])
    for i, experts, weights in zip(
        sparse, golden["router_experts"], golden["router_weights"]
    ):
        x = jnp.asarray(golden["hidden_states"][i] + golden["mixer_outputs"][i])
        got, its_weights = model.blocks[i].mlp.route(model.blocks[i].mlp_norm(x))
        order = np.argsort(got, axis=1)
        np.testing.assert_array_equal(
            np.take_along_axis(np.asarray(got), order, axis=1), experts
        )
        its_weights = np.take_along_axis(np.asarray(its_weights), order, axis=1)
        assert (
            rms_error(its_weights, weights)
            <= golden_models.TOLERANCES[name]["router_weights"]
        )


@pytest.mark.parametrize("name", variant_models.FAMILIES)
def test_other_shapes(name, tmp_path):
    """Heads, groups of experts, norms, rotary parts and ties that the tiny published models do not have."""
    model = jfla.nn.load_hf(variant_models.write(name, tmp_path))
    golden = variant_models.golden(name)
    row = np.concatenate([variant_models.PROMPT, golden["tokens"][:-1]])
    logits = nnx.jit(lambda model, row: model(row))(model, jnp.asarray(row)[None])
    time = len(variant_models.PROMPT)
    assert rms_error(logits[0, :time], golden["logits"]) <= variant_models.TOLERANCE
    np.testing.assert_array_equal(
        np.argmax(logits[0, time - 1 :], axis=-1), golden["tokens"]
    )
