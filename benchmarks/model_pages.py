"""Sections of docs/benchmarks.md on whole models (training, memory, a published one), where records are."""

import pathlib
from typing import Any

import numpy as np

from benchmarks import records
from benchmarks.markdown import table
from benchmarks.records import Record
from benchmarks.report import number, percent
from benchmarks.results import FOLDER
from benchmarks.shapes import OPS

WINDOW = 100  # steps over which losses are averaged before they are compared
WARM = 200  # steps before those that are compared
CURVES = {
    "kernels": "kernels",
    "seed": "kernels, another seed",
    "float32": '"xla" in float32',
}
_MEMORY_COLUMNS = ("op", "model", "T", "`remat`", "peak, GiB", "kept a block, MiB")
BLOB = "https://github.com/jfla-org/jfla/blob/main/benchmarks/results"


def sections(folder: pathlib.Path = FOLDER) -> list[str]:
    """Those that there are records for."""
    parts = []
    for kind, platform, section in (
        ("training", "gpu", _training),
        ("memory", "gpu", _memory),
        ("memory", "described", _described_memory),
        ("published", "gpu", _published),
    ):
        found = records.newest(kind, folder, platform)
        if found is not None:
            path, record = found
            parts += [*section(record), _source(kind, path, record)]
    return parts


def _source(kind: str, path: pathlib.Path, record: Record) -> str:
    versions = ", ".join(
        f"{name} {version}" for name, version in record["versions"].items()
    )
    return (
        f"One {record['device']}, commit {record['commit']}, {record['date']}; {versions}; by "
        f"`python -m benchmarks.{kind}`: [{path.name}]({BLOB}/{kind}/{path.name})."
    )


def curves(record: Record, op: str) -> dict[str, np.ndarray]:
    """Bits per byte of each run of an op, means over `every` steps."""
    runs = [run for run in record["runs"] if run["op"] == op and run["bits"]]
    return {
        name: np.array(run["bits"])
        for name in CURVES
        for run in runs
        if run["variant"] == name
    }


def all_curves(
    folder: pathlib.Path,
) -> tuple[dict[str, dict[str, np.ndarray]], int] | None:
    """Those of every op of the newest training, and the steps that a point is the mean of."""
    found = records.newest("training", folder)
    if found is None:
        return None
    _, record = found
    of_ops = {op: curves(record, op) for op in OPS}
    return {op: runs for op, runs in of_ops.items() if runs}, record["model"]["every"]


