"""Whole published models: their configuration, their weights from a folder and back into one."""

import contextlib
import dataclasses
import json
import math
import os
import pathlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from flax import nnx

from jfla.nn.families import FAMILIES, family_of, read_config
from jfla.nn.models.config import ModelConfig
from jfla.nn.models.delta_lm import DeltaLM, DeltaLMConfig
from jfla.nn.weights.fill import Progress, collect, existing, fill
from jfla.nn.weights.fla_config import FLA_MODEL_TYPES, read_fla
from jfla.nn.weights.load import model_table, save_fla
from jfla.nn.weights.safetensors_io import (
    INDEX,
    SINGLE,
    Checkpoint,
    Path,
    config_file,
    import_safetensors,
    open_checkpoint,
    read_json,
)
from jfla.nn.weights.torch_layouts import StoredTensor, parameters_of

_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_SHARD_BYTES = 4 * 2**30


def hf_config(source: Path | Mapping[str, Any]) -> ModelConfig | DeltaLMConfig:
    """The configuration of a published model.

    Takes Qwen3.5 (dense), Qwen3-Next, OLMo-Hybrid, Kimi-Linear, and the models of Flash Linear
    Attention, KDAForCausalLM and GatedDeltaNetForCausalLM.

    **Arguments:** `source`, a `config.json`, its folder, a file beside it, or its settings.

    **Returns:** a `ModelConfig` in the dtype that the settings name, or a `DeltaLMConfig` for Flash
    Linear Attention's model types. `dataclasses.replace` changes its `dtype`, `param_dtype`,
    `implementation` and `remat`.

    **Raises:** `ValueError` listing every setting that is missing, of the wrong kind, or has no
    layer here; `FileNotFoundError`.

    >>> import jfla.nn
    >>> config = jfla.nn.hf_config({"model_type": "kda", "vocab_size": 8, "hidden_size": 32,
    ...                             "num_hidden_layers": 1, "num_heads": 2, "head_dim": 16})
    >>> print(config.num_layers, config.layers[0].mixer.num_heads)
    1 2
    """
    if isinstance(source, Mapping):
        values = dict(source)
        text = json.dumps(values, indent=2) + "\n"
        where = "the settings"
    else:
        path = pathlib.Path(source)
        file = (
            path if path.suffix == ".json" and path.name != INDEX else config_file(path)
        )
        values = read_json(file)
        text = file.read_text(encoding="utf-8")
        where = str(file)
    model_type = values.get("model_type")
    if model_type in FLA_MODEL_TYPES.values():
        return read_fla(values, where)
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        known = ", ".join([*FLA_MODEL_TYPES.values(), *FAMILIES])
        raise ValueError(
            f"model_type must be one of {known}, got {model_type!r} in {where}"
        )
    return read_config(values, text, where)


def from_config(
    source: Path | Mapping[str, Any] | ModelConfig, *, rngs: nnx.Rngs
) -> DeltaLM:
    """A published model's architecture with fresh weights.

    **Arguments:** `source` as in `hf_config`, or a configuration; `rngs`, of the initial weights.

    **Raises:** as `hf_config`.

    >>> import jax, jfla.nn
    >>> from flax import nnx
    >>> settings = {"model_type": "gated_deltanet", "num_hidden_layers": 1, "num_heads": 2}
    >>> settings |= {"vocab_size": 16, "hidden_size": 32, "head_dim": 16}
    >>> model = jfla.nn.from_config(settings, rngs=nnx.Rngs(0))
    >>> print(model(jax.numpy.array([[1, 2, 3]])).shape)
    (1, 3, 16)
    """
    known = isinstance(source, ModelConfig | DeltaLMConfig)
    return DeltaLM(source if known else hf_config(source), rngs=rngs)


def load_hf(
    path: Path,
    config: ModelConfig | DeltaLMConfig | None = None,
    *,
    progress: bool | None = None,
) -> DeltaLM:
    """A published language model, with its weights, as a `DeltaLM`.

    Takes the families of `hf_config`. One tensor after another is read and goes, in its dtype, to
    where the mesh puts it (see `DeltaLM`): the model is never whole in the host's memory. Tensors
    beyond the text model (vision towers, heads that predict several tokens) are left alone.

    **Arguments:**

    - `path`: a folder with `config.json` and `model.safetensors`, or shards and their index.
    - `config`: read from the `config.json` unless given. Give it to choose dtypes or the
      implementation: `dataclasses.replace(hf_config(path), dtype=jax.numpy.float32)`. Where
      `param_dtype` is that of `config.json`, tensors stored in float32 stay float32.
    - `progress`: whether a bar is shown; by default on a terminal, where rich is installed.

    **Raises:** `ValueError` listing every tensor that is missing, extra, misshapen, of another
    dtype or not finite, everything in `config.json` that no layer here does, for damaged files,
    pickles, and an index that leads out of the folder; `FileNotFoundError`; `ImportError` without
    safetensors.

    >>> import jfla.nn, tempfile
    >>> from flax import nnx
    >>> sizes = {"vocab_size": 16, "hidden_size": 32, "num_layers": 1}
    >>> config = jfla.nn.DeltaLMConfig(**sizes, num_heads=2, head_dim=16, op="gdn")
    >>> model = jfla.nn.DeltaLM(config, rngs=nnx.Rngs(0))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     jfla.nn.save_hf(model, folder)
    ...     same = jfla.nn.load_hf(folder)
    >>> bool((same.head.kernel[...] == model.head.kernel[...]).all())
    True
    """
    with open_checkpoint(path) as checkpoint:
        config = hf_config(path) if config is None else config
        if config.num_layers > len(checkpoint.shapes):
            raise ValueError(
                f"{checkpoint.path} must hold {config.num_layers} layers, "
                f"got {len(checkpoint.shapes)} tensors"
            )
        model = nnx.eval_shape(lambda: DeltaLM(config, rngs=nnx.Rngs(0)))
        with _bar(checkpoint.num_bytes(), progress) as advance:
            if isinstance(config, DeltaLMConfig):
                fill(model, checkpoint, [model_table(config)], progress=advance)
            else:
                _fill_published(model, config, checkpoint, advance)
    return model


