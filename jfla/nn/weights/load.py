"""Published weights into layers, and layers and models into Flash Linear Attention's format."""

import json
import pathlib
import re

import numpy as np
from flax import nnx

from jfla.nn.layers.gdn import GatedDeltaNet
from jfla.nn.layers.kda import KimiDeltaAttention
from jfla.nn.models.delta_lm import DeltaLM, DeltaLMConfig
from jfla.nn.weights.fill import collect, fill
from jfla.nn.weights.fla_config import to_fla
from jfla.nn.weights.name_maps import FAMILIES, Family, fla_model
from jfla.nn.weights.safetensors_io import (
    Checkpoint,
    Path,
    import_safetensors,
    open_checkpoint,
)
from jfla.nn.weights.torch_layouts import TensorTable


def load_mixer[Mixer: (KimiDeltaAttention, GatedDeltaNet)](
    mixer: Mixer,
    path: Path,
    family: Family,
    *,
    prefix: str = "",
    layer: int | None = None,
) -> Mixer:
    """Fills a layer, in place, with the weights of one layer of a checkpoint.

    **Arguments:**

    - `mixer`: a `KimiDeltaAttention` ("fla_kda", "kimi_linear") or a `GatedDeltaNet` ("fla_gdn",
      "qwen3_next", "qwen3_5") of the layer's sizes, with its `norm_eps`.
    - `path`: a `.safetensors` file, an index, or a directory that holds `model.safetensors` or its
      index.
    - `family`: whose names the tensors have.
    - `prefix`: what stands before them, such as "model.layers.3.linear_attn."; or `layer`: the
      number of the decoder layer, which finds the prefix. Everything else in the checkpoint is left
      alone.

    **Returns:** `mixer`, its parameters in their own dtype and on their own devices.

    **Raises:** `ValueError` listing every missing, extra and misshapen tensor under the prefix (the
    layer is then untouched), for a family that is not the layer's, and for pickles;
    `FileNotFoundError`; `ImportError` without safetensors.

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
        wanted = names.layer.__name__
        got = type(mixer).__name__
        raise ValueError(f"mixer must be a {wanted} for {family=}, got {got}")
    with open_checkpoint(path) as checkpoint:
        if layer is not None:
            prefix = _prefix_of(checkpoint, layer, names.holder)
        fill(mixer, checkpoint, names.tables(mixer.num_heads), prefix)
    return mixer


def save_fla(module: KimiDeltaAttention | GatedDeltaNet | DeltaLM, path: Path) -> None:
    """Writes `model.safetensors` into the directory `path`, under Flash Linear Attention's names.

    A `DeltaLM` gets its `config.json` beside it. `load_hf` and `load_mixer` read both back.

    **Raises:** `ImportError` without safetensors.

    >>> import jfla.nn, pathlib, tempfile
    >>> from flax import nnx
    >>> layer = jfla.nn.KimiDeltaAttention(32, num_heads=2, head_dim=16, rngs=nnx.Rngs(0))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     jfla.nn.save_fla(layer, folder)
    ...     print([path.name for path in pathlib.Path(folder).iterdir()])
    ['model.safetensors']
    """
    if isinstance(module, DeltaLM):
        if not isinstance(module.config, DeltaLMConfig):
            raise ValueError(
                "module must be made of a DeltaLMConfig: save_hf writes all others"
            )
        tensors = dict(collect(module, model_table(module.config)))
        for number, block in enumerate(module.blocks):
            _add_output_gate_bias(tensors, f"model.layers.{number}.attn.", block.mixer)
    else:
        family = "fla_kda" if isinstance(module, KimiDeltaAttention) else "fla_gdn"
        (table,) = FAMILIES[family].tables(module.num_heads)
        tensors = dict(collect(module, table))
        _add_output_gate_bias(tensors, "", module)
    folder = pathlib.Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    save_file = import_safetensors("safetensors.numpy").save_file
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    if isinstance(module, DeltaLM) and isinstance(module.config, DeltaLMConfig):
        settings = json.dumps(to_fla(module.config), indent=2)
        (folder / "config.json").write_text(settings + "\n")


def model_table(config: DeltaLMConfig) -> TensorTable:
    """The tensors of a model in Flash Linear Attention's format."""
    return fla_model(config.op, config.num_layers, config.attention_layers)


def _add_output_gate_bias(
    tensors: dict[str, np.ndarray], prefix: str, mixer: nnx.Module
) -> None:
    """Zeros for a layer without that bias: Flash Linear Attention's layer always has it."""
    if isinstance(mixer, KimiDeltaAttention) and mixer.g_b_proj.bias is None:
        weight = tensors[f"{prefix}g_proj.1.weight"]
        tensors[f"{prefix}g_proj.1.bias"] = np.zeros(weight.shape[0], weight.dtype)


def _prefix_of(checkpoint: Checkpoint, layer: int, holder: str) -> str:
    """What stands before the names of the tensors of a decoder layer's mixer."""
    pattern = re.compile(rf"((?:.*\.)?layers\.{layer}\.{holder}\.)")
    found = set()
    for name in checkpoint.shapes:
        match = pattern.match(name)
        if match:
            found.add(match[1])
    if len(found) != 1:
        got = sorted(found) or "none"
        raise ValueError(
            f"layer={layer} must have one {holder} in {checkpoint.path}, got {got}"
        )
    (prefix,) = found
    return prefix
