"""Reading and writing checkpoints: grouped value heads, prefixes, shards, and errors that say everything."""

import dataclasses
import json
import pickle
import re
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file
from support import golden_layers
from support.numpy_layers import (
    CONFIG,
    HV,
    KEY,
    SHAPES,
    D,
    H,
    K,
    V,
    peer,
    random_weights,
)

import jfla.nn
from jfla.nn import load_mixer


@pytest.mark.parametrize("family", SHAPES)
def test_more_value_heads_than_key_heads(family, tmp_path):
    w = random_weights(family)
    x = np.random.default_rng(1).normal(size=(8, D)).astype(np.float32)
    layer = golden_layers.make(family, CONFIG)
    load_mixer(layer, golden_layers.write(w, tmp_path / "model.safetensors"), family)
    # So few tokens with a cache go through the recurrence, which compiles faster.
    y, _ = layer(jnp.asarray(x[None]), cache=layer.init_cache(1))
    np.testing.assert_allclose(y[0], peer(family, w, x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("inside", ["", "forget_gate."])
def test_kimi_linear_convolutions_and_gates_in_every_place(packed, inside, tmp_path):
    w = random_weights("kimi_linear")
    layer = golden_layers.make("kimi_linear", CONFIG)
    load_mixer(layer, golden_layers.write(w, tmp_path / "a.safetensors"), "kimi_linear")
    moved = {
        name: f"{inside}{name}"
        for name in ("A_log", "dt_bias", "f_a_proj.weight", "f_b_proj.weight")
    }
    renamed = {moved.get(name, name): x for name, x in w.items()}
    if packed:
        renamed["conv1d.weight"] = np.concatenate(
            [renamed.pop(f"{x}_conv1d.weight") for x in "qkv"]
        )
    other = golden_layers.make("kimi_linear", CONFIG, seed=1)
    load_mixer(
        other, golden_layers.write(renamed, tmp_path / "b.safetensors"), "kimi_linear"
    )
    assert_same(layer, other)


def test_layers_of_a_whole_checkpoint_in_shards(tmp_path):
    layers = {number: random_weights("qwen3_next") for number in (0, 2)}
    layers[2]["A_log"] = layers[2]["A_log"] + 1
    prefixes = {number: f"model.layers.{number}.linear_attn." for number in layers}
    tensors = {
        prefixes[n] + name: x for n, w in layers.items() for name, x in w.items()
    }
    tensors |= {
        "model.embed_tokens.weight": np.zeros((5, D), np.float32),
        "lm_head.weight": np.zeros((5, D), np.float32),
    }
    tensors["model.layers.1.self_attn.q_proj.weight"] = np.zeros((D, D), np.float32)
    names = sorted(tensors)
    shards = {f"model-0000{i + 1}-of-00002.safetensors": names[i::2] for i in range(2)}
    for shard, inside in shards.items():
        save_file({name: tensors[name] for name in inside}, tmp_path / shard)
    index = {
        "weight_map": {
            name: shard for shard, inside in shards.items() for name in inside
        }
    }
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))

    alone = golden_layers.make("qwen3_next", CONFIG)
    load_mixer(
        alone,
        golden_layers.write(layers[2], tmp_path / "alone.safetensors"),
        "qwen3_next",
    )
    by_number, by_prefix = (
        golden_layers.make("qwen3_next", CONFIG, seed=seed) for seed in (1, 2)
    )
    assert_same(alone, load_mixer(by_number, tmp_path, "qwen3_next", layer=2))
    assert_same(
        alone, load_mixer(by_prefix, tmp_path, "qwen3_next", prefix=prefixes[2])
    )
    with pytest.raises(
        ValueError, match=r"layer=1 must have one linear_attn in .*, got none"
    ):
        load_mixer(by_number, tmp_path, "qwen3_next", layer=1)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="model-00002-of-00002"):
        load_mixer(by_number, tmp_path, "qwen3_next", layer=2)


