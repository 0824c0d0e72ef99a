"""What each family of checkpoints calls the parameters of a delta-rule layer."""

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

from jfla.nn.layouts import Tensor
from jfla.nn.mixer import GatedDeltaNet, KimiDeltaAttention

Family = Literal["fla_kda", "fla_gdn", "kimi_linear", "qwen3_next", "qwen3_5"]
Table = list[Tensor]


class Names(NamedTuple):
    """The layer a family fills, the module that holds it in a decoder layer, and its tables: one of them applies."""

    layer: type[KimiDeltaAttention] | type[GatedDeltaNet]
    holder: str
    tables: Callable[[int], list[Table]]  # by the number of key heads


def _table(names: Mapping[str, str | tuple[str, ...]], grouped: tuple[str, ...] = (), heads: int = 1) -> Table:
    return [
        Tensor(name, (to,) if isinstance(to, str) else to, heads if name in grouped else 1)
        for name, to in names.items()
    ]


_QKV = {f"{x}_proj.weight": f"{x}_proj.kernel" for x in "qkv"}
_CONVOLUTIONS = {f"{x}_conv1d.weight": f"{x}_conv.kernel" for x in "qkv"}
_PACKED_CONVOLUTION = {"conv1d.weight": ("q_conv.kernel", "k_conv.kernel", "v_conv.kernel")}
_GATE = {"A_log": "a_log", "dt_bias": "dt_bias"}
_OUT = {"o_norm.weight": "o_norm.scale", "o_proj.weight": "o_proj.kernel"}

_FLA = {**_GATE, **_QKV, **_CONVOLUTIONS, "b_proj.weight": "b_proj.kernel", **_OUT}
_FLA_GDN = {**_FLA, "a_proj.weight": "a_proj.kernel", "g_proj.weight": "g_proj.kernel"}
_FLA_KDA = {
    **_FLA,
    "f_proj.0.weight": "f_a_proj.kernel",
    "f_proj.1.weight": "f_b_proj.kernel",
    "g_proj.0.weight": "g_a_proj.kernel",
    "g_proj.1.weight": "g_b_proj.kernel",
    "g_proj.1.bias": "g_b_proj.bias",
}

_QWEN = {**_GATE, **_PACKED_CONVOLUTION, "norm.weight": "o_norm.scale", "out_proj.weight": "o_proj.kernel"}
_QWEN3_NEXT = {
    **_QWEN,
    "in_proj_qkvz.weight": ("q_proj.kernel", "k_proj.kernel", "v_proj.kernel", "g_proj.kernel"),
    "in_proj_ba.weight": ("b_proj.kernel", "a_proj.kernel"),
}
_QWEN3_5 = {
    **_QWEN,
    "in_proj_qkv.weight": ("q_proj.kernel", "k_proj.kernel", "v_proj.kernel"),
    "in_proj_z.weight": "g_proj.kernel",
    "in_proj_b.weight": "b_proj.kernel",
    "in_proj_a.weight": "a_proj.kernel",
}


def _kimi_linear(heads: int) -> list[Table]:
    """As published, as Transformers holds it in memory, and what lies between."""
    shared = {
        **_QKV, **_OUT, "b_proj.weight": "b_proj.kernel",
        "g_a_proj.weight": "g_a_proj.kernel", "g_b_proj.weight": "g_b_proj.kernel",
    }  # fmt: skip
    forget = {**_GATE, "f_a_proj.weight": "f_a_proj.kernel", "f_b_proj.weight": "f_b_proj.kernel"}
    return [
        _table({**shared, **convolution, **{inside + name: to for name, to in forget.items()}})
        for convolution in (_CONVOLUTIONS, _PACKED_CONVOLUTION)
        for inside in ("", "forget_gate.")
    ]


FAMILIES: dict[Family, Names] = {
    "fla_kda": Names(KimiDeltaAttention, "attn", lambda heads: [_table(_FLA_KDA)]),
    "fla_gdn": Names(GatedDeltaNet, "attn", lambda heads: [_table(_FLA_GDN)]),
    "kimi_linear": Names(KimiDeltaAttention, "self_attn", _kimi_linear),
    "qwen3_next": Names(
        GatedDeltaNet,
        "linear_attn",
        lambda heads: [_table(_QWEN3_NEXT, ("in_proj_qkvz.weight", "in_proj_ba.weight"), heads)],
    ),
    "qwen3_5": Names(GatedDeltaNet, "linear_attn", lambda heads: [_table(_QWEN3_5)]),
}

_BLOCK = {
    "attn_norm.weight": "mixer_norm.scale",
    "mlp_norm.weight": "mlp_norm.scale",
    **{f"mlp.{name}_proj.weight": f"mlp.{name}_proj.kernel" for name in ("gate", "up", "down")},
}
_ATTENTION = {f"{x}_proj.weight": f"{x}_proj.kernel" for x in "qkvo"}


def fla_model(op: str, num_layers: int, attention_layers: tuple[int, ...]) -> Table:
    """A whole language model of Flash Linear Attention."""
    mixer = _FLA_KDA if op == "kda" else _FLA_GDN
    names = {
        "model.embeddings.weight": "embed.embedding",
        "model.norm.weight": "norm.scale",
        "lm_head.weight": "head.kernel",
    }
    for layer in range(num_layers):
        own = _ATTENTION if layer in attention_layers else mixer
        block = _BLOCK | {f"attn.{name}": f"mixer.{to}" for name, to in own.items()}
        names |= {f"model.layers.{layer}.{name}": f"blocks.{layer}.{to}" for name, to in block.items()}
    return _table(names)