def _fill_published(
    model: DeltaLM, config: ModelConfig, checkpoint: Checkpoint, progress: Progress
) -> None:
    family = family_of(config)
    stored = hf_config(json.loads(config.published)).param_dtype
    tensors = fill(
        model,
        checkpoint,
        family.tables(config),
        ignored=family.ignored,
        keep_float32=np.dtype(config.param_dtype) == stored,
        progress=progress,
    )
    others = []
    for tensor in tensors:
        for name in tensor.names:
            dtype = _DTYPES[checkpoint.dtypes[name]]
            if dtype != stored:
                others.append((name, dtype))
    model.config = dataclasses.replace(config, stored_dtypes=tuple(others))


def save_hf(
    model: DeltaLM,
    path: Path,
    *,
    rounded: bool = False,
    shard_bytes: int = _SHARD_BYTES,
) -> None:
    """Writes a model in the format that it was published in: `config.json` and weights.

    What was loaded and not changed is written bit for bit: a parameter goes back to the dtype of
    its tensor where that rounds nothing, and keeps its own where it would. A model of a
    `DeltaLMConfig` is written as `save_fla` does.

    **Arguments:** `model`, of `load_hf`, `from_config` or a `DeltaLMConfig`; `path`, a folder, made
    if need be; `rounded`: what was trained in a wider dtype goes back to that of its tensor, too
    (for a `ModelConfig`); `shard_bytes`, above which weights are divided into several files and their index.

    **Raises:** `ValueError` for a `ModelConfig` made by hand; `ImportError` without safetensors.

    >>> import jfla.nn, pathlib, tempfile
    >>> from flax import nnx
    >>> sizes = {"vocab_size": 16, "hidden_size": 32, "num_layers": 1}
    >>> config = jfla.nn.DeltaLMConfig(**sizes, num_heads=2, head_dim=16)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     jfla.nn.save_hf(jfla.nn.DeltaLM(config, rngs=nnx.Rngs(0)), folder)
    ...     print(sorted(file.name for file in pathlib.Path(folder).iterdir()))
    ['config.json', 'model.safetensors']
    """
    config = model.config
    if isinstance(config, DeltaLMConfig):
        save_fla(model, path)
        return
    table = family_of(config).tables(config)[0]
    save_file = import_safetensors("safetensors.numpy").save_file
    folder = pathlib.Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    shards = _shards(model, table, shard_bytes)
    names = [SINGLE]
    if len(shards) > 1:
        count = len(shards)
        names = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    weight_map = {}
    total = 0
    for shard, file in zip(shards, names, strict=True):
        tensors = dict(_as_stored(model, shard, config, rounded))
        weight_map |= dict.fromkeys(tensors, file)
        total += sum(x.nbytes for x in tensors.values())
        # Whoever reads the old file, as this model's own checkpoint, keeps it until then.
        save_file(tensors, folder / f"{file}.part", metadata={"format": "pt"})
        os.replace(folder / f"{file}.part", folder / file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    if len(shards) > 1:
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    # Left over from another save, it would be read in the place of this.
    (folder / (SINGLE if len(shards) > 1 else INDEX)).unlink(missing_ok=True)
    (folder / "config.json").write_text(config.published, encoding="utf-8")


def _shards(
    model: DeltaLM, table: list[StoredTensor], shard_bytes: int
) -> list[list[StoredTensor]]:
    """The tensors divided so that none but a single one takes up more."""
    parameters = parameters_of(model)
    shards: list[list[StoredTensor]] = [[]]
    size = 0
    for tensor in existing(table, parameters):
        arrays = [parameters[name].parameter[...] for name in tensor.parameters]
        own = sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays)
        if shards[-1] and size + own > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += own
    return shards


def _as_stored(
    model: DeltaLM, table: list[StoredTensor], config: ModelConfig, rounded: bool
) -> Iterator[tuple[str, np.ndarray]]:
    """Tensors in the dtype of the checkpoint, or in their own where none is to be rounded to it."""
    usual = np.dtype(hf_config(json.loads(config.published)).param_dtype)
    others = dict(config.stored_dtypes)
    for name, x in collect(model, table):
        dtype = np.dtype(others.get(name, usual))
        stored = x.astype(dtype)
        exact = rounded or np.array_equal(stored.astype(x.dtype), x)
        yield name, stored if exact else x


@contextlib.contextmanager
def _bar(total: int, shown: bool | None) -> Iterator[Progress]:
    """A progress bar of bytes, where it is wanted and there is rich to show it."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn
    except ImportError:
        yield int
        return
    if shown is None:
        shown = sys.stderr.isatty()
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not shown) as bar:
        task = bar.add_task("loading weights", total=total)
        yield lambda size: bar.advance(task, size)
