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
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/jfla-org/jfla/blob/main/notebooks/02_the_delta_rule_explained.ipynb)
#
# # The delta rule, explained
#
# This notebook builds Kimi Delta Attention from nothing: the recurrence, the form in chunks that makes training fast,
# the decays between tokens, the triangular inverse, the exponents that must never be subtracted, the gradients, and
# what a head can remember. Every formula is followed by code in NumPy that computes it and by a check against
# `jfla.reference`, which is the definition: a scan over the tokens. Everything runs in float64, where a mistake cannot
# hide behind rounding, except where float32 is the subject.
#
# | letter | meaning |
# |---|---|
# | $T$, $C$ | tokens of a sequence, tokens of a chunk |
# | $K$, $V$ | length of a key, of a value |
# | $S$ | the state of a head, a matrix $K \times V$ |
# | $q_t, k_t, v_t$ | query, key, value of token $t$ |
# | $g_t \le 0$ | log decay: the state is multiplied by $e^{g_t}$ |
# | $\beta_t$ | strength of a write |


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

import jfla
from jfla.xla.decay_sums import decay_sums
from jfla.xla.decayed_dot import decayed_dot
from jfla.xla.triangular import unit_lower_inverse

jax.config.update("jax_enable_x64", True)
plt.style.use("jfla.cli.notebook")
print(f"JAX {jax.__version__} on {jax.devices()[0].device_kind}")
structs = [jax.ShapeDtypeStruct((1, 64, 1, 16), "float64")] * 4 + [jax.ShapeDtypeStruct((1, 64, 1), "float64")]
print(f'implementation=None takes "xla" for the float64 of this notebook: {jfla.pallas.supported(*structs)}')


def error(x, reference):
    return np.linalg.norm(np.asarray(x, np.float64) - reference) / np.linalg.norm(reference)


def check(what, x, reference, bound=1e-12):
    print(f"{what:<44} differs by {error(x, reference):.1e}")
    assert error(x, reference) < bound


def reference(q, k, v, g, beta, state=None):
    """jfla's definition for one head without batch: [T, K], [T, V] in, outputs and final state out."""
    arrays = [jnp.asarray(x)[None, :, None] for x in (q, k, v, g)]
    state = None if state is None else jnp.asarray(state)[None, None]
    options = {"return_final_state": True, "initial_state": state}
    out = jfla.reference.recurrent_kda(*arrays, jnp.asarray(beta)[None, :, None], **options)
    return np.asarray(out.output[0, :, 0]), np.asarray(out.final_state[0, 0])


# %% [markdown]
# ## 1. A matrix as a memory
#
# Store a value $v$ under a key $k$ (a vector of length 1) by adding the matrix $k v^\top$ to a state $S$. Read with
# $S^\top k$: if only this pair was stored, the result is $v \,(k^\top k) = v$. This is **plain linear attention**:
#
# $$S \leftarrow S + k_t v_t^\top$$
#
# Its weakness shows when a key comes a second time with a new value: the old value stays, and the sum of both is read.
# The **delta rule** first looks up what the memory says about the key, and writes only the difference:
#
# $$S \leftarrow S + k_t\,\big(\beta_t\,(v_t - S^\top k_t)\big)^\top$$
#
# With $\beta = 1$ and a key of length 1, reading the key right after the write gives exactly the value. To see it, let
# the values be small pictures of letters. Four tokens arrive: J under key 1, F under key 2, L under key 3, and then A
# under key 1 again.

# %%
LETTERS = {
    "J": "..###...#....#....#....#.#..#..##..",
    "F": "######....#....####.#....#....#....",
    "L": "#....#....#....#....#....#....#####",
    "A": ".###.#...##...#######...##...##...#",
}
glyphs = {letter: np.array([float(c == "#") for c in rows]) for letter, rows in LETTERS.items()}  # 7 x 5 pixels

K, V = 8, 35
rng = np.random.default_rng(1)
keys = rng.standard_normal((3, K)) + 0.35
keys /= np.linalg.norm(keys, axis=1, keepdims=True)
print("cosines between the keys:", *(f"{keys[i] @ keys[j]:.2f}" for i, j in ((0, 1), (0, 2), (1, 2))))
tokens = [(keys[0], "J"), (keys[1], "F"), (keys[2], "L"), (keys[0], "A")]


def write_plain(S, k, v):
    return S + np.outer(k, v)


def write_delta(S, k, v, beta=1.0):
    return S + np.outer(k, beta * (v - S.T @ k))