def test_one_error_lists_every_problem_and_leaves_the_layer_alone(tmp_path):
    w = random_weights("fla_gdn")
    del w["a_proj.weight"], w["o_norm.weight"]
    w["k_proj.weight"] = w["k_proj.weight"].T
    w["q_conv1d.weight"] = w["q_conv1d.weight"].astype(np.int8)
    w["q_conv1d.bias"] = np.zeros(KEY, np.float32)
    layer, untouched = (golden_layers.make("fla_gdn", CONFIG) for _ in range(2))
    with pytest.raises(ValueError, match="5 tensors") as error:
        load_mixer(
            layer,
            golden_layers.write(w, tmp_path / "w.safetensors", "deep."),
            "fla_gdn",
            prefix="deep.",
        )
    assert re.findall(r"^  (.*)$", str(error.value), re.MULTILINE) == [
        "missing: deep.o_norm.weight [16]",
        "missing: deep.a_proj.weight [4, 24]",
        "extra: deep.q_conv1d.bias [16]",
        "misshapen: deep.k_proj.weight must be [16, 24], got [24, 16]",
        "misshapen: deep.q_conv1d.weight must be one of F64, F32, F16, BF16, got I8",
    ]
    assert_same(layer, untouched)


def test_a_parameter_without_a_tensor_is_missing(tmp_path):
    path = golden_layers.write(
        random_weights("kimi_linear"), tmp_path / "w.safetensors"
    )
    with pytest.raises(
        ValueError, match=r"missing: a tensor for the parameter g_b_proj\.bias"
    ):
        load_mixer(golden_layers.make("fla_kda", CONFIG), path, "kimi_linear")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "weights.pt", "weights.pth"])
def test_pickles_are_not_opened(name, tmp_path):
    class Bomb:
        def __reduce__(self):
            return exec, ("raise SystemExit('opened')",)

    (tmp_path / name).write_bytes(pickle.dumps(Bomb()))
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(ValueError, match="pickle"):
            load_mixer(golden_layers.make("fla_gdn", CONFIG), path, "fla_gdn")
        with pytest.raises(ValueError, match="pickle"):
            jfla.nn.load_hf(path, tiny("gdn"))


def test_without_safetensors_the_error_says_how_to_get_it(tmp_path, monkeypatch):
    path = golden_layers.write(random_weights("fla_gdn"), tmp_path / "w.safetensors")
    layer = golden_layers.make("fla_gdn", CONFIG)
    for name in ("safetensors", "safetensors.numpy"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r'pip install "jfla\[hf\]"'):
        load_mixer(layer, path, "fla_gdn")
    with pytest.raises(ImportError, match=r'pip install "jfla\[hf\]"'):
        jfla.nn.save_fla(layer, tmp_path)


def test_wrong_paths_and_families(tmp_path):
    layer = golden_layers.make("fla_gdn", CONFIG)
    with pytest.raises(ValueError, match="family must be one of"):
        load_mixer(layer, tmp_path, "llama")
    with pytest.raises(ValueError, match="mixer must be a KimiDeltaAttention"):
        load_mixer(layer, tmp_path, "fla_kda")
    with pytest.raises(FileNotFoundError, match="must hold"):
        load_mixer(layer, tmp_path, "fla_gdn")
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        load_mixer(layer, tmp_path / "absent.safetensors", "fla_gdn")
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(ValueError, match=r"must be a \.safetensors file"):
        load_mixer(layer, tmp_path / "notes.txt", "fla_gdn")


def test_bfloat16_weights_and_parameters(tmp_path):
    w = {
        name: np.asarray(jnp.asarray(x, jnp.bfloat16))
        for name, x in random_weights("fla_gdn").items()
    }
    path = golden_layers.write(w, tmp_path / "w.safetensors")
    wide = load_mixer(golden_layers.make("fla_gdn", CONFIG), path, "fla_gdn")
    narrow = jfla.nn.GatedDeltaNet(
        D,
        H,
        K,
        num_value_heads=HV,
        value_head_dim=V,
        param_dtype=jnp.bfloat16,
        dtype=jnp.bfloat16,
        rngs=nnx.Rngs(0),
    )
    load_mixer(narrow, path, "fla_gdn")
    assert wide.q_proj.kernel.dtype == jnp.float32
    assert narrow.q_proj.kernel.dtype == jnp.bfloat16
    assert narrow.a_log.dtype == narrow.dt_bias.dtype == jnp.float32
    np.testing.assert_array_equal(
        wide.q_proj.kernel[...], narrow.q_proj.kernel[...].astype(jnp.float32)
    )


