"""`jfla finetune`: goes on training a published model on documents, and writes it as it was published."""

import dataclasses
import hashlib
import math
import pathlib
import shutil
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from rich.console import Console
from rich.table import Table

from jfla.cli import documents, plot, published, tokenizer
from jfla.cli.cpu import cpu_name
from jfla.cli.data import Batch
from jfla.cli.mesh import layout
from jfla.cli.progress import train
from jfla.cli.run_folder import RESULTS, claim, finished, write_json
from jfla.cli.train import Run, adamw
from jfla.nn import DeltaLM, add_lora, load_hf, merge_lora, save_hf

SAVE_EVERY = 50
_PASSES = 3
_LONGEST = 2048
_STEP_TOKENS = {"cpu": 2048}
_STEP_TOKENS_ELSEWHERE = 16384
_RATES = {True: 1e-5, False: 2e-4}  # by whether all parameters are trained


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The command's options; None leaves a choice to it."""

    model: pathlib.Path
    data: pathlib.Path
    out: pathlib.Path
    full: bool = False
    rank: int = 16
    steps: int | None = None
    rows: int | None = None
    time: int | None = None
    learning_rate: float | None = None
    dtype: str | None = None
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Settings:
    """What decides the numbers of a run, which can be continued only under the same settings."""

    model: str
    data_sha256: str
    rank: int | None
    rows: int
    time: int
    learning_rate: float
    dtype: str
    seed: int


class Prepared(NamedTuple):
    """All but the model: configuration, packed rows, and the numbers of the run."""

    config: published.Config
    rows: list[Batch]
    settings: Settings
    steps: int


