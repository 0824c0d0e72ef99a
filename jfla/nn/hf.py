"""Published weights into and out of the layers: `load_mixer` for one layer, `load_hf` and `save_fla` for a model."""

import json
import os
import pathlib
import re
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jfla.nn.checkpoint import Checkpoint, import_safetensors, open_checkpoint
from jfla.nn.families import FAMILIES, Family, fla_model
from jfla.nn.layouts import collect, fill
from jfla.nn.mixer import GatedDeltaNet, KimiDeltaAttention
from jfla.nn.model import DeltaLM, DeltaLMConfig

Path = str | os.PathLike[str]

_ARCHITECTURES = {
    "kda": ("kda", "KDAForCausalLM"),
    "gdn": ("gated_deltanet", "GatedDeltaNetForCausalLM"),
}
# What Flash Linear Attention can be configured to do and DeltaLM cannot, with the only value that DeltaLM takes.
_FIXED = {
    "use_short_conv": (True,), "use_gate": (True,), "hidden_act": ("swish", "silu"), "attnres_block_size": (None,),
    "output_gate_activation": ("swish", "silu"), "attn.qkv_bias": (False,), "attn.qk_norm": (False,),
    "attn.window_size": (None,),
}  # fmt: skip


def load_mixer[Mixer: (KimiDeltaAttention, GatedDeltaNet)](
    mixer: Mixer, path: Path, family: Family, *, prefix: str = "", layer: int | None = None
) -> Mixer:
    """Fills a layer, in place, with the weights of one layer of a checkpoint.

    **Arguments:**

    - `mixer`: a `KimiDeltaAttention` ("fla_kda", "kimi_linear") or a `GatedDeltaNet` ("fla_gdn", "qwen3_next",
      "qwen3_5") of the layer's sizes, with its `norm_eps`.
    - `path`: a `.safetensors` file, an index, or a directory that holds `model.safetensors` or its index.
    - `family`: whose names the tensors have.
    - `prefix`: what stands before them, such as "model.layers.3.linear_attn."; or `layer`: the number of the decoder
      layer, which finds the prefix. Everything else in the checkpoint is left alone.

    **Returns:** `mixer`, its parameters in their own dtype and on their own devices.

    **Raises:** `ValueError` listing every missing, extra and misshapen tensor under the prefix (the layer is then
    untouched), for a family that is not the layer's, and for pickles; `FileNotFoundError`; `ImportError` without
    safetensors.

    >>> import jfla.nn, tempfile
    >>> from flax import nnx
    >>> layer = jfla.nn.GatedDeltaNet(32, num_heads=2, head_dim=16, rngs=nnx.Rngs(0))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     jfla.nn.save_fla(layer, folder)
    ...     same = jfla.nn.GatedDeltaNet(32, num_heads=2, head_dim=16, rngs=nnx.Rngs(1))
    ...     same = jfla.nn.load_mixer(same, folder, "fla_gdn")
    >>> bool((same.a_log[...] == layer.a_log[...]).all())
    True
    """
    if family not in FAMILIES:
        raise ValueError(f"family must be one of {', '.join(FAMILIES)}, got {family!r}")
    names = FAMILIES[family]
    if not isinstance(mixer, names.layer):
        raise ValueError(f"mixer must be a {names.layer.__name__} for {family=}, got {type(mixer).__name__}")
    with open_checkpoint(path) as checkpoint:
        if layer is not None:
            prefix = _prefix_of(checkpoint, layer, names.holder)
        fill(mixer, checkpoint, names.tables(mixer.num_heads), prefix)
    return mixer


def load_hf(path: Path, config: DeltaLMConfig | None = None) -> DeltaLM:
    """A language model of Flash Linear Attention (KDAForCausalLM, GatedDeltaNetForCausalLM) as a `DeltaLM`.

    **Arguments:** `path` as in `load_mixer`; `config`, read from the `config.json` beside the weights unless given
    (give it to choose dtypes or the implementation: `dataclasses.replace(fla_config(path), ...)`).

    **Raises:** as `load_mixer`; also a `ValueError` listing everything in `config.json` that DeltaLM has no part for.

    >>> import jfla.nn, tempfile
    >>> from flax import nnx
    >>> config = jfla.nn.DeltaLMConfig(vocab_size=16, hidden_size=32, num_layers=1, num_heads=2, head_dim=16, op="gdn")
    >>> model = jfla.nn.DeltaLM(config, rngs=nnx.Rngs(0))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     jfla.nn.save_fla(model, folder)
    ...     same = jfla.nn.load_hf(folder)
    >>> bool((same.head.kernel[...] == model.head.kernel[...]).all())
    True
    """
    with open_checkpoint(path) as checkpoint:
        config = fla_config(path) if config is None else config
        model = DeltaLM(config, rngs=nnx.Rngs(0))
        fill(model, checkpoint, [fla_model(config.op, config.num_layers, config.attention_layers)], "")
    return model


