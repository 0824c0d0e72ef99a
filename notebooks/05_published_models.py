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
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/jfla-org/jfla/blob/main/notebooks/05_published_models.ipynb)
#
# # Published models: load, generate, look inside, train a step
#
# `jfla.nn.load_hf` loads models of delta-rule layers as they are published: Qwen3.5, Qwen3-Next, OLMo-Hybrid,
# Kimi-Linear, and those of Flash Linear Attention. This notebook takes Qwen3.5-0.8B from the folder that `JFLA_MODEL`
# names, or else from the Hugging Face hub where `huggingface_hub` is installed and the network allows it, or else a
# model of the same architecture that is tiny and random, from the tests of a clone: its tokens mean nothing, and
# everything else is the same.


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
import os
import time

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import nnx

if not installed("safetensors"):
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "safetensors"], check=True)

import jfla
import jfla.nn
from jfla.cli.tokenizer import TokenIds, load_tokenizer

plt.style.use("jfla.cli.notebook")
ON_GPU = jax.devices()[0].platform == "gpu"
print(f"JAX {jax.__version__} on {jax.devices()[0].device_kind}")


def from_hub():
    """The folder of Qwen3.5-0.8B, or None."""
    try:
        from huggingface_hub import snapshot_download

        return snapshot_download("Qwen/Qwen3.5-0.8B", allow_patterns=["*.json", "*.safetensors", "*.txt"])
    except Exception as error:
        print(f"not from the hub: {type(error).__name__}")
        return None


def from_clone():
    """The tiny random model of the tests."""
    folders = [path / "tests/goldens/models/qwen3_5" for path in [pathlib.Path.cwd(), *pathlib.Path.cwd().parents]]
    return next(folder for folder in folders if folder.exists())


FOLDER = pathlib.Path(os.environ.get("JFLA_MODEL") or from_hub() or from_clone())
print("model:", FOLDER.name)

# %% [markdown]
# ## Load
#
# `hf_config` reads `config.json`; `dataclasses.replace` changes what is ours to choose. CPUs are faster in float32 than
# in bfloat16. Every layer says what it is: three of four are Gated DeltaNet, the fourth is softmax attention.

# %%
dtype = jnp.bfloat16 if ON_GPU else jnp.float32
config = dataclasses.replace(jfla.nn.hf_config(FOLDER), dtype=dtype, param_dtype=dtype)
model = jfla.nn.load_hf(FOLDER, config)
print(f"{sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param))):,} parameters, {config.num_layers} layers")
for number, layer in enumerate(config.layers[:4]):
    print(number, layer.mixer)

# %% [markdown]
# ## Generate
#
# `generate` is one compiled loop, `stream` yields each token when it is there. `jfla generate --model FOLDER --prompt
# "..."` does the same in a terminal. Without a tokenizer (`pip install tokenizers`) a prompt is token ids, and so is
# what comes out.

# %%
tokenizer, name, why = load_tokenizer(FOLDER)
print(f"{name}: {why.replace(str(FOLDER), FOLDER.name)}")
with_text = not isinstance(tokenizer, TokenIds)
prompt = tokenizer.encode("The delta rule writes only what" if with_text else "12 7 201 45 3 99 12 7 201 45")
piece = tokenizer.stream()
count, start = 0, 0.0
for token in model.stream(jnp.array([prompt]), 60, key=jax.random.key(0), temperature=0.7, top_p=0.9):
    count += 1
    if count == 1:
        start = time.perf_counter()  # the first token waits for the compiler
    print(piece(int(token[0])), end="")
speed = (count - 1) / (time.perf_counter() - start)
print(f"\n\n{speed:.0f} tokens/s")

# %% [markdown]
# ## What a layer remembers
#
# A cache is what the model carries from one token to the next. A delta-rule layer keeps one matrix $S$ of size
# $K \times V$ a head, whatever came before; an attention layer keeps the keys and values of all tokens. Below is the
# state of the first head of each delta-rule layer after the prompt and its continuation: key channels downwards, value
# channels to the right, red positive and blue negative.

