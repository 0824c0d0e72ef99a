"""What each family of checkpoints calls the parameters of a delta-rule layer."""

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

from jfla.nn.layers.gdn import GatedDeltaNet
from jfla.nn.layers.kda import KimiDeltaAttention
from jfla.nn.weights.torch_layouts import StoredTensor, TensorTable, nested

Family = Literal["fla_kda", "fla_gdn", "kimi_linear", "qwen3_next", "qwen3_5"]
# Name of a tensor to the parameters whose rows it stacks.
NameMap = Mapping[str, str | tuple[str, ...]]


class FamilyNames(NamedTuple):
    """Where a family keeps the layer and under which names.

    **Fields:** `layer`, the class that it fills; `holder`, the module that holds it in a decoder
    layer; `tables`, by the number of key heads: one of them applies.
    """

    layer: type[KimiDeltaAttention] | type[GatedDeltaNet]
    holder: str
    tables: Callable[[int], list[TensorTable]]


def table(names: NameMap, grouped: tuple[str, ...] = (), heads: int = 1) -> TensorTable:
    """Tensors of these names; the rows of `grouped` ones come in a group per key head."""
    tensors = []
    for name, target in names.items():
        parameters = (target,) if isinstance(target, str) else target
        groups = heads if name in grouped else 1
        tensors.append(StoredTensor((name,), parameters, groups))
    return tensors


_QKV = {f"{x}_proj.weight": f"{x}_proj.kernel" for x in "qkv"}
_CONVOLUTIONS = {f"{x}_conv1d.weight": f"{x}_conv.kernel" for x in "qkv"}
_PACKED_CONVOLUTION = {
    "conv1d.weight": ("q_conv.kernel", "k_conv.kernel", "v_conv.kernel")
}
_GATE = {
    "A_log": "a_log",
    "dt_bias": "dt_bias",
}
_OUT = {
    "o_norm.weight": "o_norm.scale",
    "o_proj.weight": "o_proj.kernel",
}

_FLA = {
    **_GATE,
    **_QKV,
    **_CONVOLUTIONS,
    "b_proj.weight": "b_proj.kernel",
    **_OUT,
}
_FLA_GDN = {
    **_FLA,
    "a_proj.weight": "a_proj.kernel",
    "g_proj.weight": "g_proj.kernel",
}
_FLA_KDA = {
    **_FLA,
    "f_proj.0.weight": "f_a_proj.kernel",
    "f_proj.1.weight": "f_b_proj.kernel",
    "g_proj.0.weight": "g_a_proj.kernel",
    "g_proj.1.weight": "g_b_proj.kernel",
    "g_proj.1.bias": "g_b_proj.bias",
}

_KIMI = {
    **_QKV,
    **_OUT,
    "b_proj.weight": "b_proj.kernel",
    "g_a_proj.weight": "g_a_proj.kernel",
    "g_b_proj.weight": "g_b_proj.kernel",
}
_KIMI_FORGET_GATE = {
    **_GATE,
    "f_a_proj.weight": "f_a_proj.kernel",
    "f_b_proj.weight": "f_b_proj.kernel",
}

_QWEN = {
    **_GATE,
    **_PACKED_CONVOLUTION,
    "norm.weight": "o_norm.scale",
    "out_proj.weight": "o_proj.kernel",
}
_QWEN3_NEXT_PACKED = {
    "in_proj_qkvz.weight": (
        "q_proj.kernel",
        "k_proj.kernel",
        "v_proj.kernel",
        "g_proj.kernel",
    ),
    "in_proj_ba.weight": ("b_proj.kernel", "a_proj.kernel"),
}
_QWEN3_NEXT = {
    **_QWEN,
    **_QWEN3_NEXT_PACKED,
}
_QWEN3_5 = {
    **_QWEN,
    "in_proj_qkv.weight": ("q_proj.kernel", "k_proj.kernel", "v_proj.kernel"),
    "in_proj_z.weight": "g_proj.kernel",
    "in_proj_b.weight": "b_proj.kernel",
    "in_proj_a.weight": "a_proj.kernel",
}


def _fla_kda(heads: int) -> list[TensorTable]:
    return [table(_FLA_KDA)]


def _fla_gdn(heads: int) -> list[TensorTable]:
    return [table(_FLA_GDN)]


def _kimi_linear(heads: int) -> list[TensorTable]:
    """As published, as Transformers holds it in memory, and what lies between."""
    tables = []
    for convolution in (_CONVOLUTIONS, _PACKED_CONVOLUTION):
        for prefix in ("", "forget_gate."):
            forget_gate = {
                prefix + name: target for name, target in _KIMI_FORGET_GATE.items()
            }
            tables.append(table({**_KIMI, **convolution, **forget_gate}))
    return tables


def _qwen3_next(heads: int) -> list[TensorTable]:
    return [table(_QWEN3_NEXT, tuple(_QWEN3_NEXT_PACKED), heads)]


def _qwen3_5(heads: int) -> list[TensorTable]:
    return [table(_QWEN3_5)]


FAMILIES: dict[Family, FamilyNames] = {
    "fla_kda": FamilyNames(KimiDeltaAttention, "attn", _fla_kda),
    "fla_gdn": FamilyNames(GatedDeltaNet, "attn", _fla_gdn),
    "kimi_linear": FamilyNames(KimiDeltaAttention, "self_attn", _kimi_linear),
    "qwen3_next": FamilyNames(GatedDeltaNet, "linear_attn", _qwen3_next),
    "qwen3_5": FamilyNames(GatedDeltaNet, "linear_attn", _qwen3_5),
}

# Of a SwiGLU.
MLP: NameMap = {f"{x}_proj.weight": f"{x}_proj.kernel" for x in ("gate", "up", "down")}
# Of softmax attention.
ATTENTION: NameMap = {f"{x}_proj.weight": f"{x}_proj.kernel" for x in "qkvo"}
_FLA_BLOCK = {
    "attn_norm.weight": "mixer_norm.scale",
    "mlp_norm.weight": "mlp_norm.scale",
}


def fla_model(
    op: str, num_layers: int, attention_layers: tuple[int, ...]
) -> TensorTable:
    """A whole language model of Flash Linear Attention."""
    delta_rule = _FLA_KDA if op == "kda" else _FLA_GDN
    tensors = table(
        {
            "model.embeddings.weight": "embed.embedding",
            "model.norm.weight": "norm.scale",
            "lm_head.weight": "head.kernel",
        }
    )
    for layer in range(num_layers):
        mixer = ATTENTION if layer in attention_layers else delta_rule
        block = [
            *table(_FLA_BLOCK),
            *nested(table(mixer), "attn.", "mixer."),
            *nested(table(MLP), "mlp.", "mlp."),
        ]
        tensors += nested(block, f"model.layers.{layer}.", f"blocks.{layer}.")
    return tensors