def save_fla(module: KimiDeltaAttention | GatedDeltaNet | DeltaLM, path: Path) -> None:
    """Writes `model.safetensors` into the directory `path`, under the names of Flash Linear Attention.

    A `DeltaLM` gets its `config.json` beside it. `load_hf` and `load_mixer` read both back.

    >>> import jfla.nn, pathlib, tempfile
    >>> from flax import nnx
    >>> layer = jfla.nn.KimiDeltaAttention(32, num_heads=2, head_dim=16, rngs=nnx.Rngs(0))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     jfla.nn.save_fla(layer, folder)
    ...     print([path.name for path in pathlib.Path(folder).iterdir()])
    ['model.safetensors']
    """
    if isinstance(module, DeltaLM):
        config = module.config
        tensors = collect(module, fla_model(config.op, config.num_layers, config.attention_layers))
        blocks = enumerate(module.blocks)
        mixers: dict[str, Any] = {f"model.layers.{i}.attn.": block.mixer for i, block in blocks}
    else:
        family = "fla_kda" if isinstance(module, KimiDeltaAttention) else "fla_gdn"
        tensors, mixers = collect(module, FAMILIES[family].tables(1)[0]), {"": module}
    for prefix, mixer in mixers.items():
        if isinstance(mixer, KimiDeltaAttention) and mixer.g_b_proj.bias is None:
            weight = tensors[f"{prefix}g_proj.1.weight"]
            tensors[f"{prefix}g_proj.1.bias"] = np.zeros(weight.shape[0], weight.dtype)
    folder = pathlib.Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    save_file = import_safetensors("safetensors.numpy").save_file
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    if isinstance(module, DeltaLM):
        (folder / "config.json").write_text(json.dumps(_to_fla(module.config), indent=2) + "\n")


def fla_config(path: Path) -> DeltaLMConfig:
    """The configuration that the `config.json` in (or beside) `path` describes. See `load_hf`.

    >>> import json, jfla.nn, pathlib, tempfile
    >>> settings = {"model_type": "gated_deltanet", "vocab_size": 16, "hidden_size": 32, "num_hidden_layers": 1}
    >>> settings |= {"num_heads": 2, "head_dim": 16, "expand_v": 2.0}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = pathlib.Path(folder, "config.json").write_text(json.dumps(settings))
    ...     config = jfla.nn.fla_config(folder)
    >>> print(config.op, config.value_head_dim)
    gdn 32
    """
    folder = pathlib.Path(path)
    folder = folder if folder.is_dir() else folder.parent
    settings = json.loads((folder / "config.json").read_text())
    op = next((op for op, (kind, _) in _ARCHITECTURES.items() if kind == settings.get("model_type")), None)
    if op is None:
        kinds = ", ".join(kind for kind, _ in _ARCHITECTURES.values())
        raise ValueError(f"model_type must be one of {kinds}, got {settings.get('model_type')!r} in {folder}")
    attention = settings.get("attn") or {}
    flat = settings | {f"attn.{name}": value for name, value in attention.items()}
    unknown = [f"{name}={flat[name]!r}" for name, taken in _FIXED.items() if flat.get(name, taken[0]) not in taken]
    if unknown:
        raise ValueError(f"DeltaLM has no part for these settings of {folder}: {', '.join(unknown)}")

    head_dim, hidden = settings["head_dim"], settings["hidden_size"]
    value_dim = head_dim * settings.get("expand_v", 1.0 if op == "kda" else 2.0)
    # Flash Linear Attention's own rule, which rounds up to 256.
    intermediate = -(-int(hidden * (settings.get("hidden_ratio") or 4) * 2 / 3) // 256) * 256
    kda: Any = {"lower_bound": settings.get("lower_bound"), "output_gate_bias": True} if op == "kda" else {}
    return DeltaLMConfig(
        vocab_size=settings["vocab_size"],
        hidden_size=hidden,
        num_layers=settings["num_hidden_layers"],
        num_heads=settings["num_heads"],
        head_dim=head_dim,
        op=cast(Any, op),
        num_value_heads=settings.get("num_v_heads"),
        value_head_dim=int(value_dim),
        conv_size=settings.get("conv_size", 4),
        allow_neg_eigval=settings.get("allow_neg_eigval", False),
        intermediate_size=settings.get("intermediate_size") or intermediate,
        attention_layers=tuple(attention.get("layers", ())),
        attention_heads=attention.get("num_heads"),
        attention_kv_heads=attention.get("num_kv_heads"),
        rope_theta=attention.get("rope_theta", 10000.0),
        norm_eps=settings.get("norm_eps", 1e-6),
        tie_embeddings=settings.get("tie_word_embeddings", False),
        **kda,
    )


def _to_fla(config: DeltaLMConfig) -> dict[str, Any]:
    kind, architecture = _ARCHITECTURES[config.op]
    settings: dict[str, Any] = {
        "architectures": [architecture], "model_type": kind, "dtype": jnp.dtype(config.param_dtype).name,
        "vocab_size": config.vocab_size, "hidden_size": config.hidden_size, "num_hidden_layers": config.num_layers,
        "num_heads": config.num_heads, "num_v_heads": config.num_value_heads, "head_dim": config.head_dim,
        "expand_v": (config.value_head_dim or config.head_dim) / config.head_dim, "conv_size": config.conv_size,
        "allow_neg_eigval": config.allow_neg_eigval, "intermediate_size": config.intermediate_size,
        "hidden_act": "swish", "use_short_conv": True, "norm_eps": config.norm_eps, "attn": None,
        "tie_word_embeddings": config.tie_embeddings,
    }  # fmt: skip
    settings |= {"use_gate": True} if config.op == "gdn" else {}
    if config.lower_bound is not None:
        settings |= {"lower_bound": config.lower_bound, "safe_gate": True}
    if config.attention_layers:
        heads = config.attention_heads or config.num_heads
        settings["attn"] = {
            "layers": list(config.attention_layers), "num_heads": heads, "qkv_bias": False, "window_size": None,
            "num_kv_heads": config.attention_kv_heads or heads, "rope_theta": config.rope_theta,
        }  # fmt: skip
    return settings


def _prefix_of(checkpoint: Checkpoint, layer: int, holder: str) -> str:
    pattern = re.compile(rf"((?:.*\.)?layers\.{layer}\.{holder}\.)")
    found = sorted({match[1] for name in checkpoint.shapes if (match := pattern.match(name))})
    if len(found) != 1:
        raise ValueError(f"layer={layer} must have one {holder} in {checkpoint.path}, got {found or 'none'}")
    return found[0]
