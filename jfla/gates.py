"""Decay gates, beta and l2norm: the elementwise transforms in front of the delta rule, defined once for everybody."""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

NORM_EPSILON = 1e-6
# exp(60) * softplus(1e4) is finite in float32, and a decay of exp(-exp(60) * softplus(x)) is already exactly 0.
_MAX_LOG_RATE = 60.0


def at_least_f32(x: Array) -> Array:
    """Casts to float32, or leaves float64 as it is: the dtype in which everything here is computed."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SoftplusGate:
    """The unbounded gate of Mamba, Gated DeltaNet and Kimi Delta Attention.

        g = -exp(a_log) * softplus(x + dt_bias)          natural-log decay per token, <= 0

    x is the raw gate input that is passed as `g`, with its last axis: K for KDA, 1 for GDN. Everything
    is computed in float32 (float64 stays float64) and stays finite for any `a_log` up to 100 and inputs up to 1e4.

    **Arguments:**

    - `a_log`: `[HV]`, logarithm of the rate of each value head.
    - `dt_bias`: `[HV, K]` for KDA, `[HV]` for GDN; or None.

    Reference: Yang et al., Gated Delta Networks (arXiv:2412.06464); Kimi Linear (arXiv:2510.26692).

    >>> import jax.numpy as jnp
    >>> gate = SoftplusGate(a_log=jnp.zeros(2))
    >>> print(gate(jnp.zeros((1, 3, 2, 16))).shape)
    (1, 3, 2, 16)
    """

    a_log: Float[Array, " HV"]
    dt_bias: Float[Array, "HV *K"] | None = None

    def __call__(self, x: Float[Array, "*batch HV G"]) -> Float[Array, "*batch HV G"]:
        x = _biased(x, self.dt_bias)
        return _softplus_decay(x, _per_head(self.a_log, x))


@jax.custom_jvp
def _softplus_decay(x: Array, a_log: Array) -> Array:
    """-exp(a_log) * softplus(x)."""
    return -_rate_times(jax.nn.softplus, x, a_log)


@_softplus_decay.defjvp
def _(
    primals: tuple[Array, Array], tangents: tuple[Array, Array]
) -> tuple[Array, Array]:
    """d/dx = -exp(a_log) * sigmoid(x) and d/da_log = g; 0 where the rate is capped, and the decay 0.

    A rule of its own: on a GPU the derivative of softplus is bound by its exponentials and logarithms, not by memory.
    """
    x, a_log = primals
    dx, da_log = tangents
    g = _softplus_decay(x, a_log)
    tangent = g * da_log - _rate_times(jax.nn.sigmoid, x, a_log) * dx
    is_capped = a_log + jnp.minimum(x, 0) >= _MAX_LOG_RATE
    return g, jnp.where(is_capped, 0, tangent)


def _rate_times(f: Callable[[Array], Array], x: Array, a_log: Array) -> Array:
    """exp(a_log) * f(x), of f(x) that is exp(x) far below zero.

    There exp(a_log + x) is finite where exp(a_log) * exp(x) is inf * 0.
    """
    tail = jnp.log(jnp.finfo(x.dtype).eps)
    small = jnp.exp(jnp.minimum(a_log + jnp.minimum(x, tail), _MAX_LOG_RATE))
    usual = jnp.exp(jnp.minimum(a_log, _MAX_LOG_RATE)) * f(jnp.maximum(x, tail))
    return jnp.where(x < tail, small, usual)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SigmoidGate:
    """The gate bounded from below that lets kernels use one exponential range.

        g = lower_bound * sigmoid(exp(a_log) * (x + dt_bias))          natural-log decay per token, in (lower_bound, 0)

    **Arguments:**

    - `a_log`: `[HV]`, or None for a rate of 1.
    - `dt_bias`: `[HV, K]` for KDA, `[HV]` for GDN; or None.
    - `lower_bound`: a negative Python number; static.

    **Raises:** the ops raise `ValueError` when `lower_bound` is not below 0.

    Reference: Kimi Linear (arXiv:2510.26692).

    >>> import jax.numpy as jnp
    >>> print(SigmoidGate(lower_bound=-4.0)(jnp.zeros((1, 1, 1))).item())
    -2.0
    """

    a_log: Float[Array, " HV"] | None = None
    dt_bias: Float[Array, "HV *K"] | None = None
    lower_bound: float = dataclasses.field(default=-5.0, metadata={"static": True})

    def __call__(self, x: Float[Array, "*batch HV G"]) -> Float[Array, "*batch HV G"]:
        x = _biased(x, self.dt_bias)
        rate = (
            1.0
            if self.a_log is None
            else jnp.exp(jnp.minimum(_per_head(self.a_log, x), _MAX_LOG_RATE))
        )
        return self.lower_bound * jax.nn.sigmoid(rate * x)


Gate = SoftplusGate | SigmoidGate


def _biased(x: Array, dt_bias: Array | None) -> Array:
    x = at_least_f32(x)
    return x if dt_bias is None else x + _per_head(dt_bias, x)


def _per_head(parameter: Array, x: Array) -> Array:
    """[HV] or [HV, K] as [1, ..., HV, 1 or K], of the rank of x [..., HV, G]."""
    parameter = parameter.astype(x.dtype)
    if parameter.ndim == 1:
        parameter = parameter[:, None]
    return parameter.reshape((1,) * (x.ndim - parameter.ndim) + parameter.shape)


def log_decay(
    g: Float[Array, "B T HV G"], gate: Gate | None
) -> Float[Array, "B T HV G"]:
    """The natural-log decay in float32 or wider: `g` itself, or the gate applied to it."""
    return at_least_f32(g) if gate is None else gate(g)


def log_uniform_rate(key: Array, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    """Initializer of a_log: log U(1, 16)."""
    return jnp.log(jax.random.uniform(key, shape, dtype, 1.0, 16.0))


def inverse_softplus_step(
    key: Array, shape: tuple[int, ...], dtype: DTypeLike
) -> Array:
    """Initializer of dt_bias: the inverse softplus of a step, log-uniform in [1e-3, 0.1]."""
    log_step = jax.random.uniform(key, shape, dtype, math.log(1e-3), math.log(0.1))
    step = jnp.exp(log_step)
    return step + jnp.log(-jnp.expm1(-step))


def write_strength(
    beta: Float[Array, "*shape"], beta_max: float | None
) -> Float[Array, "*shape"]:
    """beta in float32 or wider: as given, or `beta_max * sigmoid(beta)` when the input is logits."""
    return (
        at_least_f32(beta)
        if beta_max is None
        else beta_max * jax.nn.sigmoid(at_least_f32(beta))
    )


def l2norm(x: Float[Array, "*batch K"]) -> Float[Array, "*batch K"]:
    """x * rsqrt(sum(x^2) + 1e-6) over the last axis, in float32 or wider."""
    x = at_least_f32(x)
    return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + NORM_EPSILON)