states = {}
for name, write in (("plain addition", write_plain), ("delta rule", write_delta)):
    S, states[name] = np.zeros((K, V)), []
    for k, letter in tokens:
        S = write(S, k, glyphs[letter])
        states[name].append(S)


# %%
def reading(S):
    """What the three keys read, side by side."""
    gap = np.full((7, 2), np.nan)
    pictures = [(S.T @ k).reshape(7, 5) for k in keys]
    return np.hstack([pictures[0], gap, pictures[1], gap, pictures[2]])


figure, axes = plt.subplots(2, 4, figsize=(11, 4.1))
figure.get_layout_engine().set(wspace=0.12)
for row, (name, after) in zip(axes, states.items()):
    for t, (ax, S) in enumerate(zip(row, after)):
        image = ax.imshow(reading(S), cmap="RdBu_r", vmin=-1.5, vmax=1.5)
        ax.set_xticks([2, 9, 16], ["key 1", "key 2", "key 3"])
        ax.set_yticks([])
        ax.spines[:].set_visible(False)
        key_number = (1, 2, 3, 1)[t]
        ax.set_title(f"token {t + 1}: {tokens[t][1]} under key {key_number}")
    row[0].set_ylabel(name, fontsize=12, color="#1f2430")
figure.suptitle("What each key reads after each token", x=0.01, ha="left", fontweight="bold")
plt.show()

# %% [markdown]
# After token 4 plain addition reads J *and* A under key 1. The delta rule reads A alone. The keys are not orthogonal,
# so a write also moves what similar keys read: the ghosts in both rows. That is the price of a memory of fixed size,
# and section 8 measures it.
#
# The same steps as heat maps of the state, one row per key channel:

# %%
figure, axes = plt.subplots(2, 4, figsize=(11, 3.2), sharex=True, sharey=True)
for row, (name, after) in zip(axes, states.items()):
    for t, (ax, S) in enumerate(zip(row, after)):
        ax.imshow(S, cmap="RdBu_r", vmin=-1.2, vmax=1.2, aspect="auto")
        ax.set_title(f"S after token {t + 1}")
    row[0].set_ylabel(f"{name}\nkey channel")
for ax in axes[1]:
    ax.set_xlabel("value channel (pixel)")
plt.show()

k_toy, v_toy = np.stack([k for k, _ in tokens]), np.stack([glyphs[letter] for _, letter in tokens])
_, S_reference = reference(k_toy, k_toy, v_toy, np.zeros_like(k_toy), np.ones(4))
check("delta rule, state after four tokens", states["delta rule"][-1], S_reference)
check("key 1 reads the A", states["delta rule"][-1].T @ keys[0], glyphs["A"])

# %% [markdown]
# Two more ways to see the same step. It is one step of gradient descent with rate $\beta$ on the error of the reading,
# $\tfrac12 \lVert v - S^\top k \rVert^2$. And it is a linear map of the state,
#
# $$S \leftarrow (I - \beta k k^\top)\, S + \beta\, k v^\top,$$
#
# which leaves everything orthogonal to $k$ alone and multiplies what lies along $k$ by $1 - \beta$: $\beta = 1$
# replaces, $\beta = \tfrac12$ goes half of the way, and $\beta = 2$ (`beta_max=2.0` in jfla) mirrors, an eigenvalue of
# $-1$.

# %%
S, k, v = states["delta rule"][2], keys[0], glyphs["A"]
gradient = jax.grad(lambda S: 0.5 * jnp.sum((v - S.T @ k) ** 2))(jnp.asarray(S))
check("a step down the gradient", S - 0.7 * np.asarray(gradient), write_delta(S, k, v, beta=0.7))
along_k = [k @ (np.eye(K) - beta * np.outer(k, k)) @ k for beta in (0.5, 1, 2)]
print(
    "eigenvalue of I - beta k k^T along k, for beta = 0.5, 1, 2:",
    *(f"{abs(x) if abs(x) < 1e-9 else x:.1f}" for x in along_k),
)

# %% [markdown]
# ## 2. Forgetting
#
# Before each write the state decays. In **Gated DeltaNet** one number per token and head does it, in **Kimi Delta
# Attention** every key channel has its own: a row of $S$ can forget within a few tokens while another keeps what it has
# for thousands.
#
# $$S \leftarrow e^{g_t} \odot S \qquad \text{GDN: } g_t \text{ a number.} \quad \text{KDA: } g_t \in \mathbb{R}^K,
# \text{ row } d \text{ of } S \text{ is multiplied by } e^{g_{td}}$$

