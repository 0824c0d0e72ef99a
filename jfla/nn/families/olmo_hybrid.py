"""OLMo-Hybrid: Gated DeltaNet with negative eigenvalues and attention behind whose output norms stand."""

from typing import Any

from jfla.nn.families.common import FULL, layer_kinds, mlp_table, rotary, whole_model
from jfla.nn.families.settings import Settings
from jfla.nn.models.config import AttentionSpec, GDNSpec, LayerSpec, ModelConfig
from jfla.nn.weights.name_maps import ATTENTION, FAMILIES, table
from jfla.nn.weights.torch_layouts import StoredTensor, TensorTable, nested

MODEL_TYPES = ("olmo_hybrid",)
IGNORED = ()

# Of the norm on a linear layer's output, whatever the settings say of the others.
_OUTPUT_NORM_EPS = 1e-5
_NORMS = {
    "input_layernorm.weight": "mixer_norm.scale",
    "post_attention_layernorm.weight": "mlp_norm.scale",
}
# As a release before the first published one called them.
_EARLIER_NORMS = {
    "attention_layer_norm.weight": "mixer_norm.scale",
    "feedforward_layer_norm.weight": "mlp_norm.scale",
}
# Behind attention and MLP, where one of the names above means another place.
_NORMS_AFTER = {
    "post_attention_layernorm.weight": "mixer_norm.scale",
    "post_feedforward_layernorm.weight": "mlp_norm.scale",
}
_QK_NORMS = {f"{x}_norm.weight": f"{x}_norm.scale" for x in "qk"}
_CONVOLUTIONS = tuple(f"{x}_conv1d.weight" for x in "qkv")


def config(settings: Settings) -> dict[str, Any]:
    """The fields of a `ModelConfig`."""
    settings.only("hidden_act", "silu")
    settings.only("attention_bias", False)
    hidden_size = settings.size("hidden_size")
    eps = settings.number("rms_norm_eps", 1e-6)
    mlp = settings.size("intermediate_size")
    linear = GDNSpec(
        num_heads=settings.size("linear_num_key_heads"),
        head_dim=settings.size("linear_key_head_dim"),
        num_value_heads=settings.size("linear_num_value_heads"),
        value_head_dim=settings.size("linear_value_head_dim"),
        conv_size=settings.size("linear_conv_kernel_dim", 4),
        norm_eps=_OUTPUT_NORM_EPS,
        allow_neg_eigval=settings.flag("linear_allow_neg_eigval", True),
    )
    heads = settings.size("num_attention_heads")
    head_dim = hidden_size // heads
    if head_dim * heads != hidden_size:
        settings.complain(
            f"num_attention_heads must divide hidden_size = {hidden_size}"
        )
    full = AttentionSpec(
        num_heads=heads,
        num_kv_heads=settings.size("num_key_value_heads", heads),
        head_dim=head_dim,
        qk_norm="projection",
        norm_eps=eps,
        **rotary(settings, head_dim),
    )
    layers = {
        False: LayerSpec(mixer=linear, mlp=mlp),
        True: LayerSpec(mixer=full, mlp=mlp, norm_after=True),
    }
    return {
        "vocab_size": settings.size("vocab_size"),
        "hidden_size": hidden_size,
        "layers": tuple(layers[kind == FULL] for kind in layer_kinds(settings)),
        "norm_eps": eps,
        "tie_embeddings": settings.flag("tie_word_embeddings", False),
        "param_dtype": settings.dtype(),
    }


def tables(config: ModelConfig) -> list[TensorTable]:
    """As published, as released before, and each as Transformers writes its convolutions."""
    found = []
    for in_three in (False, True):
        for norms in (_NORMS, _EARLIER_NORMS):
            blocks = [_block(layer, norms, in_three) for layer in config.layers]
            found.append(whole_model("model.", blocks))
    return found


def _block(layer: LayerSpec, norms: dict[str, str], in_three: bool) -> TensorTable:
    if layer.norm_after:
        attention = table({**ATTENTION, **_QK_NORMS})
        mixer = nested(attention, "self_attn.", "mixer.")
        return [*table(_NORMS_AFTER), *mixer, *mlp_table("mlp")]
    assert isinstance(layer.mixer, GDNSpec)
    (linear,) = FAMILIES["fla_gdn"].tables(layer.mixer.num_heads)
    if in_three:
        # Transformers holds the three convolutions as one, and cuts it into equal parts.
        kernels = tuple(f"{x}_conv.kernel" for x in "qkv")
        linear = [tensor for tensor in linear if tensor.names[0] not in _CONVOLUTIONS]
        linear.append(StoredTensor(_CONVOLUTIONS, kernels))
    mixer = nested(linear, "linear_attn.", "mixer.")
    return [*table(norms), *mixer, *mlp_table("mlp")]
