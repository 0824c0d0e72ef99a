"""Folders of published models: tables of tensors, saving, dtypes, meshes, and what damaged or hostile ones meet."""

import dataclasses
import json
import pickle
import re
import shutil
import struct

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from support import golden_models
from support.checkpoint_folders import assert_equal, settings_of, tensors_of, write

import jfla.nn

BF16 = jnp.dtype(jnp.bfloat16)
INDEX = "model.safetensors.index.json"


@pytest.fixture
def copy(tmp_path):
    """A folder with the smallest of the goldens, in one file, that may be damaged."""
    tensors = tensors_of(golden_models.FOLDER / "qwen3_5")
    return write(tmp_path / "copy", settings_of("qwen3_5"), tensors)


def beyond_the_text_model(name):
    return name.startswith(("mtp.", "model.visual."))


@pytest.mark.parametrize("family", golden_models.FAMILIES)
def test_what_was_loaded_is_written_back(family, tmp_path):
    """Names, shapes and bits, in shards and over older files; the settings as they were."""
    source = golden_models.FOLDER / family
    model = jfla.nn.load_hf(source)
    expected = {
        name: x
        for name, x in tensors_of(source).items()
        if not beyond_the_text_model(name)
    }
    (tmp_path / "model.safetensors").write_bytes(b"old")
    jfla.nn.save_hf(model, tmp_path, shard_bytes=300_000)
    assert (tmp_path / "config.json").read_text() == (
        source / "config.json"
    ).read_text()
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert [shard.name for shard in shards] == [
        f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))
    ]
    assert len(shards) >= 3
    assert_equal(tensors_of(tmp_path), expected)
    weight_map = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    assert weight_map.keys() == expected.keys()
    again = jfla.nn.load_hf(tmp_path)
    for shard in shards:
        shard.unlink()
    jfla.nn.save_hf(again, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "config.json",
        "model.safetensors",
    ]
    assert_equal(tensors_of(tmp_path), expected)


def test_saving_over_the_folder_that_was_loaded(copy):
    expected = tensors_of(copy)
    model = jfla.nn.load_hf(copy)
    jfla.nn.save_hf(model, copy)
    got = tensors_of(copy)
    assert_equal(got, {name: expected[name] for name in got})


def rounded(tensors, wide):
    """Tensors in bfloat16, those whose names end with one of `wide` in float32."""
    return {
        name: x if name.endswith(wide) else x.astype(BF16)
        for name, x in tensors.items()
    }


@pytest.mark.parametrize(
    "wide", [("A_log", "linear_attn.norm.weight"), (), ("up_proj.weight",)]
)
def test_dtypes_of_a_checkpoint(wide, tmp_path):
    settings = settings_of("qwen3_5")
    settings["text_config"]["dtype"] = "bfloat16"
    stored = rounded(tensors_of(golden_models.FOLDER / "qwen3_5"), wide)
    folder = write(tmp_path / "bf16", settings, stored)
    expected = {
        name: x for name, x in stored.items() if not beyond_the_text_model(name)
    }

    model = jfla.nn.load_hf(folder)
    block = model.blocks[0]
    assert block.mixer.q_proj.kernel.dtype == model.embed.embedding.dtype == BF16
    assert block.mixer.a_log.dtype == jnp.float32
    assert (block.mlp.up_proj.kernel.dtype == jnp.float32) == ("up_proj.weight" in wide)
    logits, cache = jax.eval_shape(
        lambda: model(jnp.zeros((1, 3), int), cache=model.init_cache(1, 4))
    )
    assert logits.dtype == cache[0].state.dtype == jnp.float32
    jfla.nn.save_hf(model, tmp_path / "again")
    assert_equal(tensors_of(tmp_path / "again"), expected)

    config = jfla.nn.hf_config(folder)
    in_float32 = dataclasses.replace(config, dtype=jnp.float32, param_dtype=jnp.float32)
    wide_model = jfla.nn.load_hf(folder, in_float32)
    kernel = wide_model.blocks[0].mixer.q_proj.kernel
    assert kernel.dtype == jnp.float32
    jfla.nn.save_hf(wide_model, tmp_path / "wide")
    assert_equal(tensors_of(tmp_path / "wide"), expected)
    # What was trained since, and would be rounded, stays as it is.
    kernel[...] = kernel[...] * 1.001
    jfla.nn.save_hf(wide_model, tmp_path / "wide")
    trained = tensors_of(tmp_path / "wide")
    changed = "model.language_model.layers.0.linear_attn.in_proj_qkv.weight"
    rows = kernel.shape[1] * kernel.shape[2]
    np.testing.assert_array_equal(
        trained.pop(changed)[:rows], np.asarray(kernel[...]).reshape(-1, rows).T
    )
    expected.pop(changed)
    assert_equal(trained, expected)