# %%
greedy = {"key": jax.random.key(0), "temperature": 0.0}
tokens = jnp.concatenate([jnp.array([prompt]), model.generate(jnp.array([prompt]), 60, **greedy)], axis=1)
read = nnx.jit(lambda model, tokens: model.hidden(tokens, None, model.init_cache(1, tokens.shape[1]))[1])
cache = read(model, tokens)
states = {i: np.asarray(x.state[0]) for i, x in enumerate(cache) if isinstance(x, jfla.nn.DeltaCache)}
columns = min(6, len(states))
rows = -(-len(states) // columns)
figure, axes = plt.subplots(rows, columns, figsize=(10.5, 3.1 * rows if columns < 6 else 1.9 * rows), squeeze=False)
for ax in axes.flat:
    ax.axis("off")
for ax, (layer, state) in zip(axes.flat, states.items()):
    largest = np.abs(state[0]).max()
    ax.imshow(state[0], cmap="RdBu_r", vmin=-largest, vmax=largest)
    ax.set_title(f"layer {layer}, head 0", fontsize=9)
plt.show()

# %% [markdown]
# Left: how much of each state its directions carry, the singular values of every head's $S$ against the largest. A
# matrix in which few directions matter holds few associations; where the curve is flat, the layer uses all the room it
# has. Right: the bytes of both kinds of cache in the whole model, by the length of the text.

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(10.5, 3.4))
shades = plt.get_cmap("viridis")(np.linspace(0, 0.85, len(states)))
for color, (layer, state) in zip(shades, states.items()):
    values = np.linalg.svd(state, compute_uv=False)
    label = f"layer {layer}" if layer in (min(states), max(states)) else None
    left.plot(np.mean(values / values[:, :1], axis=0), color=color, label=label)
left.set(title="singular values of the states, mean over heads", xlabel="direction", ylim=(0, 1.05))
left.legend()
lengths = np.array([2**n for n in range(6, 19)])
per_state = sum(x.nbytes for i, layer in enumerate(cache) for x in jax.tree.leaves(layer) if i in states)
per_token = sum(x.nbytes for i, layer in enumerate(cache) for x in jax.tree.leaves(layer) if i not in states)
right.loglog(lengths, np.full(len(lengths), per_state / 2**20), color="#2563eb", label="delta-rule layers")
right.loglog(lengths, per_token / tokens.shape[1] * lengths / 2**20, color="#d9480f", label="attention layers")
right.set(title="cache of a sequence, MiB", xlabel="tokens")
right.legend()
plt.show()

# %% [markdown]
# ## One step of fine-tuning
#
# `add_lora` puts updates of low rank beside the projections. They begin as zero, so that the model computes as before,
# and they are all that is trained: gradients and the optimizer's state are as small as they are. Two documents are
# packed into one row; `segment_ids` keeps them apart. `jfla finetune --model FOLDER --data FILE.jsonl` does this for a
# whole file, with checkpoints.

# %%
count = jfla.nn.add_lora(model, rank=8, rngs=nnx.Rngs(0))
size = sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.LoRAParam)))
print(f"{count} projections, {size:,} parameters to train")
half = tokens.shape[1] // 2
row = jnp.concatenate([tokens[:, half:], tokens[:, :half]], axis=1)
segment_ids = jnp.concatenate([jnp.full((1, tokens.shape[1] - half), 1), jnp.full((1, half), 2)], axis=1)


def loss(model):
    return jfla.nn.next_token_loss(model(row, segment_ids), row, segment_ids)


@nnx.jit
def step(model, optimizer):
    value, grads = nnx.value_and_grad(loss, argnums=nnx.DiffState(0, nnx.LoRAParam))(model)
    optimizer.update(model, grads)
    return value


optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.LoRAParam)
before = float(step(model, optimizer))
after = float(step(model, optimizer))
print(f"loss {before:.3f}, after one step {after:.3f}")
assert after < before

# %% [markdown]
# `merge_lora` adds the updates to the weights, and `save_hf` writes the folder that Transformers and others read.

# %%
jfla.nn.merge_lora(model)
with tempfile.TemporaryDirectory() as out:
    jfla.nn.save_hf(model, out, rounded=True)
    print(sorted(path.name for path in pathlib.Path(out).iterdir()))
    print("the same model again:", type(jfla.nn.load_hf(out)).__name__)
