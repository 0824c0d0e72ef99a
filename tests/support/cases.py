"""What the op tests share: configurations, drawn inputs, a numpy float64 oracle, one jitted call per configuration."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

import jfla

PADDING = 0
TOKENS = ("q", "k", "v", "g", "beta")  # one row per token


@dataclasses.dataclass(frozen=True)
class Config:
    """The static part of a test call. `gate` is None, "softplus" or "sigmoid"; a trailing "-" leaves dt_bias out."""

    op: str = "kda"
    batch: int = 2
    time: int = 130
    heads: int = 1
    group: int = 1  # HV / H
    key_dim: int = 8
    value_dim: int = 4
    gate: str | None = None
    beta_max: float | None = None
    qk_norm: bool = False
    scale: float | None = None
    state: bool = False
    final: bool = False
    segments: int | None = None
    dtype: str = "float64"

    @property
    def value_heads(self) -> int:
        return self.heads * self.group

    def __str__(self) -> str:
        changed = (f"{f.name}={getattr(self, f.name)}" for f in dataclasses.fields(self)
                   if f.name != "op" and getattr(self, f.name) != f.default)  # fmt: skip
        return "-".join([self.op, *changed])


@dataclasses.dataclass(frozen=True)
class Style:
    """What kind of numbers a call gets."""

    seed: int = 0
    gates: tuple[str, ...] = ("usual",)
    run: int = 1  # tokens in a row with the same kind of gate
    betas: tuple[float | None, ...] = (None,)  # None: uniform in (0, 2)
    repeated_keys: bool = False


GATES = {
    "none": lambda u: 0 * u,
    "weak": lambda u: -1e-4 * u,
    "usual": lambda u: -2 * u,
    "strong": lambda u: -30 * u,
    "wide": lambda u: -(10.0 ** (7 * u - 4)),
    "extreme": lambda u: -1000 + 0 * u,
    "empty": lambda u: -np.inf + 0 * u,
}

styles = st.builds(
    Style,
    seed=st.integers(0, 2**32 - 1),
    gates=st.lists(st.sampled_from(list(GATES)), min_size=1, max_size=4).map(tuple),
    run=st.sampled_from([1, 7, 16, 64]),
    betas=st.lists(st.sampled_from([None, 0.0, 1.0, 2.0]), min_size=1, max_size=4).map(
        tuple
    ),
    repeated_keys=st.booleans(),
)


def draw(
    config: Config, style: Style
) -> tuple[dict[str, np.ndarray], np.ndarray | None, dict[str, np.ndarray]]:
    """(inputs that have gradients, segment ids, cotangents), rounded to the config's dtype, held in float64."""
    rng = np.random.default_rng(style.seed)
    c, tokens = config, (config.batch, config.time)
    per_token = (c.value_heads, c.key_dim) if c.op == "kda" else (c.value_heads,)
    normal = rng.standard_normal
    q, k = normal((2, *tokens, c.heads, c.key_dim))
    if style.repeated_keys:
        k = np.where(rng.random((*tokens, 1, 1)) < 0.8, k[:, :1], k)
    if not c.qk_norm:
        k = k / np.linalg.norm(k, axis=-1, keepdims=True)
    x = {"q": q, "k": k, "v": normal((*tokens, c.value_heads, c.value_dim))}
    if c.gate is None:
        kinds = np.stack(
            [GATES[name](rng.random((*tokens, *per_token))) for name in style.gates]
        )
        choice = rng.integers(0, len(kinds), (*tokens, c.value_heads))
        choice = choice[:, np.arange(c.time) // style.run * style.run]
        choice = choice[None, ..., None] if c.op == "kda" else choice[None]
        x["g"] = np.take_along_axis(kinds, choice, axis=0)[0]
    else:
        x["g"] = rng.choice([1, 10]) * normal((*tokens, *per_token))
        x["a_log"] = rng.uniform(-3, 3, c.value_heads)
        if not c.gate.endswith("-"):
            x["dt_bias"] = normal(per_token)
    x["beta"] = 3 * normal((*tokens, c.value_heads))
    if c.beta_max is None:
        kinds = [
            rng.uniform(0, 2, x["beta"].shape)
            if b is None
            else np.full(x["beta"].shape, b)
            for b in style.betas
        ]
        x["beta"] = np.take_along_axis(
            np.stack(kinds), rng.integers(0, len(kinds), (1, *x["beta"].shape)), axis=0
        )[0]
    states = (
        c.batch,
        *([] if c.segments is None else [c.segments]),
        c.value_heads,
        c.key_dim,
        c.value_dim,
    )
    if c.state:
        x["initial_state"] = normal(states)
    ids = (
        None
        if c.segments is None
        else np.stack([_layout(rng, c.time, c.segments) for _ in range(c.batch)])
    )
    cotangents = {"output": normal(x["v"].shape)} | (
        {"final_state": normal(states)} if c.final else {}
    )
    inputs, cotangents = (
        {
            name: a.astype(jnp.dtype(dtype(c, name))).astype(np.float64)
            for name, a in arrays.items()
        }
        for arrays in (x, cotangents)
    )
    return inputs, ids, cotangents


def dtype(config: Config, name: str) -> str:
    """States and the gate's parameters stay float32 next to bfloat16 and float16."""
    wide = (
        name in ("a_log", "dt_bias", "initial_state", "final_state")
        and config.dtype != "float64"
    )
    return "float32" if wide else config.dtype


def _layout(rng: np.random.Generator, time: int, segments: int) -> np.ndarray:
    """Lengths of every kind: 0, 1, a chunk, whatever is left; then padding or none."""
    ids, left = [], time
    for segment in range(1, segments + 1):
        length = min(left, int(rng.choice([0, 1, 64, rng.integers(0, time + 1) // 2])))
        if segment == segments and rng.random() < 0.5:
            length = left
        ids, left = ids + [segment] * length, left - length
    return np.array(ids + [PADDING] * left, np.int32)


# The oracle: numpy, float64 (or complex128, to differentiate by an imaginary step), one token after the other.


def oracle(
    config: Config, x: dict[str, np.ndarray], ids: np.ndarray | None
) -> dict[str, np.ndarray]:
    """`output` and `final_state` by the definition."""
    c = config
    q, k, v, g, beta = (x[name] for name in ("q", "k", "v", "g", "beta"))
    if c.qk_norm:
        q, k = (
            a / np.sqrt(np.sum(a * a, axis=-1, keepdims=True) + 1e-6) for a in (q, k)
        )
    q, k = (np.repeat(a, c.group, axis=2) for a in (q, k))
    if c.gate is not None:
        g = _gate(c, g, x["a_log"], x.get("dt_bias", np.zeros(())))
    if c.op == "gdn":
        g = g[..., None]
    if c.beta_max is not None:
        beta = c.beta_max / (1 + np.exp(-beta))
    scale = c.key_dim**-0.5 if c.scale is None else c.scale
    slots = np.ones(v.shape[:2], int) if ids is None else ids
    dtype = np.result_type(*x.values())
    states = np.zeros(
        (c.batch, c.segments or 1, c.value_heads, c.key_dim, c.value_dim), dtype
    )
    if c.state:
        states = states + x["initial_state"].reshape(states.shape)
    output = np.zeros(v.shape, dtype)
    for b, t in np.argwhere(slots != PADDING):
        state = states[b, slots[b, t] - 1]
        state *= np.exp(g[b, t])[..., None]
        error = beta[b, t][:, None] * (
            v[b, t] - np.einsum("hkv,hk->hv", state, k[b, t])
        )
        state += k[b, t][:, :, None] * error[:, None, :]
        output[b, t] = np.einsum("hkv,hk->hv", state, scale * q[b, t])
    return {"output": output, "final_state": states if c.segments else states[:, 0]}


def _gate(
    c: Config, x: np.ndarray, a_log: np.ndarray, dt_bias: np.ndarray
) -> np.ndarray:
    x = x + dt_bias
    rate = np.exp(a_log)[:, None] if c.op == "kda" else np.exp(a_log)
    if c.gate.startswith("sigmoid"):
        return -5.0 / (1 + np.exp(-rate * x))
    low = np.where(x.real < 0, x, -x)
    return -rate * (np.log1p(np.exp(low)) + np.where(x.real < 0, 0, x))


def loss(outputs: dict[str, np.ndarray], cotangents: dict[str, np.ndarray]) -> Any:
    return sum(np.sum(outputs[name] * cotangents[name]) for name in cotangents)


def slope(
    config: Config,
    x: dict[str, np.ndarray],
    ids,
    cotangents,
    name: str,
    direction: np.ndarray,
) -> float:
    """d loss(x + h direction) / dh of the oracle, by an imaginary h: exact to rounding, no difference is formed."""
    moved = x | {name: x[name] + 1e-30j * np.where(np.isfinite(x[name]), direction, 0)}
    return float(np.imag(loss(oracle(config, moved, ids), cotangents)) / 1e-30)


# The call under test.

FORMS = {
    ("chunk", "kda"): jfla.chunk_kda,
    ("chunk", "gdn"): jfla.chunk_gdn,
    ("recurrent", "kda"): jfla.recurrent_kda,
    ("recurrent", "gdn"): jfla.recurrent_gdn,
    ("plain", "kda"): jfla.reference.chunk_kda,
    ("plain", "gdn"): jfla.reference.chunk_gdn,
}


def call(
    config: Config, form: str, x: dict[str, Any], ids: Any, **arguments: Any
) -> jfla.DeltaRuleOutput:
    """`form` of the op on inputs named as in `draw`."""
    c, gate = config, None
    if c.gate is not None:
        kind = jfla.SoftplusGate if c.gate.startswith("softplus") else jfla.SigmoidGate
        gate = kind(x["a_log"], x.get("dt_bias"))
    return FORMS[form, c.op](
        *(x[name] for name in ("q", "k", "v", "g", "beta")),
        gate=gate, beta_max=c.beta_max, qk_norm=c.qk_norm, scale=c.scale, initial_state=x.get("initial_state"),
        return_final_state=c.final, segment_ids=ids, num_segments=c.segments, implementation="xla",
        **arguments,
    )  # fmt: skip


@functools.cache
def compiled(config: Config, form: str, optimized: bool = False):
    """Jitted (inputs, ids, cotangents) -> {"output", "final_state", "dq", ...}; `optimized` as outside of the tests."""

    def run(x, ids, cotangents):
        def forward(x):
            return {
                name: a
                for name, a in call(config, form, x, ids)._asdict().items()
                if a is not None
            }

        out, adjoint = jax.vjp(forward, x)
        return out | {f"d{name}": a for name, a in adjoint(cotangents)[0].items()}

    return jax.jit(
        run,
        compiler_options={"xla_backend_optimization_level": 3} if optimized else None,
    )


def evaluate(config: Config, form: str, x, ids, cotangents) -> dict[str, np.ndarray]:
    """`compiled` on float64 numpy arrays, which go in with the config's dtype; results as they come, in numpy."""
    with jax.enable_x64(config.dtype == "float64"):
        x, cotangents = (
            {name: jnp.asarray(a, dtype(config, name)) for name, a in arrays.items()}
            for arrays in (x, cotangents)
        )
        out = compiled(config, form)(
            x, None if ids is None else jnp.asarray(ids), cotangents
        )
        return {name: np.asarray(a) for name, a in out.items()}


def error(x: np.ndarray, ref: np.ndarray, tiny: float = 0.0) -> float:
    """||x - ref|| / ||ref|| in float64, where a difference of `tiny` is none; what is not finite never passes."""
    x, ref = np.asarray(x, np.float64), np.asarray(ref, np.float64)
    difference = np.linalg.norm(x - ref)
    return 0.0 if difference <= tiny else float(difference / np.linalg.norm(ref))


def errors(
    x: dict[str, np.ndarray], ref: dict[str, np.ndarray], tiny: float = 0.0
) -> dict[str, float]:
    assert x.keys() <= ref.keys()
    return {name: error(x[name], ref[name], tiny) for name in x}