def test_a_narrower_dtype_where_it_is_asked_for():
    folder = golden_models.FOLDER / "qwen3_next"
    config = dataclasses.replace(
        jfla.nn.hf_config(folder), param_dtype=BF16, dtype=BF16
    )
    model = jfla.nn.load_hf(folder, config)
    wide = {"a_log", "dt_bias"}
    for path, param in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        assert param.dtype == (jnp.float32 if path[-1] in wide else BF16), path


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=pytest.mark.slow)
        for family in ("kimi_linear", "qwen3_next")
    ],
)
def test_weights_go_where_the_mesh_puts_them(family):
    rules = (
        ("batch", "data"),
        ("heads", "model"),
        ("mlp", "model"),
        ("vocab", "model"),
    )
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    folder = golden_models.FOLDER / family
    alone = jfla.nn.load_hf(folder)
    tokens = jnp.asarray(golden_models.golden(family)["input_ids"])[:, :20]
    run = nnx.jit(lambda model, tokens: model(tokens))
    with jax.set_mesh(mesh), nnx.logical_axis_rules((*rules, ("embed", None))):
        model = jfla.nn.load_hf(folder)
        experts = model.blocks[1].mlp.up_proj.kernel[...]
        assert experts.sharding.spec == P(None, None, "model")
        assert experts.addressable_shards[0].data.shape == (8, 64, 12)
        assert model.embed.embedding[...].sharding.spec == P("model", None)
        assert model.blocks[3].mixer.o_proj.kernel[...].sharding.spec == P(
            "model", None, None
        )
        assert model.blocks[0].mixer.a_log[...].sharding.mesh == mesh
        got = run(model, tokens)
    np.testing.assert_allclose(got, run(alone, tokens), rtol=1e-4, atol=1e-4)


def test_transformers_own_forms_of_olmo_hybrid(tmp_path):
    """The convolutions joined and cut into equal parts, the norms by their earlier names."""
    source = golden_models.FOLDER / "olmo_hybrid"
    tensors = tensors_of(source)
    for layer in range(3):
        names = [f"model.layers.{layer}.linear_attn.{x}_conv1d.weight" for x in "qkv"]
        joined = np.concatenate([tensors[name] for name in names])
        tensors |= dict(zip(names, map(np.ascontiguousarray, np.split(joined, 3))))
    assert tensors[names[0]].shape != (48, 1, 4)
    expected = nnx.to_flat_state(nnx.state(jfla.nn.load_hf(source)))
    renamed = {}
    for name, x in tensors.items():
        if ".3." not in name:
            name = name.replace("input_layernorm", "attention_layer_norm")
            name = name.replace("post_attention_layernorm", "feedforward_layer_norm")
        renamed[name] = x
    for stored in (tensors, renamed):
        folder = write(tmp_path / "other", settings_of("olmo_hybrid"), stored)
        got = nnx.to_flat_state(nnx.state(jfla.nn.load_hf(folder)))
        for (path, a), (_, b) in zip(got, expected, strict=True):
            np.testing.assert_array_equal(a[...], b[...], err_msg=str(path))


