"""Published models: for each family its settings, its layers, and the names of its tensors."""

from collections.abc import Callable
from typing import Any, NamedTuple

from jfla.nn.families import kimi_linear, olmo_hybrid, qwen3_5, qwen3_next
from jfla.nn.families.settings import Settings
from jfla.nn.models.config import ModelConfig
from jfla.nn.weights.torch_layouts import TensorTable


class Family(NamedTuple):
    """How to read a family.

    **Fields:** `config`, settings to the fields of a `ModelConfig`; `tables`, one of which names
    every tensor of such a model; `ignored`, the beginnings of the names of all other tensors that
    its checkpoints have.
    """

    config: Callable[[Settings], dict[str, Any]]
    tables: Callable[[ModelConfig], list[TensorTable]]
    ignored: tuple[str, ...] = ()


_MODULES = (qwen3_5, qwen3_next, olmo_hybrid, kimi_linear)

FAMILIES: dict[str, Family] = {}
for _module in _MODULES:
    for _model_type in _module.MODEL_TYPES:
        FAMILIES[_model_type] = Family(_module.config, _module.tables, _module.IGNORED)


def read_config(values: dict[str, Any], text: str, where: str) -> ModelConfig:
    """The configuration that the settings of one of `FAMILIES` describe, as values and as text."""
    settings = Settings(values, where)
    fields = FAMILIES[values["model_type"]].config(settings)
    settings.check()
    return ModelConfig(**fields, dtype=fields["param_dtype"], published=text)


def family_of(config: ModelConfig) -> Family:
    """The family whose settings a configuration was read from."""
    return FAMILIES[config.model_type]
