"""Published families in other shapes than their goldens, with seeded weights, and what Transformers makes of them.

With torch and transformers installed, `PYTHONPATH=.:tests python -m support.variant_models` writes the goldens anew.
"""

import json
import pathlib
import zlib

import numpy as np
from flax import nnx
from safetensors.numpy import save_file

import jfla.nn
from jfla.nn.families import family_of
from jfla.nn.weights.fill import existing
from jfla.nn.weights.torch_layouts import parameters_of, stacked_shape
from support import golden_models

FILE = golden_models.FOLDER.parent / "model_variants.npz"
PROMPT = np.random.default_rng(0).integers(0, 64, 21)
NEW = 8
TOLERANCE = 3e-5  # ten times the error of the peer's own float32

_SMALL = {
    "vocab_size": 64, "hidden_size": 40, "intermediate_size": 56, "num_hidden_layers": 3,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
_LINEAR = {
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
}
_TYPES = ["full_attention", "linear_attention", "linear_attention"]
_CHANGES = {
    "qwen3_5": {
        **_SMALL, **_LINEAR, "linear_num_value_heads": 6, "num_attention_heads": 6, "num_key_value_heads": 1,
        "head_dim": 20, "layer_types": _TYPES, "tie_word_embeddings": False,
        "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5, "rope_type": "default"},
    },
    "qwen3_next": {
        **_SMALL, **_LINEAR, "linear_num_value_heads": 6, "num_attention_heads": 3, "num_key_value_heads": 3,
        "head_dim": 16, "partial_rotary_factor": 1.0, "full_attention_interval": 3, "tie_word_embeddings": True,
        "num_experts": 6, "num_experts_per_tok": 3, "norm_topk_prob": False, "shared_expert_intermediate_size": 40,
        "decoder_sparse_step": 2, "moe_intermediate_size": 20,
    },
    "olmo_hybrid": {
        **_SMALL, **_LINEAR, "linear_num_value_heads": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "layer_types": _TYPES, "tie_word_embeddings": True, "linear_allow_neg_eigval": False,
        "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}, "rms_norm_eps": 1e-5,
    },
    "kimi_linear": {
        **_SMALL, "num_attention_heads": 2, "num_key_value_heads": 2, "v_head_dim": 36, "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 4, "kv_lora_rank": 20, "first_k_dense_replace": 2, "num_experts": 12,
        "num_experts_per_token": 3, "num_expert_group": 4, "topk_group": 2, "num_shared_experts": 2,
        "moe_renormalize": False, "routed_scaling_factor": 1.5, "tie_word_embeddings": False,
        "linear_attn_config": {
            "full_attn_layers": [1], "kda_layers": [2, 3], "head_dim": 12, "num_heads": 5, "short_conv_kernel_size": 4,
        },
    },
}  # fmt: skip
FAMILIES = tuple(_CHANGES)


def settings(family: str) -> dict:
    found = json.loads((golden_models.FOLDER / family / "config.json").read_text())
    changes = _CHANGES[family]
    if "text_config" in found:
        found["text_config"] |= changes
        found["tie_word_embeddings"] = changes["tie_word_embeddings"]
        return found
    return found | changes


def _values(name: str, shape: tuple[int, ...], zero_centered: bool) -> np.ndarray:
    x = np.random.default_rng(zlib.crc32(name.encode())).normal(size=shape)
    if name.endswith("A_log"):
        return 0.7 * x
    if name.endswith("norm.weight"):
        centre = 0 if zero_centered and "linear_attn" not in name else 1
        return centre + 0.3 * x
    if len(shape) < 2:
        return 0.3 * x
    return x / np.sqrt(shape[-1]) if "embed" not in name else x


def write(family: str, folder: pathlib.Path) -> pathlib.Path:
    """A folder with such a model."""
    config = jfla.nn.hf_config(settings(family))
    model = nnx.eval_shape(lambda: jfla.nn.from_config(config, rngs=nnx.Rngs(0)))
    parameters = parameters_of(model)
    tensors = {}
    for tensor in existing(family_of(config).tables(config)[0], parameters):
        rows, *rest = stacked_shape([parameters[name] for name in tensor.parameters])
        shape = (rows // len(tensor.names), *rest)
        for name in tensor.names:
            x = _values(name, shape, config.zero_centered_norms)
            tensors[name] = x.reshape(tensor.shape or shape).astype(np.float32)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(config.published)
    return folder


def golden(family: str) -> dict[str, np.ndarray]:
    with np.load(FILE) as file:
        return {name: file[f"{family}/{name}"] for name in ("logits", "tokens")}


def main() -> None:
    import tempfile

    from benchmarks import parity

    found = {}
    for family in FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            path = write(family, pathlib.Path(folder))
            expected = parity.theirs(path, PROMPT.tolist(), NEW, "float32")
            got = parity.ours(path, PROMPT.tolist(), NEW, "float32")
        print(family, parity.errors(got, expected), got.tokens == expected.tokens)
        found[f"{family}/logits"] = expected.arrays["logits"].astype(np.float32)
        found[f"{family}/tokens"] = np.array(expected.tokens)
    np.savez_compressed(FILE, **found)


if __name__ == "__main__":
    main()