def test_the_language_model_of_qwen3_5_alone(tmp_path):
    settings = settings_of("qwen3_5")["text_config"] | {"tie_word_embeddings": False}
    tensors = {
        name.replace("model.language_model.", "model."): x
        for name, x in tensors_of(golden_models.FOLDER / "qwen3_5").items()
        if not beyond_the_text_model(name)
    }
    head = np.random.default_rng(0).normal(size=(256, 64)).astype(np.float32)
    folder = write(tmp_path / "text", settings, tensors | {"lm_head.weight": head})
    model = jfla.nn.load_hf(folder)
    np.testing.assert_array_equal(model.head.kernel[...], head.T)
    jfla.nn.save_hf(model, tmp_path / "again")
    assert_equal(tensors_of(tmp_path / "again"), tensors_of(folder))


def test_every_wrong_tensor_is_in_one_error(copy):
    tensors = tensors_of(copy)
    root = "model.language_model.layers.0."
    del tensors[f"{root}mlp.up_proj.weight"]
    tensors["lm_head.weight"] = np.zeros((256, 64), np.float32)
    tensors["model.visual_too.weight"] = np.zeros(3, np.float32)
    tensors[f"{root}linear_attn.A_log"] = np.zeros(5, np.float32)
    tensors[f"{root}linear_attn.conv1d.weight"] = np.zeros((192, 1, 4), np.int8)
    write(copy, settings_of("qwen3_5"), tensors)
    with pytest.raises(ValueError, match="5 tensors") as error:
        jfla.nn.load_hf(copy)
    assert re.findall(r"^  (.*)$", str(error.value), re.MULTILINE) == [
        f"missing: {root}mlp.up_proj.weight [112, 64]",
        "extra: lm_head.weight [256, 64]",
        "extra: model.visual_too.weight [3]",
        f"misshapen: {root}linear_attn.A_log must be [4], got [5]",
        f"misshapen: {root}linear_attn.conv1d.weight must be one of F64, F32, F16, BF16, got I8",
    ]


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16])
def test_values_that_are_not_finite_are_named(dtype, copy):
    tensors = {name: x.astype(dtype) for name, x in tensors_of(copy).items()}
    bad = [
        "model.language_model.norm.weight",
        "model.language_model.layers.3.mlp.up_proj.weight",
    ]
    tensors[bad[0]][-1] = np.nan
    tensors[bad[1]][5, 7] = -np.inf
    tensors["mtp.norm.weight"][:] = np.nan  # not of the text model
    write(copy, settings_of("qwen3_5"), tensors)
    with pytest.raises(
        ValueError, match=r"2 tensors .* hold a NaN or an infinity"
    ) as error:
        jfla.nn.load_hf(copy)
    assert all(f"not finite: {name}\n" in f"{error.value}\n" for name in bad)


def test_damaged_files(copy):
    file = copy / "model.safetensors"
    whole = file.read_bytes()
    header = json.dumps(
        {
            "model.norm.weight": {
                "dtype": "F32",
                "shape": [2**61],
                "data_offsets": [0, 2**63],
            }
        }
    )
    damaged = {
        "truncated": whole[: len(whole) // 2],
        "empty": b"",
        "header of 2^62 bytes": struct.pack("<Q", 2**62) + whole[8:],
        "tensor of 2^63 bytes": struct.pack("<Q", len(header)) + header.encode(),
        "not JSON": struct.pack("<Q", 4) + b"{{{{",
        "text": b"version https://git-lfs.github.com/spec/v1\n" * 3,
    }  # fmt: skip
    for content in damaged.values():
        file.write_bytes(content)
        with pytest.raises(
            ValueError, match=r"model\.safetensors is not a whole safetensors file"
        ):
            jfla.nn.load_hf(copy)


@pytest.mark.parametrize(
    "name",
    [
        "../outside.safetensors",
        "/tmp/outside.safetensors",
        "a/b.safetensors",
        "..\\o.safetensors",
        "model.bin",
        3,
        None,
        ["model.safetensors"],
        "a\0.safetensors",
    ],
)
def test_an_index_leads_nowhere_else(name, copy):
    shutil.copy(copy / "model.safetensors", copy.parent / "outside.safetensors")
    names = tensors_of(copy)
    (copy / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, name)}))
    with pytest.raises(ValueError, match=r"must name \.safetensors files beside it"):
        jfla.nn.load_hf(copy)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"weight_map": []}', "[" * 100_000, "\xff"]
)
def test_an_index_that_is_none(text, copy):
    (copy / INDEX).write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=re.escape(INDEX)):
        jfla.nn.load_hf(copy)


