"""Qwen3.5, dense: Gated DeltaNet and gated softmax attention, from its settings and tensors."""

from typing import Any

from jfla.nn.families.common import FULL, layer_kinds, mlp_table, rotary, whole_model
from jfla.nn.families.settings import Settings
from jfla.nn.models.config import (
    AttentionSpec,
    GDNSpec,
    LayerSpec,
    MixerSpec,
    ModelConfig,
)
from jfla.nn.weights.name_maps import FAMILIES, table
from jfla.nn.weights.torch_layouts import StoredTensor, TensorTable, nested

MODEL_TYPES = ("qwen3_5", "qwen3_5_text")
# The vision tower and the heads that predict several tokens.
IGNORED = ("model.visual.", "mtp.")

_BLOCK = {
    "input_layernorm.weight": "mixer_norm.scale",
    "post_attention_layernorm.weight": "mlp_norm.scale",
}


def config(settings: Settings) -> dict[str, Any]:
    """The fields of a `ModelConfig`."""
    text = (
        settings.part("text_config") if "text_config" in settings.values else settings
    )
    text.only("hidden_act", "silu")
    tied = settings if "tie_word_embeddings" in settings.values else text
    size = text.size("intermediate_size")
    layers = tuple(LayerSpec(mixer=mixer, mlp=size) for mixer in mixers(text))
    return {
        "vocab_size": text.size("vocab_size"),
        "hidden_size": text.size("hidden_size"),
        "layers": layers,
        "norm_eps": text.number("rms_norm_eps", 1e-6),
        "zero_centered_norms": True,
        "tie_embeddings": tied.flag("tie_word_embeddings", False),
        "param_dtype": (text if "dtype" in text.values else settings).dtype(),
    }


def mixers(text: Settings) -> list[MixerSpec]:
    """The mixer of every layer, of Qwen3-Next too."""
    text.only("attention_bias", False)
    text.only("attn_output_gate", True)
    eps = text.number("rms_norm_eps", 1e-6)
    head_dim = text.size("head_dim", 256)
    linear = GDNSpec(
        num_heads=text.size("linear_num_key_heads"),
        head_dim=text.size("linear_key_head_dim"),
        num_value_heads=text.size("linear_num_value_heads"),
        value_head_dim=text.size("linear_value_head_dim"),
        conv_size=text.size("linear_conv_kernel_dim", 4),
        norm_eps=eps,
    )
    full = AttentionSpec(
        num_heads=text.size("num_attention_heads"),
        num_kv_heads=text.size("num_key_value_heads"),
        head_dim=head_dim,
        qk_norm="head",
        norm_eps=eps,
        zero_centered_norms=True,
        output_gate=True,
        **rotary(text, head_dim, 0.25),
    )
    return [full if kind == FULL else linear for kind in layer_kinds(text)]


def tables(config: ModelConfig) -> list[TensorTable]:
    """As published, and as the language model alone is, whichever the settings are of first."""
    blocks = [
        [*mixer_table(layer, "qwen3_5"), *mlp_table("mlp")] for layer in config.layers
    ]
    roots = ("model.language_model.", "model.")
    whole, alone = (whole_model(root, blocks) for root in roots)
    return [alone, whole] if config.model_type == "qwen3_5_text" else [whole, alone]


def mixer_table(layer: LayerSpec, family: Any) -> TensorTable:
    """The norms and the mixer of a block, of Qwen3-Next too."""
    mixer = layer.mixer
    if isinstance(mixer, AttentionSpec):
        return [
            *table(_BLOCK),
            *nested(_attention(mixer.num_heads), "self_attn.", "mixer."),
        ]
    assert isinstance(mixer, GDNSpec)
    (linear,) = FAMILIES[family].tables(mixer.num_heads)
    return [*table(_BLOCK), *nested(linear, "linear_attn.", "mixer.")]


def _attention(heads: int) -> TensorTable:
    """Query and gate come head by head in one tensor."""
    others = {f"{x}_proj.weight": f"{x}_proj.kernel" for x in "kvo"}
    norms = {f"{x}_norm.weight": f"{x}_norm.scale" for x in "qk"}
    query = StoredTensor(("q_proj.weight",), ("q_proj.kernel", "g_proj.kernel"), heads)
    return [query, *table(others), *table(norms)]
