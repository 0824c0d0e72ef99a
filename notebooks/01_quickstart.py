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
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/jfla-org/jfla/blob/main/notebooks/01_quickstart.ipynb)
#
# # jfla in ten minutes
#
# Kimi Delta Attention (KDA) and Gated DeltaNet (GDN) are attention layers whose memory does not grow with the context.
# Each head keeps one matrix of fixed size; every token lets it decay, corrects what it says about the token's key, and
# reads it. This notebook uses both operators: forward, gradients, gates, packed sequences, and the hand-over of the
# state from prefill to decoding. It runs on a CPU and on any GPU that JAX knows.

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
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from flax import nnx

import jfla
import jfla.nn

plt.style.use("jfla.cli.notebook")

tokens, per_head = jax.ShapeDtypeStruct((1, 4096, 4, 64), "bfloat16"), jax.ShapeDtypeStruct((1, 4096, 4), "float32")
reason = jfla.pallas.supported(tokens, tokens, tokens, jax.ShapeDtypeStruct(tokens.shape, "float32"), per_head)
print(f"JAX {jax.__version__} on {jax.devices()[0].device_kind}")
print("implementation=None takes", '"pallas", the kernels' if reason is None else f'"xla" here: {reason}')

# %% [markdown]
# ## The two operators
#
# Per sequence and head there is a state $S$ of shape $K \times V$. A token brings a query $q$, a key $k$, a value $v$,
# a log decay $g \le 0$ and a write strength $\beta$:
#
# $$S \leftarrow e^{g_t} \odot S, \qquad S \leftarrow S + k_t\,\big(\beta_t\,(v_t - S^\top k_t)\big)^\top, \qquad
# o_t = S^\top (K^{-1/2} q_t)$$
#
# In **KDA** every key channel has its own decay (`g` is `[B, T, H, K]`), in **GDN** one decay holds for the whole head
# (`g` is `[B, T, H]`). `chunk_*` works on 64 tokens at a time and is the form for training and prefill.

# %%
B, T, H, K, V = 1, 256, 2, 64, 64
rng = np.random.default_rng(0)
q, k, v = (jnp.asarray(rng.standard_normal((B, T, H, K)), jnp.bfloat16) for _ in range(3))
g_kda = jnp.asarray(-0.1 * rng.random((B, T, H, K)), jnp.float32)
g_gdn = jnp.asarray(-0.1 * rng.random((B, T, H)), jnp.float32)
beta = jnp.asarray(rng.random((B, T, H)), jnp.float32)

kda = jfla.chunk_kda(q, k, v, g_kda, beta, qk_norm=True, return_final_state=True)
gdn = jfla.chunk_gdn(q, k, v, g_gdn, beta, qk_norm=True, return_final_state=True)
print("output", kda.output.shape, kda.output.dtype, "| state", kda.final_state.shape, kda.final_state.dtype)

# %% [markdown]
# `qk_norm=True` gives queries and keys the length 1, as the published models do. What the operators compute is defined
# by a scan over the tokens, `jfla.reference`. The difference to it is `||x - ref|| / ||ref||`; bfloat16 keeps 8 bits,
# so a few thousandths is rounding.


# %%
def error(x, reference):
    x, reference = (np.asarray(a, np.float64) for a in (x, reference))
    return np.linalg.norm(x - reference) / np.linalg.norm(reference)


exact = [x.astype(jnp.float32) for x in (q, k, v)]  # the same numbers, computed and returned in float32
ref_kda = jfla.reference.recurrent_kda(*exact, g_kda, beta, qk_norm=True, return_final_state=True)
ref_gdn = jfla.reference.recurrent_gdn(*exact, g_gdn, beta, qk_norm=True, return_final_state=True)
for name, out, ref in (("chunk_kda", kda, ref_kda), ("chunk_gdn", gdn, ref_gdn)):
    differences = error(out.output, ref.output), error(out.final_state, ref.final_state)
    print(f"{name}: output {differences[0]:.1e}, final state {differences[1]:.1e}")
    assert max(differences) < 5e-3

# %% [markdown]
# ## Gradients
#
# Everything that is a float is differentiable, through the output and through the final state. `chunk_*` has its
# gradients in closed form; the scan below is differentiated by JAX.


# %%
def loss(op, arrays):
    out = op(*arrays, qk_norm=True, return_final_state=True)
    return jnp.mean(jnp.sin(3 * out.output)) + jnp.mean(out.final_state**2)