def test_the_same_tensor_in_two_shards(copy):
    shutil.copy(copy / "model.safetensors", copy / "other.safetensors")
    index = {"weight_map": {"a": "model.safetensors", "b": "other.safetensors"}}
    (copy / INDEX).write_text(json.dumps(index))
    with pytest.raises(
        ValueError, match=r"holds tensors of another shard: .*in_proj_a"
    ):
        jfla.nn.load_hf(copy)


def test_pickles_are_not_opened(copy):
    class Bomb:
        def __reduce__(self):
            return exec, ("raise SystemExit('opened')",)

    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    (copy / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(ValueError, match="pickles"):
        jfla.nn.load_hf(copy)
    (copy / "model.safetensors").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        jfla.nn.load_hf(copy)


def test_every_wrong_setting_is_in_one_error(tmp_path):
    changes = {
        "hidden_size": "64", "rms_norm_eps": -1.0, "vocab_size": True,
        "linear_attn_config": [1], "q_lora_rank": 12, "moe_router_activation_func": "softmax",
        "dtype": "float8_e4m3fn", "moe_renormalize": None,
    }  # fmt: skip
    settings = settings_of("kimi_linear") | changes
    del settings["kv_lora_rank"]
    with pytest.raises(ValueError, match="settings of the settings cannot be") as error:
        jfla.nn.hf_config(settings)
    for name in (*changes, "kv_lora_rank", "linear_attn_config.num_heads"):
        assert re.search(
            rf"^  {re.escape(name)} must be ", str(error.value), re.MULTILINE
        ), name


def test_settings_of_no_model(copy):
    for text, message in (
        ("{", "config.json must be JSON"),
        ("[]", "config.json must hold a JSON object, got list"),
        ("{}", "model_type must be one of .*qwen3_5.*, got None"),
        ('{"model_type": ["qwen3_5"]}', "model_type must be one of"),
        ('{"model_type": "qwen3_5"}', "text_config|vocab_size must be"),
    ):
        (copy / "config.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            jfla.nn.load_hf(copy)
    (copy / "config.json").unlink()
    with pytest.raises(FileNotFoundError):
        jfla.nn.load_hf(copy)


def test_more_layers_than_tensors_are_not_built(copy):
    settings = settings_of("qwen3_5")
    settings["text_config"] |= {"num_hidden_layers": 9999, "layer_types": None}
    (copy / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match="must hold 9999 layers, got 62 tensors"):
        jfla.nn.load_hf(copy)
    settings["text_config"] |= {"num_hidden_layers": 10**9}
    with pytest.raises(ValueError, match="num_hidden_layers must be at most 10000"):
        jfla.nn.hf_config(settings)


def test_a_configuration_made_by_hand_is_not_published(tmp_path):
    config = dataclasses.replace(
        jfla.nn.hf_config(golden_models.FOLDER / "olmo_hybrid"), published=""
    )
    model = nnx.eval_shape(lambda: jfla.nn.from_config(config, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match="must be read from the settings of a family"):
        jfla.nn.save_hf(model, tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()
    with pytest.raises(ValueError, match="save_hf writes all others"):
        jfla.nn.save_fla(model, tmp_path / "nothing")
