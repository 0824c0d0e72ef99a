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
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/jfla-org/jfla/blob/main/notebooks/03_train_and_generate.ipynb)
#
# # Train a small model, let it write, and ask what it remembers
#
# Part 1 trains `DeltaLM`, a language model of delta-rule layers, on the source code of Python's own standard library,
# which is on every machine, and lets it write byte by byte with a carried state. Part 2 trains three small models on
# associative recall, which differ in nothing but the rule that writes to memory: Kimi Delta Attention, Gated DeltaNet,
# and plain linear attention. On two CPU cores the notebook takes a few minutes; on a GPU it trains longer.


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
import functools

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import nnx

import jfla
import jfla.nn
from jfla.cli import data
from jfla.gates import l2norm

plt.style.use("jfla.cli.notebook")
ON_GPU = jax.devices()[0].platform == "gpu"
HEADS, DIM, TIME = 2, 64, 128
tokens, per_head = (
    jax.ShapeDtypeStruct((1, TIME, HEADS, DIM), "bfloat16"),
    jax.ShapeDtypeStruct((1, TIME, HEADS), "float32"),
)
reason = jfla.pallas.supported(tokens, tokens, tokens, per_head, per_head)
DTYPE = jnp.bfloat16 if reason is None else jnp.float32
print(f"JAX {jax.__version__} on {jax.devices()[0].device_kind}, {jnp.dtype(DTYPE).name}")
print("implementation=None takes", '"pallas", the kernels' if reason is None else f'"xla" here: {reason}')

# %% [markdown]
# ## 1. A language model of Python
#
# Two blocks of Gated DeltaNet and a SwiGLU. The vocabulary is the 256 bytes. `load_corpus` keeps every 16th file out of
# the training text, to test on.

# %%
STEPS = 800 if ON_GPU else 100
corpus = data.load_corpus()
print(f"{corpus.files} files, {len(corpus.train):,} bytes to train on, {len(corpus.held_out):,} to test on")

config = jfla.nn.DeltaLMConfig(
    vocab_size=data.VOCAB, hidden_size=128, num_layers=2, num_heads=HEADS, head_dim=DIM, op="gdn", dtype=DTYPE
)
model = nnx.jit(lambda: jfla.nn.DeltaLM(config, rngs=nnx.Rngs(0)))()  # one compiled program draws all parameters
print(f"{sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param))):,} parameters")


def adamw(steps, rate):
    schedule = optax.warmup_cosine_decay_schedule(0.0, rate, 20, steps, rate / 20)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.98, weight_decay=0.01))


@nnx.jit
def update(model, optimizer, tokens, predicted):
    """One step. `predicted` [B, T] is True on the tokens that count."""

    def loss(model):
        return jfla.nn.next_token_loss(model(tokens), tokens, mask=predicted)

    value, grads = nnx.value_and_grad(loss)(model)
    optimizer.update(model, grads)
    return value


