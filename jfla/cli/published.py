"""A published model's folder as the commands read it, and a table of what was chosen and why."""

import collections
import dataclasses
import pathlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from rich.table import Table

from jfla.cli import info
from jfla.cli.refused import Refused
from jfla.nn import DeltaLMConfig, ModelConfig, hf_config
from jfla.nn.models.config import AttentionSpec, GDNSpec, KDASpec, LatentSpec
from jfla.nn.weights.safetensors_io import read_json
from jfla.types import Implementation

_NAMES = {
    KDASpec: "KDA",
    GDNSpec: "GDN",
    AttentionSpec: "attention",
    LatentSpec: "latent attention",
}
_SAMPLING = ("temperature", "top_k", "top_p")

Config = ModelConfig | DeltaLMConfig


class Call(NamedTuple):
    """A call of the op that a command will make.

    **Fields:** `form`, "chunk" or "recurrent"; its rows and tokens; `packed`: with segment ids, and
    no state comes out.
    """

    form: str
    batch: int
    time: int
    packed: bool = False


class Plan:
    """What was chosen, and why: the rows of a table."""

    def __init__(self):
        self.rows: list[tuple[str, str, str]] = []

    def add(self, what: str, chosen: object, why: str) -> None:
        """Another row."""
        self.rows.append((what, str(chosen), why))

    def table(self) -> Table:
        """The table."""
        table = info.table("What runs, and why", "what", "chosen", "why")
        for row in self.rows:
            table.add_row(*row)
        return table

    def add_model(self, folder: pathlib.Path, config: Config) -> None:
        """The family and the kinds of layers."""
        kinds = collections.Counter(
            _NAMES[type(layer.mixer)] for layer in config.layers
        )
        layers = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        settings = read_object(folder / "config.json")
        self.add("model", settings["model_type"], f"config.json: layers {layers}")

    def add_dtype(self, wanted: str | None, config: Config) -> Any:
        """The dtype of the computation, which is returned."""
        published = jnp.dtype(config.param_dtype)
        if wanted is not None:
            dtype = jnp.dtype(wanted)
            why = "--dtype"
        elif jax.default_backend() == "cpu" and published.itemsize < 4:
            dtype = jnp.dtype(jnp.float32)
            why = f"CPUs are faster in it than in {published.name}, as published"
        else:
            dtype = published
            why = "as published"
        self.add("dtype", dtype.name, why)
        return dtype

    def add_ops(self, config: Config, calls: list[Call]) -> None:
        """The implementation of every op of the model.

        **Raises:** `Refused` where the one that was asked for by name cannot take a call.
        """
        mixers = (layer.mixer for layer in config.layers)
        for mixer in dict.fromkeys(mixers):
            if not isinstance(mixer, GDNSpec):
                continue
            for call in calls:
                choice = explain(call, mixer, config.dtype, config.implementation)
                size = f"B = {call.batch}, T = {call.time}"
                self.add(
                    f"{choice.name}, {size}", choice.implementation, info.reason(choice)
                )


def explain(
    call: Call, mixer: GDNSpec, dtype: DTypeLike, implementation: Implementation | None
) -> Any:
    """The choice of an implementation for a layer's call."""
    name = f"{call.form}_{_NAMES[type(mixer)].lower()}"
    try:
        return info.explain(
            name, call.batch, call.time, mixer, dtype, call.packed, implementation
        )
    except NotImplementedError as error:
        raise Refused("implementation", str(error)) from None


def read_config(folder: pathlib.Path, **changes: Any) -> Config:
    """The folder's configuration with some fields changed."""
    if not folder.is_dir():
        raise ValueError(
            f"{folder} must be a folder with config.json and .safetensors files"
        )
    return dataclasses.replace(hf_config(folder), **changes)


def stop_tokens(folder: pathlib.Path, vocab_size: int) -> tuple[tuple[int, ...], str]:
    """The tokens that end a text, and the file that says so."""
    for name in ("generation_config.json", "config.json"):
        settings = read_object(folder / name)
        for part in (settings, settings.get("text_config") or {}):
            found = part.get("eos_token_id")
            if found is None:
                continue
            tokens = found if isinstance(found, list) else [found]
            if not all(
                type(token) is int and 0 <= token < vocab_size for token in tokens
            ):
                raise ValueError(
                    f"eos_token_id of {folder / name} must be tokens in 0 .. {vocab_size - 1}, "
                    f"got {found!r}"
                )
            return tuple(tokens), f"eos_token_id of {name}"
    return (), "no eos_token_id in config.json"


def sampling_defaults(folder: pathlib.Path) -> dict[str, Any]:
    """Temperature, top_k and top_p that the authors recommend; none where they name none."""
    settings = read_object(folder / "generation_config.json")
    if not settings.get("do_sample", False):
        return {}
    found = {
        name: settings[name] for name in _SAMPLING if settings.get(name) is not None
    }
    for name, value in found.items():
        kinds = (int,) if name == "top_k" else (int, float)
        if type(value) not in kinds:
            path = folder / "generation_config.json"
            raise ValueError(f"{name} of {path} must be a number, got {value!r}")
    if found.get("top_k") == 0:  # how Transformers says none
        del found["top_k"]
    return found


def read_object(path: pathlib.Path) -> dict[str, Any]:
    """A JSON object; an empty one where there is no such file."""
    return read_json(path) if path.exists() else {}
