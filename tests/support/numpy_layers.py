"""The published layers in NumPy, token by token, straight from the tensors of a checkpoint."""

import math

import numpy as np

from support import golden_layers

D, H, HV, K, V, W = 24, 2, 4, 8, 16, 4
KEY, VALUE, R = H * K, HV * V, HV // H
CONFIG = {"hidden_size": D, "H": H, "HV": HV, "K": K, "V": V, "norm_eps": 1e-5}
SHAPES = {
    "fla_kda": {
        "A_log": [HV], "dt_bias": [HV * K], "q_proj.weight": [KEY, D], "k_proj.weight": [KEY, D],
        "v_proj.weight": [VALUE, D], "q_conv1d.weight": [KEY, 1, W], "k_conv1d.weight": [KEY, 1, W],
        "v_conv1d.weight": [VALUE, 1, W], "f_proj.0.weight": [V, D], "f_proj.1.weight": [HV * K, V],
        "b_proj.weight": [HV, D], "g_proj.0.weight": [V, D], "g_proj.1.weight": [VALUE, V], "g_proj.1.bias": [VALUE],
        "o_norm.weight": [V], "o_proj.weight": [D, VALUE],
    },
    "kimi_linear": {
        "A_log": [1, 1, HV, 1], "dt_bias": [HV * K], "q_proj.weight": [KEY, D], "k_proj.weight": [KEY, D],
        "v_proj.weight": [VALUE, D], "q_conv1d.weight": [KEY, 1, W], "k_conv1d.weight": [KEY, 1, W],
        "v_conv1d.weight": [VALUE, 1, W], "f_a_proj.weight": [V, D], "f_b_proj.weight": [HV * K, V],
        "b_proj.weight": [HV, D], "g_a_proj.weight": [V, D], "g_b_proj.weight": [VALUE, V], "o_norm.weight": [V],
        "o_proj.weight": [D, VALUE],
    },
    "fla_gdn": {
        "A_log": [HV], "dt_bias": [HV], "q_proj.weight": [KEY, D], "k_proj.weight": [KEY, D],
        "v_proj.weight": [VALUE, D], "a_proj.weight": [HV, D], "b_proj.weight": [HV, D],
        "q_conv1d.weight": [KEY, 1, W], "k_conv1d.weight": [KEY, 1, W], "v_conv1d.weight": [VALUE, 1, W],
        "g_proj.weight": [VALUE, D], "o_norm.weight": [V], "o_proj.weight": [D, VALUE],
    },
    "qwen3_next": {
        "A_log": [HV], "dt_bias": [HV], "conv1d.weight": [2 * KEY + VALUE, 1, W],
        "in_proj_qkvz.weight": [2 * KEY + 2 * VALUE, D], "in_proj_ba.weight": [2 * HV, D], "norm.weight": [V],
        "out_proj.weight": [D, VALUE],
    },
    "qwen3_5": {
        "A_log": [HV], "dt_bias": [HV], "conv1d.weight": [2 * KEY + VALUE, 1, W],
        "in_proj_qkv.weight": [2 * KEY + VALUE, D], "in_proj_z.weight": [VALUE, D], "in_proj_b.weight": [HV, D],
        "in_proj_a.weight": [HV, D], "norm.weight": [V], "out_proj.weight": [D, VALUE],
    },
}  # fmt: skip


def random_weights(family):
    rng = np.random.default_rng(len(family))
    return {
        name: (rng.normal(size=shape) / math.sqrt(shape[-1])).astype(np.float32)
        for name, shape in SHAPES[family].items()
    }


def silu(x):
    return x / (1 + np.exp(-x))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def softplus(x):
    return np.logaddexp(0, x)


