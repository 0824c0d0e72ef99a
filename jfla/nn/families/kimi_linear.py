"""Kimi-Linear: Kimi Delta Attention and latent attention over mixtures of experts."""

from typing import Any

from jfla.nn.families.common import expert_table, mlp_table, whole_model
from jfla.nn.families.settings import Settings
from jfla.nn.layers.moe import MoEOptions
from jfla.nn.models.config import KDASpec, LatentSpec, LayerSpec, MixerSpec, ModelConfig
from jfla.nn.weights.name_maps import FAMILIES, MLP, table
from jfla.nn.weights.torch_layouts import StoredTensor, TensorTable, nested

MODEL_TYPES = ("kimi_linear",)
IGNORED = ()

# Of the norm on the latent, whatever the settings say of the others.
_LATENT_NORM_EPS = 1e-6
_NORMS = {
    "input_layernorm.weight": "mixer_norm.scale",
    "post_attention_layernorm.weight": "mlp_norm.scale",
}
_LATENT = {
    "q_proj.weight": "q_proj.kernel",
    "kv_a_proj_with_mqa.weight": "c_proj.kernel",
    "kv_a_layernorm.weight": "c_norm.scale",
    "o_proj.weight": "o_proj.kernel",
}
_MOE = {
    "gate.weight": "router.kernel",
    "gate.e_score_correction_bias": "correction",
}
_EXPERT = {"gate": "w1", "up": "w3", "down": "w2"}


def config(settings: Settings) -> dict[str, Any]:
    """The fields of a `ModelConfig`."""
    settings.only("hidden_act", "silu")
    settings.only("num_nextn_predict_layers", 0)
    pairs = zip(_mixers(settings), _mlps(settings), strict=True)
    return {
        "vocab_size": settings.size("vocab_size"),
        "hidden_size": settings.size("hidden_size"),
        "layers": tuple(LayerSpec(mixer=mixer, mlp=mlp) for mixer, mlp in pairs),
        "norm_eps": settings.number("rms_norm_eps", 1e-5),
        "tie_embeddings": settings.flag("tie_word_embeddings", False),
        "param_dtype": settings.dtype(),
    }


def _mixers(settings: Settings) -> list[MixerSpec]:
    """By the two lists of layers, which count from 1."""
    heads = settings.size("num_attention_heads")
    settings.only("num_key_value_heads", heads)
    settings.only("q_lora_rank", None)
    settings.only("mla_use_nope", True)
    settings.only("attention_bias", False)
    linear = settings.part("linear_attn_config")
    kda = KDASpec(
        num_heads=linear.size("num_heads"),
        head_dim=linear.size("head_dim"),
        conv_size=linear.size("short_conv_kernel_size", 4),
        norm_eps=settings.number("rms_norm_eps", 1e-5),
    )
    latent = LatentSpec(
        num_heads=heads,
        latent_dim=settings.size("kv_lora_rank"),
        key_dim=settings.size("qk_nope_head_dim"),
        shared_dim=settings.size("qk_rope_head_dim"),
        value_dim=settings.size("v_head_dim"),
        norm_eps=_LATENT_NORM_EPS,
    )
    numbers = range(1, settings.layers() + 1)
    kda_layers = linear.numbers("kda_layers")
    full_layers = linear.numbers("full_attn_layers")
    if sorted(kda_layers + full_layers) != list(numbers):
        settings.complain(
            f"kda_layers and full_attn_layers must share out the layers 1 .. {numbers[-1]}"
        )
    return [kda if number in kda_layers else latent for number in numbers]


def _mlps(settings: Settings) -> list[int | MoEOptions]:
    """Experts from layer `first_k_dense_replace` on (from 0), in every `moe_layer_freq`-th."""
    num_layers = settings.layers()
    first = settings.size("first_k_dense_replace", 0, least=0)
    step = settings.size("moe_layer_freq", 1)
    sparse = {n for n in range(num_layers) if n >= first and n % step == 0}
    dense = settings.size("intermediate_size") if len(sparse) < num_layers else 0
    experts: Any = _experts(settings) if sparse else None
    return [experts if n in sparse else dense for n in range(num_layers)]


def _experts(settings: Settings) -> MoEOptions | None:
    settings.only("moe_router_activation_func", "sigmoid")
    size = settings.size("moe_intermediate_size")
    shared = settings.size("num_shared_experts", 0, least=0)
    options: dict[str, Any] = {
        "num_experts": settings.size("num_experts"),
        "experts_per_token": settings.size("num_experts_per_token"),
        "intermediate_size": size,
        "renormalize": settings.flag("moe_renormalize", True),
        "weight_scale": settings.number("routed_scaling_factor", 1.0),
        "num_groups": settings.size("num_expert_group", 1),
        "groups_per_token": settings.size("topk_group", 1),
        "shared_size": shared * size or None,
    }
    if settings.problems:
        return None
    return MoEOptions(**options, score="sigmoid", correction_bias=True)


def tables(config: ModelConfig) -> list[TensorTable]:
    """As published, as Transformers holds it in memory, and what lies between."""
    found = []
    for form in range(len(FAMILIES["kimi_linear"].tables(1))):
        blocks = [[*_mixer(layer, form), *_mlp(layer)] for layer in config.layers]
        found.append(whole_model("model.", blocks))
    return found


def _mixer(layer: LayerSpec, form: int) -> TensorTable:
    mixer = layer.mixer
    if isinstance(mixer, LatentSpec):
        up = StoredTensor(
            ("kv_b_proj.weight",), ("k_proj.kernel", "v_proj.kernel"), mixer.num_heads
        )
        tensors = [*table(_LATENT), up]
    else:
        assert isinstance(mixer, KDASpec)
        tensors = []
        for tensor in FAMILIES["kimi_linear"].tables(mixer.num_heads)[form]:
            wide = tensor.names[0].endswith("A_log")
            tensors.append(tensor._replace(shape=(1, 1, -1, 1)) if wide else tensor)
    return [*table(_NORMS), *nested(tensors, "self_attn.", "mixer.")]


def _mlp(layer: LayerSpec) -> TensorTable:
    if isinstance(layer.mlp, int):
        return mlp_table("mlp")
    return [
        *nested(table(_MOE), "block_sparse_moe.", "mlp."),
        *nested(table(MLP), "block_sparse_moe.shared_experts.", "mlp.shared."),
        *expert_table("block_sparse_moe.experts", layer.mlp.num_experts, _EXPERT),
    ]
