"""Configurations of Flash Linear Attention's language models as those of a `DeltaLM`, and back."""

from typing import Any, Literal

import jax.numpy as jnp

from jfla.nn.models.delta_lm import DeltaLMConfig
from jfla.nn.weights.safetensors_io import Path, config_file, read_json

FLA_MODEL_TYPES: dict[Literal["kda", "gdn"], str] = {
    "kda": "kda",
    "gdn": "gated_deltanet",
}
_ARCHITECTURES = {
    "kda": "KDAForCausalLM",
    "gdn": "GatedDeltaNetForCausalLM",
}
# What Flash Linear Attention can be configured to do and DeltaLM cannot, with the only values that
# DeltaLM takes.
_FIXED = {
    "use_short_conv": (True,),
    "use_gate": (True,),
    "hidden_act": ("swish", "silu"),
    "attnres_block_size": (None,),
    "output_gate_activation": ("swish", "silu"),
    "attn.qkv_bias": (False,),
    "attn.qk_norm": (False,),
    "attn.window_size": (None,),
}


def fla_config(path: Path) -> DeltaLMConfig:
    """The configuration that the `config.json` in (or beside) `path` describes. See `load_hf`.

    **Raises:** `ValueError` for another `model_type`, or listing every setting that DeltaLM has no
    part for; `FileNotFoundError` without a `config.json`.

    >>> import json, jfla.nn, pathlib, tempfile
    >>> settings = {"model_type": "gated_deltanet", "num_hidden_layers": 1, "num_heads": 2}
    >>> settings |= {"vocab_size": 16, "hidden_size": 32, "head_dim": 16, "expand_v": 2.0}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = pathlib.Path(folder, "config.json").write_text(json.dumps(settings))
    ...     config = jfla.nn.fla_config(folder)
    >>> print(config.op, config.value_head_dim)
    gdn 32
    """
    file = config_file(path)
    return read_fla(read_json(file), file.parent)


def read_fla(settings: dict[str, Any], folder: Path) -> DeltaLMConfig:
    """The configuration that the settings found in `folder` describe."""
    op = _op(settings, folder)
    attention = settings.get("attn") or {}
    _check_fixed(settings, attention, folder)

    hidden_size = settings["hidden_size"]
    head_dim = settings["head_dim"]
    expand_v = settings.get("expand_v", 1.0 if op == "kda" else 2.0)
    # Flash Linear Attention's own rule, which rounds up to 256.
    hidden_ratio = settings.get("hidden_ratio") or 4
    intermediate_size = -(-int(hidden_size * hidden_ratio * 2 / 3) // 256) * 256
    return DeltaLMConfig(
        vocab_size=settings["vocab_size"],
        hidden_size=hidden_size,
        num_layers=settings["num_hidden_layers"],
        num_heads=settings["num_heads"],
        head_dim=head_dim,
        op=op,
        num_value_heads=settings.get("num_v_heads"),
        value_head_dim=int(head_dim * expand_v),
        conv_size=settings.get("conv_size", 4),
        allow_neg_eigval=settings.get("allow_neg_eigval", False),
        lower_bound=settings.get("lower_bound") if op == "kda" else None,
        output_gate_bias=op == "kda",
        intermediate_size=settings.get("intermediate_size") or intermediate_size,
        attention_layers=tuple(attention.get("layers", ())),
        attention_heads=attention.get("num_heads"),
        attention_kv_heads=attention.get("num_kv_heads"),
        rope_theta=attention.get("rope_theta", 10000.0),
        norm_eps=settings.get("norm_eps", 1e-6),
        tie_embeddings=settings.get("tie_word_embeddings", False),
    )


def _op(settings: dict[str, Any], folder: Path) -> Literal["kda", "gdn"]:
    model_type = settings.get("model_type")
    for op, known in FLA_MODEL_TYPES.items():
        if model_type == known:
            return op
    known = ", ".join(FLA_MODEL_TYPES.values())
    raise ValueError(
        f"model_type must be one of {known}, got {model_type!r} in {folder}"
    )


def _check_fixed(
    settings: dict[str, Any], attention: dict[str, Any], folder: Path
) -> None:
    flat = settings | {f"attn.{name}": value for name, value in attention.items()}
    unknown = []
    for name, taken in _FIXED.items():
        if flat.get(name, taken[0]) not in taken:
            unknown.append(f"{name}={flat[name]!r}")
    if unknown:
        raise ValueError(
            f"DeltaLM has no part for these settings of {folder}: {', '.join(unknown)}"
        )


def to_fla(config: DeltaLMConfig) -> dict[str, Any]:
    """What `config.json` says of a `DeltaLM`: the inverse of `fla_config`."""
    settings: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[config.op]],
        "model_type": FLA_MODEL_TYPES[config.op],
        "dtype": jnp.dtype(config.param_dtype).name,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_heads": config.num_heads,
        "num_v_heads": config.num_value_heads,
        "head_dim": config.head_dim,
        "expand_v": (config.value_head_dim or config.head_dim) / config.head_dim,
        "conv_size": config.conv_size,
        "allow_neg_eigval": config.allow_neg_eigval,
        "intermediate_size": config.intermediate_size,
        "hidden_act": "swish",
        "use_short_conv": True,
        "norm_eps": config.norm_eps,
        "attn": None,
        "tie_word_embeddings": config.tie_embeddings,
    }
    if config.op == "gdn":
        settings["use_gate"] = True
    if config.lower_bound is not None:
        settings["lower_bound"] = config.lower_bound
        settings["safe_gate"] = True
    if config.attention_layers:
        heads = config.attention_heads or config.num_heads
        settings["attn"] = {
            "layers": list(config.attention_layers),
            "num_heads": heads,
            "qkv_bias": False,
            "window_size": None,
            "num_kv_heads": config.attention_kv_heads or heads,
            "rope_theta": config.rope_theta,
        }
    return settings