# %%
optimizer = nnx.Optimizer(model, adamw(STEPS, 4e-3), wrt=nnx.Param)
rng = np.random.default_rng(0)
losses = []
for step in range(STEPS):
    batch = data.text_rows(rng, corpus.train, rows=16, time=TIME - 1).tokens
    losses.append(update(model, optimizer, batch, np.ones(batch.shape, bool)))
    if step % (STEPS // 8) == 0:
        print(f"step {step:4}: {losses[-1] / np.log(2):.2f} bits per byte")
losses = np.array(losses) / np.log(2)

# %% [markdown]
# How good is it on files that it has never seen, and does it use its context? Below right is the loss by position, on
# rows eight times as long as those of the training. The state has no positions to run out of: the model goes on at the
# length it was never trained on. The dashed lines are what one gets by counting bytes.


# %%
@nnx.jit
def bits_by_position(model, tokens):
    losses = optax.softmax_cross_entropy_with_integer_labels(model(tokens[:, :-1]), tokens[:, 1:])
    return jnp.mean(losses, axis=0) / jnp.log(2)


long = data.text_rows(np.random.default_rng(1), corpus.held_out, rows=32, time=8 * TIME).tokens
by_position = np.asarray(bits_by_position(model, long))
frequency = np.bincount(corpus.train, minlength=256) / len(corpus.train)
by_counting = -np.sum(frequency[frequency > 0] * np.log2(frequency[frequency > 0]))
within, behind = by_position[:TIME].mean(), by_position[TIME:].mean()
print(f"held-out files: {within:.2f} bits per byte up to token {TIME}, {behind:.2f} behind it")


def mean_of(values, width):
    return np.convolve(values, np.ones(width) / width, mode="valid")


figure, (left, right) = plt.subplots(1, 2, figsize=(10.5, 3.4), sharey=True)
left.plot(losses, color="#2563eb", alpha=0.25, linewidth=1)
left.plot(np.arange(9, STEPS), mean_of(losses, 10), color="#2563eb")
left.set(title="training: bits per byte", xlabel="step", ylim=(0, 9))
right.plot(by_position, color="#d9480f", alpha=0.25, linewidth=1)
right.plot(np.arange(32, 8 * TIME - 31), mean_of(by_position, 64), color="#d9480f")
right.axvline(TIME, color="#6b7280", linewidth=1)
right.annotate("longest row in training", (TIME + 12, 7.6), color="#6b7280", fontsize=9)
right.set(title="held-out files: bits per byte", xlabel="position in the row")
for ax in (left, right):
    ax.axhline(by_counting, color="#6b7280", linewidth=1, linestyle="--")
plt.show()

# %% [markdown]
# `generate` reads the prompt in one pass and then goes on token by token. What it carries along is the cache below: it
# is as large after ten bytes as after a million.

# %%
cache = model.init_cache(batch=1, max_len=1)
print(f"cache of a sequence: {sum(x.nbytes for x in jax.tree.leaves(cache)):,} bytes\n")
prompt = "import os\n\n\nclass Path:\n    def "
written = model.generate(jnp.array([list(prompt.encode())]), 400, key=jax.random.key(1), temperature=0.6)
print(prompt + bytes(np.asarray(written[0], np.uint8)).decode("ascii", errors="replace"))

# %% [markdown]
# ## 2. What the correction is worth
#
# In associative recall a row lists pairs of a key and a value and then asks for the values of some keys. Keys and
# values are drawn anew for every row, so nothing can be learned by heart: the model must write each pair into its state
# and read it by content.
#
# Three models of one block, equal but for the rule:
#
# | | decay | write |
# |---|---|---|
# | KDA | per key channel | $S \leftarrow S + k_t\,\beta_t (v_t - S^\top k_t)^\top$ |
# | GDN | per head | the same |
# | plain linear attention | per head | $S \leftarrow S + k_t\,\beta_t v_t^\top$, GDN without the correction |
#
# The plain layer is `GatedDeltaNet` with its operator replaced; projections, convolutions, gates and norm are the same.
# A row of 128 tokens fits into one triangle of decayed dots.


# %%
class PlainLinearAttention(jfla.nn.GatedDeltaNet):
    """GatedDeltaNet that adds beta v instead of beta (v - S^T k)."""

    def _delta_rule(self, arrays, segment_ids, state):
        q, k, v, g, beta = arrays
        decay = self._gate()(g[..., None])
        values = jax.nn.sigmoid(beta)[..., None] * v
        q, k, values, decay = (jnp.moveaxis(x, 1, 2) for x in (l2norm(q), l2norm(k), values, decay))
        before = jnp.cumsum(decay, axis=2)  # [B, H, T, 1]
        between = jnp.where(jnp.tri(q.shape[2], dtype=bool), before - before.mT, -jnp.inf)
        a_qk = self.head_dim**-0.5 * q @ k.mT * jnp.exp(between)  # [B, H, T, T]
        return jfla.DeltaRuleOutput(jnp.moveaxis(a_qk @ values, 1, 2), None)


def check_plain():
    """The layer's triangle against its recurrence, token by token."""
    layer = PlainLinearAttention(8, 1, 8, rngs=nnx.Rngs(0))
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 40, 1, 8)).astype(np.float32)
    g, beta = np.random.default_rng(1).standard_normal((2, 1, 40, 1)).astype(np.float32)
    output = layer._delta_rule([jnp.asarray(x) for x in (q, k, v, g, beta)], None, None).output[0, :, 0]
    q, k = (np.asarray(l2norm(jnp.asarray(x)))[0, :, 0] for x in (q, k))
    decay, strength = np.exp(layer._gate()(jnp.asarray(g)[..., None]))[0, :, 0, 0], 1 / (1 + np.exp(-beta[0, :, 0]))
    S, expected = np.zeros((8, 8)), []
    for t in range(40):
        S = decay[t] * S + np.outer(k[t], strength[t] * v[0, t, 0])
        expected.append(S.T @ q[t] * 8**-0.5)
    difference = np.abs(np.asarray(output) - expected).max()
    print(f"plain linear attention, triangle and recurrence differ by {difference:.1e}")
    assert difference < 1e-2 if ON_GPU else difference < 1e-5  # matrix products of a GPU may round to tf32


check_plain()

# %%
KEYS, VALUES, PAIRS = 32, 16, (4, 8, 16, 24, 32)


