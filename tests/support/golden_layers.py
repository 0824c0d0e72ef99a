"""The layers of the layer goldens, with their weights put through a safetensors file and the loader."""

import pathlib
from typing import Any

import numpy as np
from flax import nnx
from safetensors.numpy import save_file

import jfla.nn
from support import goldens

FAMILIES = ("fla_gdn", "fla_kda", "kimi_linear", "qwen3_5", "qwen3_next")
KDA = ("fla_kda", "kimi_linear")


def weights(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {
        name.removeprefix("param/"): x
        for name, x in arrays.items()
        if name.startswith("param/")
    }


def make(
    family: str, config: dict[str, Any], seed: int = 0
) -> jfla.nn.KimiDeltaAttention | jfla.nn.GatedDeltaNet:
    """A layer of the configuration of a golden, freshly initialised."""
    sizes = config["hidden_size"], config["H"], config["K"]
    options = {
        "num_value_heads": config["HV"],
        "value_head_dim": config["V"],
        "norm_eps": config["norm_eps"],
    }
    if family not in KDA:
        return jfla.nn.GatedDeltaNet(*sizes, **options, rngs=nnx.Rngs(seed))
    return jfla.nn.KimiDeltaAttention(
        *sizes, **options, output_gate_bias=family == "fla_kda", rngs=nnx.Rngs(seed)
    )


def write(
    tensors: dict[str, np.ndarray], path: pathlib.Path, prefix: str = ""
) -> pathlib.Path:
    save_file(
        {prefix + name: np.ascontiguousarray(x) for name, x in tensors.items()}, path
    )
    return path


def load(family: str, folder: pathlib.Path):
    """(layer, arrays, options) of a family's golden."""
    arrays, options = goldens.load(f"layer_{family}.npz")
    path = write(weights(arrays), folder / "model.safetensors")
    return (
        jfla.nn.load_mixer(make(family, options["config"]), path, family),
        arrays,
        options,
    )
