"""Qwen3-Next: the mixers of Qwen3.5 over mixtures of experts, from its settings and tensors."""

from typing import Any

from jfla.nn.families.common import expert_table, mlp_table, whole_model
from jfla.nn.families.qwen3_5 import mixer_table, mixers
from jfla.nn.families.settings import Settings
from jfla.nn.layers.moe import MoEOptions
from jfla.nn.models.config import LayerSpec, ModelConfig
from jfla.nn.weights.name_maps import MLP, table
from jfla.nn.weights.torch_layouts import TensorTable, nested

MODEL_TYPES = ("qwen3_next",)
# The heads that predict several tokens.
IGNORED = ("mtp.",)

_MOE = {
    "gate.weight": "router.kernel",
    "shared_expert_gate.weight": "shared_gate.kernel",
}
_EXPERT = {x: f"{x}_proj" for x in ("gate", "up", "down")}


def config(settings: Settings) -> dict[str, Any]:
    """The fields of a `ModelConfig`."""
    settings.only("hidden_act", "silu")
    settings.only("use_sliding_window", False)
    mlps = _mlps(settings)
    pairs = zip(mixers(settings), mlps, strict=True)
    return {
        "vocab_size": settings.size("vocab_size"),
        "hidden_size": settings.size("hidden_size"),
        "layers": tuple(LayerSpec(mixer=mixer, mlp=mlp) for mixer, mlp in pairs),
        "norm_eps": settings.number("rms_norm_eps", 1e-6),
        "zero_centered_norms": True,
        "tie_embeddings": settings.flag("tie_word_embeddings", False),
        "param_dtype": settings.dtype(),
    }


def _mlps(settings: Settings) -> list[int | MoEOptions]:
    """Experts in every `decoder_sparse_step`-th layer, but not in `mlp_only_layers`."""
    num_layers = settings.layers()
    step = settings.size("decoder_sparse_step", 1)
    dense_layers = settings.numbers("mlp_only_layers")
    sparse = {n for n in range(num_layers) if (n + 1) % step == 0} - set(dense_layers)
    experts: Any = None
    if sparse:
        sizes: dict[str, Any] = {
            "num_experts": settings.size("num_experts"),
            "experts_per_token": settings.size("num_experts_per_tok"),
            "intermediate_size": settings.size("moe_intermediate_size"),
            "shared_size": settings.size("shared_expert_intermediate_size"),
            "renormalize": settings.flag("norm_topk_prob", True),
        }
        if not settings.problems:
            experts = MoEOptions(**sizes, score="softmax", shared_gate=True)
    dense = settings.size("intermediate_size") if len(sparse) < num_layers else 0
    return [experts if n in sparse else dense for n in range(num_layers)]


def tables(config: ModelConfig) -> list[TensorTable]:
    """As published."""
    blocks = [
        [*mixer_table(layer, "qwen3_next"), *_mlp(layer)] for layer in config.layers
    ]
    return [whole_model("model.", blocks)]


def _mlp(layer: LayerSpec) -> TensorTable:
    if isinstance(layer.mlp, int):
        return mlp_table("mlp")
    return [
        *nested(table(_MOE), "mlp.", "mlp."),
        *nested(table(MLP), "mlp.shared_expert.", "mlp.shared."),
        *expert_table("mlp.experts", layer.mlp.num_experts, _EXPERT),
    ]