def recall_rows(rng, rows, pairs, time=TIME):
    """`pairs` keys with values, then queries; the values of queried keys are to be predicted."""
    keys = np.argsort(rng.random((rows, KEYS)), axis=1)[:, :pairs]
    values = KEYS + rng.integers(VALUES, size=(rows, pairs))
    queries = rng.integers(pairs, size=(rows, time // 2 - pairs))
    order = np.concatenate([np.tile(np.arange(pairs), (rows, 1)), queries], axis=1)
    tokens = np.stack([np.take_along_axis(x, order, axis=1) for x in (keys, values)], axis=2).reshape(rows, time)
    position = np.arange(time)
    return tokens.astype(np.int32), np.tile((position >= 2 * pairs) & (position % 2 == 1), (rows, 1))


tokens, predicted = recall_rows(np.random.default_rng(0), 1, 4, 20)
text = [f"k{x}" if x < KEYS else f"v{x - KEYS}" for x in tokens[0]]
print("pairs:  ", *text[:8], "\nqueries:", *(f"[{x}]" if p else x for x, p in zip(text[8:], predicted[0, 8:])))


@functools.partial(nnx.jit, static_argnums=0)
def recall_model(rule):
    config = jfla.nn.DeltaLMConfig(
        vocab_size=KEYS + VALUES, hidden_size=64, num_layers=1, num_heads=1, head_dim=32, mlp_ratio=2.0,
        op="kda" if rule == "KDA" else "gdn",
    )  # fmt: skip
    model = jfla.nn.DeltaLM(config, rngs=nnx.Rngs(0))
    if rule == "plain linear attention":
        model.blocks[0].mixer = PlainLinearAttention(64, 1, 32, rngs=nnx.Rngs(0))
    return model


@nnx.jit
def accuracy(model, tokens, predicted):
    right = jnp.argmax(model(tokens[:, :-1]), axis=-1) == tokens[:, 1:]
    return jnp.mean(right, where=predicted[:, 1:])


# %% [markdown]
# The rows of the training have 4 to 32 pairs, more of them as it goes on. The state of the head is $32 \times 32$: 32
# pairs are as many as it has key channels.

# %%
RECALL_STEPS = 1000 if ON_GPU else 150
curves, results = {}, {}
for rule in ("KDA", "GDN", "plain linear attention"):
    model, rng = recall_model(rule), np.random.default_rng(0)
    optimizer = nnx.Optimizer(model, adamw(RECALL_STEPS, 1e-2), wrt=nnx.Param)
    losses = []
    for step in range(RECALL_STEPS):
        hardest = min(len(PAIRS), 2 + 6 * step // RECALL_STEPS)
        losses.append(update(model, optimizer, *recall_rows(rng, 32, PAIRS[rng.integers(hardest)])))
    curves[rule] = np.array(losses)
    test = np.random.default_rng(1)  # the same new rows for every model
    results[rule] = [float(accuracy(model, *recall_rows(test, 128, pairs))) for pairs in PAIRS]
    print(f"{rule:23}", " ".join(f"{pairs} pairs: {x:4.0%}  " for pairs, x in zip(PAIRS, results[rule])))

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(10.5, 3.4))
for rule, color in zip(results, ("#2563eb", "#0f9d76", "#d9480f")):
    left.plot(np.arange(9, RECALL_STEPS), mean_of(curves[rule], 10), color=color, label=rule)
    right.plot(PAIRS, 100 * np.array(results[rule]), "o-", color=color, label=rule)
    right.annotate(
        f"{results[rule][-1]:.0%}", (PAIRS[-1], 100 * results[rule][-1]), xytext=(8, -4), textcoords="offset points",
        color=color, fontweight="bold", annotation_clip=False,
    )  # fmt: skip
left.set(title="training loss, mean of 10 steps", xlabel="step")
left.legend()
right.axhline(100 / VALUES, color="#6b7280", linewidth=1, linestyle="--")
right.annotate("guessing", (PAIRS[0], 100 / VALUES + 2), color="#6b7280", fontsize=9)
right.set(title="right answers on new rows, %", xlabel="pairs to remember", ylim=(0, 105), xticks=PAIRS)
plt.show()
assert results["GDN"][-1] > results["plain linear attention"][-1]
assert results["KDA"][-1] > results["plain linear attention"][-1]

# %% [markdown]
# This is one run of one seed and a short one, so the distance between the curves is not a law. Its direction is what
# section 8 of `02_the_delta_rule_explained` predicts: with plain addition every pair disturbs the reading of all
# others, and the correction removes what is in the way.