arrays = (*exact, g_kda, beta)
closed_form = jax.jit(jax.grad(lambda a: loss(jfla.chunk_kda, a)))(arrays)
by_jax = jax.jit(jax.grad(lambda a: loss(jfla.reference.recurrent_kda, a)))(arrays)
for name, dx, ref in zip(("q", "k", "v", "g", "beta"), closed_form, by_jax):
    print(f"d{name:5} {dx.shape!s:18} difference {error(dx, ref):.1e}")
    assert error(dx, ref) < 1e-4

# %% [markdown]
# ## Gates
#
# Published models do not learn $g$ itself but the input of a gate. Give the raw input as `g` and the gate as `gate`:
#
# - `SoftplusGate`: $g = -e^{a} \, \mathrm{softplus}(x + b)$, unbounded (Kimi Linear, Qwen3-Next);
# - `SigmoidGate`: $g = \ell \cdot \sigma(e^{a} (x + b))$, between the lower bound $\ell$ and 0.
#
# In the same way `beta_max=1.0` takes `beta` as logits (`sigmoid(beta)`), `beta_max=2.0` doubles that.

# %%
x = np.linspace(-8, 8, 200)
gates = {f"SoftplusGate, a_log = {a}": jfla.SoftplusGate(jnp.array([float(a)])) for a in (-2, 0, 2)}
gates["SigmoidGate, lower_bound = -5"] = jfla.SigmoidGate()

figure, (left, right) = plt.subplots(1, 2, figsize=(9.5, 3))
for name, gate in gates.items():
    g = np.asarray(gate(jnp.asarray(x)[:, None, None]))[:, 0, 0]
    left.plot(x, g, label=name)
    right.plot(x, np.exp(g))
left.set(title="log decay g", ylim=(-12, 0.5), xlabel="gate input x")
right.set(title="what is left of the state after one token, exp(g)", xlabel="gate input x")
left.legend(loc="lower left")
plt.show()

# %%
raw, logits = (jnp.asarray(rng.standard_normal(x.shape), jnp.float32) for x in (g_kda, beta))
gate = jfla.SoftplusGate(a_log=jnp.zeros(H), dt_bias=jnp.full((H, K), -3.0))
out = jfla.recurrent_kda(*exact, raw, logits, gate=gate, beta_max=1.0, qk_norm=True).output
by_hand = jfla.recurrent_kda(*exact, -jax.nn.softplus(raw - 3), jax.nn.sigmoid(logits), qk_norm=True).output
print(f"gate and beta inside the op, or computed in front of it: difference {error(out, by_hand):.1e}")
assert error(out, by_hand) < 1e-5

# %% [markdown]
# **Any gate is safe.** Here every decay is drawn from almost nothing (-0.0001) to a step that empties the state
# (-1000), for every channel and token separately. There is no flag to set and no bound to respect; the notebook
# `02_the_delta_rule_explained` shows what goes wrong without care.

# %%
wild = jnp.asarray(-(10.0 ** rng.uniform(-4, 3, g_kda.shape)), jnp.float32)
out = jfla.chunk_kda(*exact, wild, beta, qk_norm=True, return_final_state=True)
ref = jfla.reference.recurrent_kda(*exact, wild, beta, qk_norm=True, return_final_state=True)
print(f"decays from {wild.max():.4f} to {wild.min():.0f}: difference {error(out.output, ref.output):.1e}")
assert error(out.output, ref.output) < 1e-4

# %% [markdown]
# ## Packed sequences
#
# Documents of different lengths can lie in one row, one behind the other. `segment_ids` numbers them from 1; 0 is
# padding at the end. They do not see each other, and each can have a state of its own.
#
# The output is linear in the values. So the identity matrix as values, one column per token, gives the operator itself
# as a matrix: entry $(i, j)$ says how much of token $j$'s value token $i$ reads. It is the counterpart of an attention
# map, with negative entries where a write takes back what was there.

# %%
ids = jfla.segment_ids_from_cu_seqlens(jnp.array([0, 100, 130, 215]), T)
identity = jnp.broadcast_to(jnp.eye(T)[None, :, None], (B, T, H, T))
slow = g_gdn / 5
maps = {
    name: jfla.chunk_gdn(
        *exact[:2], identity, slow, beta, qk_norm=True, segment_ids=segments, num_segments=3, return_final_state=True
    )
    for name, segments in (("one sequence", jnp.ones_like(ids)), ("three sequences and padding", ids))
}