# %%
S = states["delta rule"][-1]
rates = {"GDN: one rate": np.full(K, 0.05), "KDA: a rate\nper channel": np.geomspace(0.002, 0.5, K)}
figure, axes = plt.subplots(2, 5, figsize=(11, 3.2), sharex=True, sharey=True)
for row, (name, rate) in zip(axes, rates.items()):
    for ax, wait in zip(row, (0, 3, 10, 30, 100)):
        ax.imshow(np.exp(-rate * wait)[:, None] * S, cmap="RdBu_r", vmin=-1.2, vmax=1.2, aspect="auto")
        ax.set_title(f"{wait} tokens later")
    row[0].set_ylabel(name)
plt.show()

# %% [markdown]
# What token $j$ wrote has decayed, when token $i$ reads it, by every decay in between:
#
# $$D_{ijd} = \exp\Big(\sum_{m = j+1}^{i} g_{md}\Big) \quad (i \ge j)$$
#
# Each channel has a lower triangle of such factors. The example that the rest of this notebook works on has 64 tokens
# that go through 6 topics in turn (the keys of a topic are alike), channels with rates from slow to fast, and a head
# that wants to forget nearly everything at token 40.

# %%
C, K, V = 64, 16, 16
rng = np.random.default_rng(0)


def example(T):
    topics = np.linalg.qr(rng.standard_normal((K, K)))[0][np.arange(T) % 6]
    q, k = (topics + 0.1 * rng.standard_normal((T, K)) for _ in range(2))
    k, q = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (k, q))
    g = -np.geomspace(0.001, 0.2, K) * rng.gamma(1.0, size=(T, 1))
    g[40] -= 2.0
    return q, k, rng.standard_normal((T, V)), g, rng.uniform(0.4, 1.0, T)


q, k, v, g, beta = example(C)


def pair_decay(g):
    """D [C, C, K]: every exponent is a sum over the tokens in between."""
    D = np.zeros((len(g), *g.shape))
    for j in range(len(g)):
        D[j, j] = 1
        D[j + 1 :, j] = np.exp(np.cumsum(g[j + 1 :], axis=0))
    return D


D = pair_decay(g)
figure, axes = plt.subplots(1, 4, figsize=(11, 3.1), sharey=True)
for ax, channel in zip(axes, (0, 5, 10, 15)):
    image = ax.imshow(np.where(np.tri(C), D[..., channel], np.nan), vmin=0, vmax=1, cmap="viridis")
    ax.set(title=f"D, channel {channel}: {-g[:, channel].mean():.3f} a token", xlabel="token j, writes")
axes[0].set_ylabel("token i, reads")
figure.colorbar(image, ax=axes, shrink=0.85)
plt.show()

# %% [markdown]
# ## 3. From tokens to chunks
#
# Token by token, $T$ small steps must wait for each other. A chunk does $C$ of them at once, with matrix products.
#
# Let $S$ be the state at the start of the chunk, and call what token $j$ really writes $\tilde v_j = \beta_j (v_j -
# S_j^\top k_j)$, with $S_j$ the state as token $j$ finds it after its decay. That state is the old one plus the earlier
# writes, each with its decay:
#
# $$S_i = e^{g_{1 \dots i}} \odot S + \sum_{j < i} (D_{ij} \odot k_j)\, \tilde v_j^\top$$
#
# Put this into the definition of $\tilde v_i$. With
#
# $$L_{ij} = \beta_i \sum_d k_{id}\, k_{jd}\, D_{ijd} \;\; (j < i), \qquad
# A_{ij} = K^{-1/2} \sum_d q_{id}\, k_{jd}\, D_{ijd} \;\; (j \le i)$$
#
# it is a linear system with a unit lower triangular matrix, and its solution gives everything else:
#
# $$(I + L)\,\tilde V = \beta \odot \big(V - (k \odot e^{g_{1 \dots i}})\, S\big) \quad\Longrightarrow\quad
# \tilde V = X \,\beta \odot \big(V - k_{\text{in}} S\big), \quad X = (I + L)^{-1}$$
#
# $$O = q_{\text{in}} S + A \tilde V, \qquad
# S_{\text{end}} = e^{g_{1 \dots C}} \odot S + k_{\text{out}}^\top \tilde V$$
#
# where $k_{\text{in}}, q_{\text{in}}$ are decayed from the start of the chunk to their token ($q$ with its scale) and
# $k_{\text{out}}$ from the token to the end.


# %%
def sums_after(g):
    """Sum of g over the tokens behind each token: added from the end, not subtracted from the total."""
    return np.vstack([np.cumsum(g[:0:-1], axis=0)[::-1], np.zeros_like(g[:1])])