def streams(family, w, x):
    """(q, k, v before their convolutions [T, D], decay input, beta logits, output gate, convolutions [D, W])."""
    projected = {
        name: x @ w[name].T for name in w if w[name].ndim == 2 and w[name].shape[1] == D
    }
    if family == "qwen3_next":
        # The published reading: per key head q, k, then the value rows and gate rows of its value heads.
        qkvz = projected["in_proj_qkvz.weight"].reshape(len(x), H, 2 * K + 2 * R * V)
        q, k, v, z = np.split(qkvz, [K, 2 * K, 2 * K + R * V], axis=-1)
        b, a = np.split(
            projected["in_proj_ba.weight"].reshape(len(x), H, 2 * R), 2, axis=-1
        )
        v, z, b, a = (
            v.reshape(-1, HV, V),
            z.reshape(-1, HV, V),
            b.reshape(-1, HV),
            a.reshape(-1, HV),
        )
    elif family == "qwen3_5":
        q, k, v = np.split(projected["in_proj_qkv.weight"], [KEY, 2 * KEY], axis=-1)
        z, b, a = (projected[f"in_proj_{name}.weight"] for name in "zba")
    else:
        q, k, v, b = (projected[f"{name}_proj.weight"] for name in "qkvb")
        if family == "fla_gdn":
            a, z = projected["a_proj.weight"], projected["g_proj.weight"]
        elif family == "fla_kda":
            a = x @ w["f_proj.0.weight"].T @ w["f_proj.1.weight"].T
            z = x @ w["g_proj.0.weight"].T @ w["g_proj.1.weight"].T + w["g_proj.1.bias"]
        else:
            a = x @ w["f_a_proj.weight"].T @ w["f_b_proj.weight"].T
            z = x @ w["g_a_proj.weight"].T @ w["g_b_proj.weight"].T
    if "conv1d.weight" in w:
        taps = w["conv1d.weight"][:, 0]
    else:
        taps = np.concatenate([w[f"{name}_conv1d.weight"][:, 0] for name in "qkv"])
    return (
        q.reshape(-1, KEY),
        k.reshape(-1, KEY),
        v.reshape(-1, VALUE),
        a,
        b,
        z.reshape(-1, HV, V),
        taps,
    )


def peer(family, w, x):
    """The layer in numpy float64, token by token, straight from the checkpoint's tensors."""
    w, x = {name: a.astype(np.float64) for name, a in w.items()}, x.astype(np.float64)
    q, k, v, a, beta, z, taps = streams(family, w, x)
    qkv = np.pad(np.concatenate([q, k, v], axis=1), ((W - 1, 0), (0, 0)))
    qkv = silu(sum(qkv[i : i + len(x)] * taps[:, i] for i in range(W)))
    q, k, v = np.split(qkv, [KEY, 2 * KEY], axis=1)
    q, k = (y.reshape(-1, H, K) for y in (q, k))
    q, k = (y / np.sqrt((y * y).sum(-1, keepdims=True) + 1e-6) for y in (q, k))
    v, rate = v.reshape(-1, HV, V), np.exp(w["A_log"].reshape(HV, 1))
    g = -rate * softplus(a.reshape(len(x), HV, -1) + w["dt_bias"].reshape(HV, -1))
    state, outputs = np.zeros((HV, K, V)), []
    for t in range(len(x)):
        kt, qt = np.repeat(k[t], R, axis=0), np.repeat(q[t], R, axis=0)
        state = state * np.exp(g[t])[:, :, None]
        error = sigmoid(beta[t])[:, None] * (v[t] - np.einsum("hkv,hk->hv", state, kt))
        state = state + kt[:, :, None] * error[:, None]
        outputs.append(np.einsum("hkv,hk->hv", state, qt * K**-0.5))
    o = np.stack(outputs)
    norm = w["norm.weight" if "norm.weight" in w else "o_norm.weight"]
    o = o / np.sqrt((o * o).mean(-1, keepdims=True) + CONFIG["norm_eps"]) * norm
    o = o * (sigmoid(z) if family in golden_layers.KDA else silu(z))
    return (
        o.reshape(len(x), -1)
        @ w["out_proj.weight" if "out_proj.weight" in w else "o_proj.weight"].T
    )