figure, axes = plt.subplots(1, 2, figsize=(9, 4), sharey=True)
for ax, (name, out) in zip(axes, maps.items()):
    image = ax.imshow(out.output[0, :, 0], vmin=-0.015, vmax=0.015, cmap="RdBu")
    ax.set(title=name, xlabel="token j that wrote")
axes[0].set_ylabel("token i that reads")
figure.colorbar(image, ax=axes, shrink=0.8)
plt.show()

# %% [markdown]
# Each sequence of the row is what it would be alone:

# %%
packed = maps["three sequences and padding"]
for s, (start, stop) in enumerate(((0, 100), (100, 130), (130, 215))):
    row = [x[:, start:stop] for x in (*exact[:2], identity, slow, beta)]
    alone = jfla.recurrent_gdn(*row, qk_norm=True, return_final_state=True)
    differences = (
        error(packed.output[:, start:stop], alone.output),
        error(packed.final_state[:, s], alone.final_state),
    )
    print(f"sequence {s + 1}, {stop - start:3} tokens: output {differences[0]:.1e}, state {differences[1]:.1e}")
    assert max(differences) < 1e-5

# %% [markdown]
# ## From prefill to decoding
#
# The state is all that a sequence leaves behind. Prefill in chunks, keep the state, then go on token by token with
# `recurrent_*`: the outputs are those of one call over everything.

# %%
prompt, row = 200, (*exact, g_kda, beta)
whole = jfla.chunk_kda(*row, qk_norm=True, return_final_state=True).output
out, state = jfla.chunk_kda(*[x[:, :prompt] for x in row], qk_norm=True, return_final_state=True)
decoded = []
for t in range(prompt, T):
    token = [x[:, t : t + 1] for x in row]
    step, state = jfla.recurrent_kda(*token, qk_norm=True, initial_state=state, return_final_state=True)
    decoded.append(step)
decoded = jnp.concatenate(decoded, axis=1)
print(f"{T - prompt} decoded tokens, difference to one call: {error(decoded, whole[:, prompt:]):.1e}")
assert error(decoded, whole[:, prompt:]) < 1e-5

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(9.5, 3.2), width_ratios=(3, 2))
first = 130
left.plot(range(first, T), whole[0, first:, 0, 0], color="#d1d5db", linewidth=6, label="one call over everything")
left.plot(range(first, prompt), out[0, first:, 0, 0], linewidth=1.5, label="prefill, in chunks")
left.plot(range(prompt, T), decoded[0, :, 0, 0], linewidth=1.5, label="decoding, token by token")
left.set(title="one channel of the output", xlabel="token", ylim=(-0.11, 0.08))
left.legend(ncols=3, fontsize=8, loc="lower left")
context = 2.0 ** np.arange(6, 21)
right.loglog(context, 2 * context * H * K * 2 / 1024, label="keys and values of softmax attention, bfloat16")
right.loglog(context, np.full(context.shape, state.nbytes / 1024), label="state, float32")
right.set(title=f"KiB of memory, H = {H}, K = V = {K}", xlabel="tokens of context", ylim=(10, 1e7))
right.legend(fontsize=8, loc="upper left")
plt.show()

# %% [markdown]
# ## Layers and a model
#
# `jfla.nn` has both operators as Flax NNX layers with projections, short convolutions, gates and an output norm, and a
# language model made of them. A cache carries states from call to call.

# %%
layer = jfla.nn.GatedDeltaNet(64, num_heads=2, head_dim=32, rngs=nnx.Rngs(0))
x = jnp.asarray(rng.standard_normal((1, 100, 64)), jnp.float32)
y, cache = layer(x, cache=layer.init_cache(1))
print("layer:", x.shape, "->", y.shape, "| state in the cache:", cache.state.shape)

config = jfla.nn.DeltaLMConfig(vocab_size=256, hidden_size=64, num_layers=2, num_heads=2, head_dim=32, op="gdn")
model = jfla.nn.DeltaLM(config, rngs=nnx.Rngs(0))
text = model.generate(jnp.array([[1, 2, 3]]), 8, key=jax.random.key(0))
print("model, untrained, goes on after 1 2 3 with", *text[0])

# %% [markdown]
# On: `02_the_delta_rule_explained` takes the mathematics apart, `03_train_and_generate` trains this model, and
# `04_benchmark` shows what was measured.