def chunk(S, q, k, v, g, beta):
    D, scale, beta = pair_decay(g), k.shape[1] ** -0.5, beta[:, None]
    A = scale * np.einsum("id,jd,ijd->ij", q, k, D)
    L = beta * np.tril(np.einsum("id,jd,ijd->ij", k, k, D), -1)
    X = np.linalg.inv(np.eye(len(k)) + L)
    e_in, e_out = np.exp(np.cumsum(g, axis=0)), np.exp(sums_after(g))
    v_new = X @ (beta * (v - (k * e_in) @ S))
    o = scale * (q * e_in) @ S + A @ v_new
    S = np.exp(g.sum(0))[:, None] * S + (k * e_out).T @ v_new
    return o, S, (A, L, X, v_new)


S0 = 0.3 * rng.standard_normal((K, V))
o, S_end, (A, L, X, v_new) = chunk(S0, q, k, v, g, beta)
o_reference, S_reference = reference(q, k, v, g, beta, S0)
check("one chunk, outputs", o, o_reference)
check("one chunk, state at its end", S_end, S_reference)

# %% [markdown]
# A sequence is a loop over chunks that hands the state on. The work per token does not depend on $T$, and only one
# small step in $C$ tokens has to wait.

# %%
long = example(5 * C)
S, outputs = S0, []
for start in range(0, 5 * C, C):
    o_chunk, S, _ = chunk(S, *[x[start : start + C] for x in long])
    outputs.append(o_chunk)
o_reference, S_reference = reference(*long, S0)
check("five chunks, outputs", np.vstack(outputs), o_reference)
check("five chunks, final state", S, S_reference)

# %% [markdown]
# The matrices of the example chunk. The stripes are the topics: every sixth token has a similar key. The cut at token
# 40 is the strong decay. The last picture is the whole operator on an empty state, $A X \,\mathrm{diag}(\beta)$: how
# much of $v_j$ ends up in $o_i$. Compare it with $A$, which plain linear attention would use: there a token reads all
# earlier tokens of its topic, with the delta rule the newest ones, because the older have been overwritten.

# %%
figure, axes = plt.subplots(1, 4, figsize=(12, 3.4), sharey=True)
operator = A @ X @ np.diag(beta)
titles = (
    "$A$: who reads whom",
    "$L$: who corrects whom",
    "$X = (I + L)^{-1}$",
    r"$A X\,\mathrm{diag}(\beta)$: the operator",
)
for ax, matrix, title in zip(axes, (A, L, X, operator), titles):
    limit = np.abs(matrix[~np.eye(C, dtype=bool)]).max()
    ax.imshow(np.where(np.tri(C), matrix, np.nan), cmap="RdBu_r", vmin=-limit, vmax=limit)
    ax.set(title=title, xlabel="token j")
axes[0].set_ylabel("token i")
plt.show()
check("the operator on v, from an empty state", operator @ v, reference(q, k, v, g, beta)[0])

# %% [markdown]
# ## 4. The inverse, by doubling blocks
#
# $(I + L)^{-1}$ of a unit lower triangular matrix could be found row by row, 64 steps that wait for each other. Blocks
# are better. If the two diagonal blocks are inverted already, one correction gives the square below them:
#
# $$\begin{pmatrix} P & 0 \\ M & Q \end{pmatrix}^{-1} =
# \begin{pmatrix} P^{-1} & 0 \\ -Q^{-1} M P^{-1} & Q^{-1} \end{pmatrix}$$
#
# Start from blocks of one token, whose inverse is 1, and double: 1, 2, 4, ..., 32. Six rounds of two matrix products do
# the chunk, and each is $X \leftarrow X - X\, M X$ with $M$ the squares of $L$ that this round joins.


