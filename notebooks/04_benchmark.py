# ---
# jupyter:
#   accelerator: GPU
#   colab:
#     gpuType: T4
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/jfla-org/jfla/blob/main/notebooks/04_benchmark.ipynb)
#
# # What was measured
#
# `jfla bench` times the operators, next to other libraries where they are installed, on named sets of shapes, and
# checks the result of every timed call against the float64 recurrence. Its results are JSON files in
# `benchmarks/results`. This notebook reads and draws them. Where there are none, or where you set `MEASURE_HERE`, it
# first measures the small set "quick" on the machine that it runs on.


# %% cellView="form"
# @title Install jfla (does nothing where it is already installed)
import importlib.metadata
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

REPOSITORY = "https://github.com/jfla-org/jfla"
OLDEST_JAX = "0.11.2"
NEEDED = "jfla", "jax", "grain", "matplotlib", "optax", "rich"


def installed(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def is_new_enough(version):
    numbers = [[int(x) for x in re.findall(r"\d+", v)[:3]] for v in (version, OLDEST_JAX)]
    return numbers[0] >= numbers[1]


def install():
    jax_version, extra = installed("jax"), "cli"
    if jax_version and is_new_enough(jax_version):
        print(f"JAX {jax_version} is new enough and stays as it is.")
        keep = [f"{name}=={version}" for name in ("jax", "jaxlib") if (version := installed(name))]
    else:
        extra, keep = "cli,cuda12" if shutil.which("nvidia-smi") else "cli", []
        print(f"JAX {jax_version or 'is missing'}: jfla needs {OLDEST_JAX} or newer, which is installed now.")
    clone = [p for p in [pathlib.Path.cwd(), *pathlib.Path.cwd().parents] if (p / "jfla" / "api.py").exists()]
    source = f"jfla[{extra}] @ " + (clone[0].as_uri() if clone else f"git+{REPOSITORY}")
    with tempfile.TemporaryDirectory() as folder:
        constraints = pathlib.Path(folder, "constraints.txt")
        constraints.write_text("\n".join(keep))
        subprocess.run([sys.executable, "-m", "pip", "install", "-q", "-c", str(constraints), source], check=True)
    importlib.invalidate_caches()
    if "jax" in sys.modules and not keep:
        print("JAX had been imported before: restart the runtime now and run this cell again.")


if sys.version_info < (3, 12):  # noqa: UP036 the runtime may be older than what pip would take
    raise SystemExit(f"jfla needs Python 3.12 or newer; this is {sys.version.split()[0]}.")
if all(map(installed, NEEDED)) and is_new_enough(installed("jax")):
    print(f"jfla and JAX {installed('jax')} are here: nothing to install.")
else:
    install()

# %%
import dataclasses
import importlib.util
import os
import statistics

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # other libraries may use the same GPU

import jax
import matplotlib.pyplot as plt
import numpy as np
from IPython import get_ipython
from IPython.display import Image, display

import jfla

if importlib.util.find_spec("benchmarks") is None:  # they are not installed with jfla, but lie beside it in a clone
    clone = pathlib.Path(tempfile.mkdtemp(), "jfla")
    subprocess.run(["git", "clone", "-q", "--depth", "1", REPOSITORY, str(clone)], check=True)
    sys.path.insert(0, str(clone))
from benchmarks import plot, report, results, runner, shapes

get_ipython().run_line_magic("matplotlib", "inline")  # benchmarks.plot had switched to drawing without a display
plt.style.use("jfla.cli.notebook")

tokens, per_head = jax.ShapeDtypeStruct((1, 8192, 32, 128), "bfloat16"), jax.ShapeDtypeStruct((1, 8192, 32), "float32")
reason = jfla.pallas.supported(tokens, tokens, tokens, per_head, per_head)
print(f"JAX {jax.__version__} on {jax.devices()[0].device_kind}")
print("implementation=None takes", '"pallas", the kernels' if reason is None else f'"xla" here: {reason}')

# %% [markdown]
# ## The results
#
# Files of the repository, the newest last. To measure this machine set `MEASURE_HERE = True`; `PLAN` says what. On a
# GPU `sets=("paper",)` has the sizes of models, and takes minutes. From a shell the same is `jfla bench --help`.
# "quick" is one small shape: it shows how a measurement looks, not how fast the library is.

# %%
MEASURE_HERE = False
PLAN = runner.Plan(sets=("quick",), passes=("forward", "backward"), seconds=90)

files = sorted(results.FOLDER.glob("*.json"), key=lambda path: (results.read(path).date, path))
for path in files:
    record = results.read(path)
    print(f"{path.name}: {record.device}, {record.date}, {len(record.rows)} rows")
if MEASURE_HERE or not files:
    print("" if files else "There are no results in the repository; ", "measuring this machine ...", sep="")
    record = runner.run(PLAN, lambda done, total, what: print(f"  {done}/{total} {what}"))
else:
    record = results.read(files[-1])

# %% [markdown]
# All rows. `ms` is the median; `copy` and `matmul` are fractions of what a copy and a matrix product reach on the same
# device in the same run.

# %%
print(report.title(record))
COLUMNS = [
    report.COLUMNS.index(name) for name in ("op", "pass", "shape", "gate", "by", "ms", "+-", "worst error", "MiB")
]
table = [report.COLUMNS, *report.lines(record)]
widths = [max(len(row[column]) for row in table) for column in COLUMNS]
for row in table:
    print("  ".join(row[column].ljust(width) for column, width in zip(COLUMNS, widths)).rstrip())
print()
print("\n".join(report.refusals(record.rows)))

# %% [markdown]
# ## Time
#
# Milliseconds of a call, on a logarithmic axis: a group for each shape, a bar for each implementation. The gates are
# those that most rows were measured with.

# %%
few = {str(shape) for name in ("paper", "quick") for shape in shapes.SETS[name]}
rows = [row for row in record.rows if row.shape in few]
gate = statistics.mode(row.gate for row in rows)
drawn = dataclasses.replace(record, rows=[row for row in rows if row.gate == gate])
with tempfile.TemporaryDirectory() as folder:
    plot.draw_results(drawn, pathlib.Path(folder, "times.png"))
    display(Image(pathlib.Path(folder, "times.png").read_bytes(), width=900))

# %% [markdown]
# ## Where the time goes: a roofline
#
# Every call must move some bytes and do some operations (`benchmarks/cost.py` says which are counted). Their ratio is
# the position on the horizontal axis. On the left of the bend the memory is the limit, on the right the arithmetic
# unit; the line is what this device reached with a copy and a matrix product. The distance below the line is what is
# left to gain.

# %%
timed = [row for row in report.ordered(record.rows) if row.ms and row.timed in ("forward", "backward", "decode")]
timed.sort(key=lambda row: row.timed == "decode")  # training comes first in the legend
names = list(dict.fromkeys(row.implementation for row in timed))
colors = {name: plot.COLORS[name] for name in names}
markers = {"forward": "o", "backward": "s", "decode": "^"}
ceilings = record.ceilings

figure, axes = plt.subplots(1, 2, figsize=(11, 3.8), sharey=True)
for ax, op in zip(axes, ("kda", "gdn")):
    intensity = np.geomspace(0.5, 2000, 200)
    ceiling = np.minimum(intensity * ceilings.copy_tb_per_s, ceilings.matmul_tflop_per_s)
    ax.loglog(intensity, ceiling, color="#1f2430", linewidth=1)
    for row in timed:
        if row.op == op:
            intensity = row.tflop_per_s / row.tb_per_s
            ax.plot(intensity, row.tflop_per_s, markers[row.timed], color=colors[row.implementation], alpha=0.8)
    ax.set(title=op.upper(), xlabel="operations per byte")
axes[0].set_ylabel("TFLOP/s")
handles = [plt.Line2D([], [], marker="o", linestyle="", color=colors[name], label=name) for name in names]
shown = [name for name in markers if any(row.timed == name for row in timed)]
handles += [plt.Line2D([], [], marker=markers[name], linestyle="", color="#6b7280", label=name) for name in shown]
axes[1].legend(handles=handles, loc="lower right", fontsize=8)
plt.show()

# %% [markdown]
# ## Errors
#
# Speed without accuracy says nothing, so every time has an error beside it: `||x - ref|| / ||ref||` of the timed call,
# against the recurrence in float64. The inputs are bfloat16, so results near $2^{-9} \approx 2 \cdot 10^{-3}$ are as
# good as the format.

# %%
errors = {}
for row in record.rows:
    for tensor, value in row.errors.items():
        if row.ms and row.timed in ("forward", "forward+backward"):
            errors.setdefault((row.op, row.implementation), {}).setdefault(tensor, []).append(value)
tensors = list(dict.fromkeys(tensor for found in errors.values() for tensor in found))

figure, axes = plt.subplots(1, 2, figsize=(11, 3.2), sharey=True)
for ax, op in zip(axes, ("kda", "gdn")):
    for shift, name in enumerate(names):
        for tensor, values in errors.get((op, name), {}).items():
            at = tensors.index(tensor) + (shift - (len(names) - 1) / 2) * 0.6 / len(names)
            ax.semilogy([at] * len(values), values, "o", color=colors[name], markersize=5, alpha=0.7)
    ax.axhline(2**-9, color="#6b7280", linewidth=1, linestyle="--")
    ax.set(title=op.upper())
    ax.set_xticks(range(len(tensors)), tensors, rotation=30)
axes[0].set_ylabel("relative error")
axes[1].legend(handles=handles[: len(names)], fontsize=8, loc="lower right")
plt.show()
# Beyond T = 16384 gradients are not checked, so "backward" has no error there.
assert all(row.errors for row in timed if row.timed != "backward" or "T65536" not in row.shape)

# %% [markdown]
# The figures belong to the device, the date and the versions above, and to no other. How calls are timed stands in
# `benchmarks/measure.py`.