def tiny(op, **changes):
    base = jfla.nn.DeltaLMConfig(
        vocab_size=11, hidden_size=D, num_layers=2, num_heads=H, head_dim=K, num_value_heads=HV, value_head_dim=V,
        op=op, output_gate_bias=op == "kda", attention_layers=(1,), attention_heads=3, attention_kv_heads=1,
        rope_theta=500.0, intermediate_size=40,
    )  # fmt: skip
    return dataclasses.replace(base, **changes)


@pytest.mark.parametrize(
    "config",
    [tiny("kda", lower_bound=-5.0), tiny("gdn", tie_embeddings=True)],
    ids=["kda", "gdn"],
)
def test_a_model_comes_back_as_it_was(config, tmp_path):
    model = jfla.nn.DeltaLM(config, rngs=nnx.Rngs(3))
    jfla.nn.save_fla(model, tmp_path)
    names = load_file(tmp_path / "model.safetensors")
    mixer = {
        f"model.layers.0.attn.{name}": tuple(shape)
        for name, shape in SHAPES[f"fla_{config.op}"].items()
    }
    assert {
        name: x.shape
        for name, x in names.items()
        if name.startswith("model.layers.0.attn.")
    } == mixer
    others = {"model.embeddings.weight": (11, D), "model.norm.weight": (D,)}
    others |= {} if config.tie_embeddings else {"lm_head.weight": (11, D)}
    for layer in range(2):
        others |= {
            f"model.layers.{layer}.{norm}_norm.weight": (D,) for norm in ("attn", "mlp")
        }
        others |= {
            f"model.layers.{layer}.mlp.{name}_proj.weight": (40, D)
            for name in ("gate", "up")
        }
        others[f"model.layers.{layer}.mlp.down_proj.weight"] = (D, 40)
    others |= {f"model.layers.1.attn.{x}_proj.weight": (D, D) for x in "qo"}
    others |= {f"model.layers.1.attn.{x}_proj.weight": (D // 3, D) for x in "kv"}
    assert {name: x.shape for name, x in names.items() if name not in mixer} == others
    assert jfla.nn.fla_config(tmp_path) == config
    assert_same(jfla.nn.load_hf(tmp_path), model)


def test_a_layer_without_output_gate_bias_is_saved_with_zeros(tmp_path):
    layer = golden_layers.make("kimi_linear", CONFIG)
    jfla.nn.save_fla(layer, tmp_path)
    same = load_mixer(
        golden_layers.make("fla_kda", CONFIG, seed=1), tmp_path, "fla_kda"
    )
    x, cache = jnp.ones((1, 3, D)), layer.init_cache(1)
    np.testing.assert_array_equal(layer(x, cache=cache)[0], same(x, cache=cache)[0])


def test_settings_without_a_part_are_all_named(tmp_path):
    save_file({}, tmp_path / "model.safetensors")
    settings = {
        "model_type": "gated_deltanet",
        "use_gate": False,
        "attn": {"layers": [0], "window_size": 128},
    }
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=r"use_gate=False, attn\.window_size=128"):
        jfla.nn.load_hf(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(
        ValueError,
        match=r"model_type must be one of kda, gated_deltanet, .*got 'llama'",
    ):
        jfla.nn.load_hf(tmp_path)


def assert_same(a, b):
    a, b = (dict(nnx.to_flat_state(nnx.state(module, nnx.Param))) for module in (a, b))
    assert a.keys() == b.keys()
    for path in a:
        np.testing.assert_array_equal(a[path][...], b[path][...], err_msg=str(path))