# %%
def inverse_by_doubling(L):
    row, col = np.indices(L.shape)
    X, steps = np.eye(len(L), dtype=L.dtype), [np.eye(len(L), dtype=L.dtype)]
    size = 1
    while size < len(L):
        joined = (row // size % 2 == 1) & (col // size == row // size - 1)
        X = X - X @ (np.where(joined, L, 0) @ X)
        steps.append(X)
        size *= 2
    return steps


steps = inverse_by_doubling(L)
check("inverse by doubling", steps[-1], X)
check("jfla's inverse", unit_lower_inverse(jnp.asarray(L)), X)

figure, axes = plt.subplots(1, 7, figsize=(12, 2.2))
for size, (ax, step) in enumerate(zip(axes, steps)):
    ax.imshow(np.where(step == 0, np.nan, step), cmap="RdBu_r", vmin=-0.6, vmax=0.6)
    ax.set_title(f"blocks of {2**size}", fontsize=9)
    ax.set(xticks=[], yticks=[])
    ax.spines[:].set_visible(True)
plt.show()

# %% [markdown]
# There is a shorter way on paper. $L$ is nilpotent, so the series $I - L + L^2 - \dots$ ends, and as a product it needs
# only squarings: $(I - L)(I + L^2)(I + L^4) \cdots (I + L^{32})$. But powers of $L$ can be huge where the inverse is
# small. The worst case is an ordinary one: the same key again and again. Then $L$ is all ones, the inverse has entries
# 1 and -1 only, and the powers hold binomial coefficients.

# %%
ones = np.tril(np.ones((C, C)), -1)
print(f"largest entry of L^32 for a repeated key: {np.abs(np.linalg.matrix_power(ones, 32)).max():.1e}")
print(f"largest entry of the inverse: {np.abs(np.linalg.inv(np.eye(C) + ones)).max():.0f}")


def inverse_by_powers(L):
    eye, power = np.eye(len(L), dtype=L.dtype), -L
    X = eye + power
    for _ in range(5):
        power = power @ power
        X = X @ (eye + power)
    return X


shared = np.linspace(0, 0.95, 20)  # share of a common direction in every key
errors = {"powers of L": [], "doubling blocks": []}
noise, common = rng.standard_normal((C, K)), rng.standard_normal(K)
for share in shared:
    mixed = share * common + (1 - share) * noise
    mixed /= np.linalg.norm(mixed, axis=1, keepdims=True)
    lower = np.tril(mixed @ mixed.T, -1).astype(np.float32)
    exact = np.linalg.inv(np.eye(C) + lower.astype(np.float64))
    errors["powers of L"].append(error(inverse_by_powers(lower), exact))
    errors["doubling blocks"].append(error(inverse_by_doubling(lower)[-1], exact))

figure, ax = plt.subplots(figsize=(6.5, 3))
for name, values in errors.items():
    ax.semilogy(shared, values, "o-", markersize=4, label=name)
ax.set(title="relative error of the inverse in float32", xlabel="how alike the keys are (1: all the same)")
ax.axhline(1, color="#6b7280", linewidth=1, linestyle="--")
ax.legend()
plt.show()
assert errors["doubling blocks"][-1] < 1e-6 < 1 < errors["powers of L"][-1]

# %% [markdown]
# ## 5. Exponents are sums, and no plain differences
#
# `pair_decay` above builds $C \times C \times K$ numbers, far too many for a fast program. Tempting shortcuts use the
# running sum $G_i = g_1 + \dots + g_i$:
#
# 1. **Factors.** $D_{ij} = e^{G_i} \cdot e^{-G_j}$ turns $A$ into one matrix product of $q \odot e^{G}$ and $k \odot
#    e^{-G}$. But $e^{-G_j}$ overflows in float32 as soon as a channel has decayed by more than 88 in the chunk.
# 2. **Differences.** $D_{ij} = e^{G_i - G_j}$ does not overflow. But after one strong decay $G$ is a large number, and
#    the small decays behind it are lost in its last digits.
#
# Both compute the same thing on paper. Here they are in float32, next to jfla's `decayed_dot`. It takes differences of
# running sums too, but of two parts: multiples of $2^{-8}$, whose sums and differences are exact in float32, and what
# is left of every gate, whose sums are small.


# %%
def by_factors(q, k, g):
    G = np.cumsum(g, axis=0)
    return np.tril((q * np.exp(G)) @ (k * np.exp(-G)).T)


def by_differences(q, k, g):
    G = np.cumsum(g, axis=0)
    difference = np.where(np.tri(len(g), dtype=bool)[..., None], G[:, None] - G[None], -np.inf)
    return np.einsum("id,jd,ijd->ij", q, k, np.exp(difference))


@jax.jit
def by_jfla(q, k, g):
    with jax.default_matmul_precision("highest"):
        return decayed_dot(q[None], k, decay_sums(g), scalar_gate=False)[0]


forms = {"factors": by_factors, "differences": by_differences, "jfla": by_jfla}
strengths = np.geomspace(1e-2, 1e6, 25)


def gate_errors(make_gate):
    errors = {name: [] for name in forms}
    for strength in strengths:
        gate = make_gate(strength).astype(np.float32)
        exact = np.einsum("id,jd,ijd->ij", q, k, pair_decay(gate.astype(np.float64)))
        for name, form in forms.items():
            with np.errstate(all="ignore"):
                errors[name].append(error(form(*(x.astype(np.float32) for x in (q, k)), gate), exact))
    return errors


def every_token(strength):
    return -strength * rng.uniform(0.5, 1.5, (C, K))


def one_token(strength):
    gate = -0.05 * rng.uniform(0.5, 1.5, (C, K))
    gate[10] = -strength
    return gate


figure, axes = plt.subplots(1, 2, figsize=(11, 3.4), sharey=True)
measured = {
    "every token decays by x": gate_errors(every_token),
    "one token decays by x, the others by 0.05": gate_errors(one_token),
}
for ax, (title, errors) in zip(axes, measured.items()):
    for name, values in errors.items():
        values = np.array(values)
        style = {"linewidth": 6, "alpha": 0.5} if name == "factors" else {"marker": "o", "markersize": 4}
        (line,) = ax.loglog(strengths, np.where(np.isfinite(values), values, np.nan), label=name, **style)
        broken = ~np.isfinite(values)
        ax.plot(strengths[broken], np.full(broken.sum(), 30.0), "x", color=line.get_color())
    ax.set(title=title, xlabel="x", ylim=(1e-9, 100))
axes[0].set_ylabel("relative error, float32\n(x: inf or nan)")
axes[1].legend(loc="center left")
plt.show()
assert max(max(errors["jfla"]) for errors in measured.values()) < 1e-6
assert not np.isfinite(measured["every token decays by x"]["factors"][-1])

# %% [markdown]
# The same inside the whole operator: a chunk with one token that empties the state, in float32.

# %%
gate = one_token(1000.0)
o_exact, S_exact = reference(q, k, v, gate, beta, S0)
arrays = [jnp.asarray(x, jnp.float32)[None, :, None] for x in (q, k, v, gate)]
out = jfla.chunk_kda(
    *arrays, jnp.asarray(beta, jnp.float32)[None, :, None], initial_state=jnp.asarray(S0, jnp.float32)[None, None],
    return_final_state=True,
)  # fmt: skip
check("jfla.chunk_kda in float32, outputs", out.output[0, :, 0], o_exact, bound=1e-5)
check("jfla.chunk_kda in float32, final state", out.final_state[0, 0], S_exact, bound=1e-5)

# %% [markdown]
# ## 6. Anchors
#
# How can a matrix product have factors without overflow? Cut the chunk in two halves. For a late token $i$ and an early
# token $j$, everything passes the border between them, so take the border as **anchor**:
#
# $$D_{ij} = \underbrace{\exp\Big(\sum_{m \text{ from the border to } i} g_m\Big)}_{\le 1} \cdot
# \underbrace{\exp\Big(\sum_{m \text{ from } j \text{ to the border}} g_m\Big)}_{\le 1}$$
#
# Both exponents are sums of decays, so both factors lie between 0 and 1 whatever the gate: nothing can overflow, and if
# a factor underflows to 0, the true value is as small. The square below the diagonal is one matrix product. The two
# triangles that remain are chunks of half the size, with anchors of their own, down to single tokens. Every anchor lies
# before the tokens that read through it, so no rounding depends on a later token: the result is causal to the bit.


# %%
def decayed_dot_by_halves(q, k, g):
    """A without its scale, by halving; every exponential is of a sum of decays."""
    if len(k) == 1:
        return q @ k.T
    half = len(k) // 2
    late, early = q[half:] * np.exp(np.cumsum(g[half:], axis=0)), k[:half] * np.exp(sums_after(g[:half]))
    return np.block([
        [decayed_dot_by_halves(q[:half], k[:half], g[:half]), np.zeros((half, half))],
        [late @ early.T, decayed_dot_by_halves(q[half:], k[half:], g[half:])],
    ])  # fmt: skip


check("decayed dot by halves", decayed_dot_by_halves(q, k, g), np.einsum("id,jd,ijd->ij", q, k, D))
check("jfla's decayed dot", by_jfla(q, k, g), np.einsum("id,jd,ijd->ij", q, k, D))

i, j = np.indices((C, C))
level = np.where(i > j, np.floor(np.log2(np.maximum(i ^ j, 1))), np.nan)  # the highest bit in which i and j differ
figure, (left, middle, right) = plt.subplots(1, 3, figsize=(12, 3.6))
image = left.imshow(level, cmap=plt.get_cmap("viridis", 6), vmin=-0.5, vmax=5.5)
bar = figure.colorbar(image, ax=left, shrink=0.8, ticks=range(6))
bar.ax.set_yticklabels([f"{2**n} x {2**n}" for n in range(6)])
left.set(title="the squares, one color per round", xlabel="token j", ylabel="token i")

strong = 150 * g[:, 8] / -g[:, 8].sum()
G = np.cumsum(strong)
middle.plot(np.arange(C), G, color="#6b7280", label="$G_i$: running sum")
middle.plot(np.arange(C), -G, color="#d9480f", label="$-G_j$: factor form")
middle.axhline(88.7, color="#d9480f", linewidth=1, linestyle="--")
middle.annotate("float32 overflows", (1, 94), color="#d9480f", fontsize=8.5)
middle.set(title="exponents without anchors", xlabel="token", ylim=(-190, 190))
middle.legend(fontsize=8, loc="lower left")
right.plot(np.arange(32), sums_after(strong[:32, None])[:, 0], label="early half: token to anchor")
right.plot(np.arange(32, 64), np.cumsum(strong[32:]), label="late half: anchor to token")
right.axvline(31.5, color="#1f2430", linewidth=1, linestyle=":")
right.set(title="exponents with an anchor at 32", xlabel="token", ylim=(-190, 190))
right.legend(fontsize=8, loc="upper left", frameon=True, framealpha=1, edgecolor="none")
plt.show()

# %% [markdown]
# ## 7. The gradients
#
# Training needs $\partial$ of everything. With $\mathrm{d}O$ and the cotangent $\mathrm{d}S_{\text{end}}$ of the
# chunk's last state given, every gradient has a closed form. Three ideas carry it:
#
# - **The solve.** $\tilde V = X R$ with the right side $R$. Its cotangent goes back through the transposed inverse, $Y
#   = X^\top \mathrm{d}\tilde V$, and the matrix gets $\mathrm{d}L = -\mathrm{stril}(Y \tilde V^\top)$: no derivative of
#   an inverse is ever formed.
# - **Two scans.** States run forward and their cotangents backward, and neither needs the other.
# - **The gate for free.** Where $x$ meets $e^{\text{sum of decays}}$, the derivative with respect to that sum is $x
#   \cdot \mathrm{d}x$. So $\mathrm{d}g$ follows from $\mathrm{d}q$ and $\mathrm{d}k$ without a pass over pairs of its
#   own.


# %%
def chunk_gradients(S, q, k, v, g, beta, do, dS_end):
    _, _, (A, _, X, v_new) = chunk(S, q, k, v, g, beta)
    D, q, beta = pair_decay(g), q * k.shape[1] ** -0.5, beta[:, None]
    e_in, e_out, decay = np.exp(np.cumsum(g, axis=0)), np.exp(sums_after(g)), np.exp(g.sum(0))[:, None]
    y = X.T @ (A.T @ do + (k * e_out) @ dS_end)
    dA, dL = np.tril(do @ v_new.T), -np.tril(y @ v_new.T, -1)

    dq = e_in * (do @ S.T) + np.einsum("ij,jd,ijd->id", dA, k, D)  # q and k as they meet decays since the start ...
    dk_beta = np.einsum("ij,jd,ijd->id", dL, k, D)
    dk_late = beta * dk_beta - e_in * ((beta * y) @ S.T)
    dk_out = e_out * (v_new @ dS_end.T)  # ... and k as it meets decays up to the end
    dk_early = np.einsum("ij,id,ijd->jd", dA, q, D) + np.einsum("ij,id,ijd->jd", dL, beta * k, D) + dk_out

    dG = q * dq + k * dk_late - k * dk_early
    dG[-1] += (decay * S * dS_end).sum(1) + (k * dk_out).sum(0)
    return {
        "q": dq * k.shape[1] ** -0.5,
        "k": dk_late + dk_early,
        "v": beta * y,
        "g": np.cumsum(dG[::-1], axis=0)[::-1],
        "beta": (dk_beta * k).sum(1) + (y * (v - (k * e_in) @ S)).sum(1),
        "S": decay * dS_end + (q * e_in).T @ do - (k * e_in).T @ (beta * y),
    }


do, dS_end = rng.standard_normal((C, V)), rng.standard_normal((K, V))
closed_form = chunk_gradients(S0, q, k, v, g, beta, do, dS_end)


def through_the_definition(q, k, v, g, beta, S):
    arrays = [x[None, :, None] for x in (q, k, v, g, beta)]
    out = jfla.reference.recurrent_kda(*arrays, initial_state=S[None, None], return_final_state=True)
    return out.output[0, :, 0], out.final_state[0, 0]


primals = [jnp.asarray(x) for x in (q, k, v, g, beta, S0)]
by_jax = jax.jit(lambda x: jax.vjp(through_the_definition, *x)[1]((do, dS_end)))(primals)
for (name, dx), ref in zip(closed_form.items(), by_jax):
    check(f"d{name}", dx, np.asarray(ref))

# %% [markdown]
# In float64 the differences of section 5 do no harm, and `dG` above is one. In float32 jfla forms these sums, too, over
# exactly the tokens that they span (`jfla/decay.py`, `jfla/gradients.py`).
#
# ## 8. How much can a head remember?
#
# A state has $K \times V$ numbers, room for $K$ pairs if their keys are orthogonal. Real keys are not. Write $n$ pairs
# with random keys and values one after the other, without decay and with $\beta = 1$, and read them all back at the
# end. A pair's **age** is the number of writes since its own.
#
# - Plain addition treats all ages alike: the relative error of a reading is $\sqrt{n / K}$ and grows with every pair.
# - The delta rule reads the newest pair exactly. Each later write moves an old reading a little, and after many writes
#   the expected relative error at age $a$ is $\sqrt{2\,(1 - e^{-a/K})}$: the memory is a window of about $K$ pairs.

# %%
sizes, batch = (16, 32, 64), 48
measured = {}
for size in sizes:
    n = 8 * size
    keys = rng.standard_normal((batch, n, 1, size))
    keys = jnp.asarray(keys / np.linalg.norm(keys, axis=-1, keepdims=True))
    values = jnp.asarray(rng.standard_normal((batch, n, 1, 32)))
    arrays = keys, keys, values, jnp.zeros((batch, n, 1)), jnp.ones((batch, n, 1))
    delta = jfla.recurrent_gdn(*arrays, return_final_state=True).final_state[:, 0]
    plain = jnp.einsum("bnk,bnv->bkv", keys[:, :, 0], values[:, :, 0])
    for name, memory in (("delta", delta), ("plain", plain)):
        wrong = jnp.einsum("bkv,bnk->bnv", memory, keys[:, :, 0]) - values[:, :, 0]
        measured[name, size] = np.sqrt(np.mean(np.asarray(wrong) ** 2, axis=(0, 2)))[::-1]  # by age; values have size 1

figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.6))
colors = ("#93c5fd", "#3b82f6", "#1e3a8a")
for size, color in zip(sizes, colors):
    age = np.arange(8 * size) / size
    left.plot(age, measured["delta", size], ".", color=color, markersize=4, label=f"delta rule, K = {size}")
    left.plot(age, measured["plain", size], color="#d9480f", linewidth=0.8, alpha=0.4 + 0.005 * size)