def distance(record: Record, op: str, name: str, other: str) -> float | None:
    """The farthest that two runs' means over `WINDOW` steps are apart after `WARM` steps, in bits."""
    found = curves(record, op)
    if name not in found or other not in found:
        return None
    every = record["model"]["every"]
    length = min(len(found[name]), len(found[other]))
    window = max(1, WINDOW // every)
    apart = (found[name][:length] - found[other][:length])[WARM // every :]
    if len(apart) < window:
        return None
    means = np.convolve(apart, np.full(window, 1 / window), mode="valid")
    return float(np.abs(means).max())


def _training(record: Record) -> list[str]:
    model = record["model"]
    losses = []
    speeds = []
    for op in OPS:
        runs = {run["variant"]: run for run in record["runs"] if run["op"] == op}
        if "kernels" not in runs:
            continue
        losses += _losses(record, op, runs)
        part = next((part for part in record["parts"] if part["op"] == op), {})
        speeds += [
            _speed(op, run, part if name == "kernels" else {})
            for name, run in runs.items()
        ]
    header = (
        "op",
        "steps compared",
        *(f"bits, {name}" for name in CURVES.values()),
        "kernels from float32, at most",
        "another seed from kernels, at most",
    )
    parameters = record["runs"][0]["parameters"] / 1e6
    return [
        "## Training with the kernels and without",
        f"Models of {model['num_layers']} layers of {model['hidden_size']} channels, {model['num_heads']} heads of "
        f"{model['head_dim']}, some {parameters:.0f} M parameters, on bytes of Python source: {model['rows']} rows "
        f'of {model["time"]} a step. The kernels compute in bfloat16; "xla" in float32 sees the same rows and '
        "begins with the same parameters, and the other seed has other parameters.",
        "![Loss curves](training.svg)",
        f"Bits per byte are means of the last {WINDOW} steps that the runs have in common. Distances are those of "
        f"means over {WINDOW} steps, from step {WARM} on.",
        table(header, losses),
        "Tokens a second are those of whole steps. Model operations count every product of a step once, of the op "
        f"three times its forward; they are held to {number(record['matmul_tflop_per_s'])} TFLOP/s, a product of 8192 "
        "cubed in bfloat16 measured in the same run, and to the data sheet. The op and the optimizer were timed alone, "
        "the op on what the layers hand it; the rest is what is left of the step.",
        table(
            (
                "op",
                "run",
                "tokens/s",
                "of the measured product",
                "of the data sheet",
                "step, ms",
                "op, ms",
                "optimizer, ms",
                "rest, ms",
            ),
            speeds,
        ),
    ]


def _losses(record: Record, op: str, runs: dict[str, Record]) -> list[tuple[str, ...]]:
    every = record["model"]["every"]
    found = curves(record, op)
    length = min(map(len, found.values()))
    window = max(1, WINDOW // every)
    ends = [
        f"{found[name][:length][-window:].mean():.4f}" if name in found else ""
        for name in CURVES
    ]
    apart = [
        distance(record, op, "kernels", "float32"),
        distance(record, op, "seed", "kernels"),
    ]
    cells = ["" if x is None else f"{x:.4f}" for x in apart]
    return [(op.upper(), str(length * every), *ends, *cells)]


def _speed(op: str, run: Record, part: Record) -> tuple[str, ...]:
    times = [
        run.get("step_ms"),
        *(part.get(f"{name}_ms") for name in ("op", "optimizer", "rest")),
    ]
    return (
        op.upper(),
        CURVES[run["variant"]],
        f"{run.get('tokens_per_s', 0):,}",
        percent(run.get("of_matmul")),
        percent(run.get("of_peak")),
        *map(number, times),
    )


def _memory(record: Record) -> list[str]:
    times = [
        number(row.get("step_ms")) or row.get("refused", "") for row in record["rows"]
    ]
    body = [(*_memory_cells(row), time) for row, time in zip(record["rows"], times)]
    return [
        "## Memory of a training step",
        "One row of T tokens of a vocabulary of 256, bfloat16 with float32 parameters, AdamW; peak as the compiler "
        "allots it: parameters, optimizer, gradients and all between. `remat` as in "
        "[`jfla.nn.remat_policies`](api.md#jfla.nn.remat_policies); kept: what one block leaves for its backward "
        "besides its parameters, as JAX traces it, of which the compiler makes some again by itself.",
        table((*_MEMORY_COLUMNS, "step, ms"), body),
    ]


def _described_memory(record: Record) -> list[str]:
    return [
        "The same of larger models, compiled for this GPU on a machine without one, and not run:",
        table(_MEMORY_COLUMNS, [_memory_cells(row) for row in record["rows"]]),
    ]


def _memory_cells(row: Record) -> tuple[str, ...]:
    which = (row["op"].upper(), row["model"], f"{row['time']:,}", row["remat"])
    return (*which, f"{row['peak_mib'] / 1024:.1f}", number(row.get("kept_mib")))


def _published(record: Record) -> list[str]:
    body: list[tuple[str, ...]] = [
        (row["name"], _text(row["value"])) for row in record["rows"]
    ]
    return [
        "## A model of the size of Qwen3.5-0.8B",
        f"Random weights in the published format, {record['settings']['num_hidden_layers']} layers of "
        f"{record['settings']['hidden_size']} channels, prompts of {record['tokens']} tokens, batch {record['batch']}.",
        table(("", "measured"), body),
    ]


def _text(value: Any) -> str:
    return (
        f"{value:,.4g}"
        if isinstance(value, float) and value < 1000
        else f"{value:,.0f}"
    )