def run(options: Options, console: Console) -> dict[str, Any]:
    """Trains until `steps` are done, saves the model in `out`/model, returns and shows the results.

    **Raises:** `ValueError`, `FileNotFoundError` and `ImportError` as `load_hf`, for documents that
    cannot be, and `Refused` for a folder of another run.
    """
    plan = published.Plan()
    prepared = _prepare(options, plan)
    settings = prepared.settings
    claim(options.out, settings)
    results = finished(options.out, prepared.steps)
    if results is not None:
        done = results["steps"]
        console.print(
            f"{options.out} holds a finished run of {done} steps; a larger --steps goes on."
        )
        _show(console, results, options.out)
        return results
    started = time.perf_counter()
    # Rows are divided among devices; every device holds the parameters.
    with layout({"data": _num_devices(settings.rows)}):
        model = load_hf(options.model, prepared.config)
        trained = _trained(model, options, plan)
        console.print(plan.table())
        rate = adamw(
            settings.learning_rate,
            prepared.steps,
            max(1, min(20, prepared.steps // 10)),
        )
        optimizer = nnx.Optimizer(model, rate, wrt=trained)
        training = Run(model, optimizer, prepared.steps, options.out / "checkpoints")
        dataset = documents.batches(prepared.rows, settings.rows, settings.seed)
        try:
            tokens = settings.rows * settings.time
            train(training, dataset, "finetune", tokens, SAVE_EVERY, console)
        finally:
            training.close()
        _save(model, options)
    bits = training.curves["bits"]
    accuracy = training.curves["accuracy"]
    title = f"{options.model.resolve().name}, {training.step} steps"
    plot.draw_finetuning(options.out / "loss.png", title, bits, accuracy)
    results = {
        "steps": training.step,
        "first_bits": bits[0],
        "last_bits": float(plot.smoothed(bits)[-1]),
        "seconds": time.perf_counter() - started,
    }
    write_json(options.out / RESULTS, results)
    _show(console, results, options.out)
    return results


def _prepare(options: Options, plan: published.Plan) -> Prepared:
    """Reads configuration and documents, and chooses what was left open."""
    config = published.read_config(options.model)
    plan.add_model(options.model, config)
    dtype = plan.add_dtype(options.dtype, config)
    reader, name, why = tokenizer.load_tokenizer(options.model)
    plan.add("tokenizer", name, why)
    stop, why = published.stop_tokens(options.model, config.vocab_size)
    plan.add("end of a text", stop[0] if stop else "none", why)
    found = documents.read(options.data, reader, stop, config.vocab_size)
    length = _length(options, found, plan)
    packed = documents.pack(found, length, options.seed)
    rows = _rows(options, len(packed), length, plan)
    steps = options.steps or math.ceil(_PASSES * len(packed) / rows)
    plan.add(
        "steps",
        steps,
        "--steps" if options.steps else f"{_PASSES} passes over the data",
    )
    rate = options.learning_rate or _RATES[options.full]
    kind = "all parameters" if options.full else "LoRA"
    why = "--learning-rate" if options.learning_rate else f"usual for {kind}"
    plan.add("learning rate", rate, f"{why}; AdamW, warmup, cosine decay")
    plan.add("devices", *_devices(rows))
    # Updates below half a unit of a 16-bit parameter would be lost; what is not trained stays.
    parameters = jnp.float32 if options.full else config.param_dtype
    config = dataclasses.replace(
        config, dtype=dtype, param_dtype=parameters, remat=True
    )
    plan.add_ops(config, [published.Call("chunk", rows, length, packed=True)])
    settings = Settings(
        model=str(options.model.resolve()),
        data_sha256=hashlib.sha256(options.data.read_bytes()).hexdigest(),
        rank=None if options.full else options.rank,
        rows=rows,
        time=length,
        learning_rate=rate,
        dtype=jnp.dtype(dtype).name,
        seed=options.seed,
    )
    return Prepared(config, packed, settings, steps)


def _length(
    options: Options, found: list[documents.Document], plan: published.Plan
) -> int:
    """Tokens of a row."""
    sizes = [len(document.tokens) for document in found]
    longest = max(sizes)
    if options.time is not None:
        length = options.time
        why = "--time"
    else:
        length = min(_LONGEST, -(-(longest - 1) // 64) * 64)
        why = f"the longest document in whole chunks of 64, at most {_LONGEST}"
    cut = sum(size > length + 1 for size in sizes)
    text = (
        f"{len(found):,} documents of {sum(sizes):,} tokens, the longest of {longest:,}"
    )
    plan.add("documents", options.data.name, f"{text}; {cut:,} are cut into pieces")
    plan.add("tokens of a row", length, why)
    return length


def _rows(options: Options, packed: int, length: int, plan: published.Plan) -> int:
    """Rows of a step."""
    usual = _STEP_TOKENS.get(jax.default_backend(), _STEP_TOKENS_ELSEWHERE)
    if options.rows is not None:
        rows = options.rows
        why = "--rows"
    else:
        rows = max(1, min(usual // length, packed))
        devices = len(jax.devices())
        rows = rows // devices * devices or rows
        why = f"up to {usual:,} tokens on such devices, of {packed:,} packed rows"
    plan.add("tokens of a step", f"{rows} x {length} = {rows * length:,}", why)
    return rows


def _devices(rows: int) -> tuple[str, str]:
    devices = jax.devices()
    name = cpu_name() if devices[0].platform == "cpu" else devices[0].device_kind
    count = _num_devices(rows)
    if len(devices) == 1:
        return name, "the only one"
    why = f"rows of a step are divided among them: {rows} by {len(devices)} devices"
    return f"{count} x {name}", why


def _num_devices(rows: int) -> int:
    """As many as divide the rows evenly."""
    return math.gcd(rows, len(jax.devices()))


def _trained(model: DeltaLM, options: Options, plan: published.Plan) -> type[nnx.Param]:
    """The kind of the parameters that are trained; LoRA's are added."""
    total = _size(model, nnx.Param)
    if options.full:
        plan.add(
            "trained",
            f"all {total:,} parameters",
            f"--full: {_gib(total)} with gradients and AdamW",
        )
        return nnx.Param
    count = add_lora(model, options.rank, rngs=nnx.Rngs(options.seed))
    size = _size(model, nnx.LoRAParam)
    part = f"LoRA of rank {options.rank} at {count} projections"
    why = f"{size:,} parameters, {size / total:.2%} of {total:,}; {_gib(size)} with gradients and AdamW"
    plan.add("trained", part, f"{why}, where --full takes {_gib(total)}")
    return nnx.LoRAParam


def _size(model: DeltaLM, kind: type[nnx.Param]) -> int:
    return sum(x.size for x in jax.tree.leaves(nnx.state(model, kind)))


def _gib(parameters: int) -> str:
    """Float32 parameters, their gradients and two moments."""
    return f"{16 * parameters / 2**30:.2f} GiB"


def _save(model: DeltaLM, options: Options) -> None:
    """The model in its published format, with its tokenizer."""
    merge_lora(model)
    folder = options.out / "model"
    save_hf(model, folder, rounded=True)
    for name in (*tokenizer.FILES, "generation_config.json"):
        if (options.model / name).is_file():
            shutil.copyfile(options.model / name, folder / name)


def _show(console: Console, results: dict[str, Any], out: pathlib.Path) -> None:
    before = f"{results['first_bits']:.2f} bits per token in the first step"
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_row("loss", f"[bold]{results['last_bits']:.2f} bits per token", before)
    table.add_row("run", f"{results['steps']} steps", f"{results['seconds']:.0f} s")
    table.add_row("model", str(out / "model"), f"jfla generate --model {out / 'model'}")
    table.add_row("curve", str(out / "loss.png"), "")
    console.print(table)