x = np.linspace(0, 8, 400)
left.plot(x, np.sqrt(2 * (1 - np.exp(-x))), color="#1f2430", linewidth=1, label=r"$\sqrt{2(1 - e^{-a/K})}$")
left.annotate("plain addition, all three K", (4.2, 3.08), color="#d9480f", fontsize=9)
left.set(
    title="reading 8 K pairs back", xlabel="age of the pair, in units of K", ylabel="relative error", ylim=(0, 3.4)
)
left.legend(fontsize=8, loc="lower right", bbox_to_anchor=(1, 0.42))

size, passes = 32, 40
for share, color in zip((0.25, 0.5, 0.75, 1.0), ("#c4b5fd", "#8b5cf6", "#6d28d9", "#3b0764")):
    n = int(share * size)
    keys = rng.standard_normal((n, size))
    keys /= np.linalg.norm(keys, axis=1, keepdims=True)
    values, S, errors = rng.standard_normal((n, 32)), np.zeros((size, 32)), []
    for _ in range(passes):
        for key, value in zip(keys, values):
            S = write_delta(S, key, value)
        errors.append(error(keys @ S, values))
    right.semilogy(range(1, passes + 1), errors, color=color, label=f"{n} pairs")
right.set(
    title="delta rule, K = 32: the same pairs again and again", xlabel="passes", ylabel="relative error of all readings"
)
right.legend(fontsize=8)
plt.show()

ages = slice(0, 4 * 64)
expected = np.sqrt(2 * (1 - np.exp(-np.arange(4 * 64) / 64)))
check("measured and expected error, K = 64", measured["delta", 64][ages], expected, bound=0.05)

# %% [markdown]
# Left: in units of $K$ the three curves are one. A head of twice the key length remembers twice as far back; the decay
# decides what may be forgotten earlier, channel by channel. Right: a pair that is written again is corrected again. As
# long as the keys are linearly independent, which takes $n \le K$, the readings converge to the exact values, the more
# slowly the closer $n$ is to $K$. (This is Kaczmarz' method for linear systems.) Plain addition would only add the
# pairs once more.
#
# `03_train_and_generate` shows what this difference is worth to a trained model.
