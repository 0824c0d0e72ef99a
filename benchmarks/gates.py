"""Gates of a case: log decays of models, those at which kernels take other ways, and a model's raw gate.

production     -5 sigmoid(x), the bounded gate of the newest published models; the default
published      -exp(a_log) softplus(x + dt_bias), with the parameters that the layers begin with
recorded       drawn from quantiles of a trained model, a head of its for each head
strong         clip(logsigmoid(x), -5, 0)
weak           the same / 16
mixed          strong, but for one channel of every head, or a head without channels: 1000 times as slow
reset          0 or -1000, as x is above 0 or not
model          no decays: x itself in bfloat16, for the gate of "published" within the op, as layers call it
"""

import functools
import json
import pathlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.stats import norm
from jaxtyping import Array, Float

from benchmarks.internals import inverse_softplus_step, log_uniform_rate
from benchmarks.shapes import Gate, Op
from jfla import SoftplusGate

RECORDED = pathlib.Path(__file__).with_name("recorded_gates.json")
SLOW = 1e-3  # what the decay of the slow channel of "mixed" is multiplied by
RESET = -1000.0


def decay(
    x: Float[Array, "B T HV *K"], gate: Gate, op: Op
) -> Float[Array, "B T HV *K"]:
    """Log decay of every token, of normal x."""
    if gate == "production":
        return -5 * jax.nn.sigmoid(x)
    if gate == "published":
        return gated(x, initial_gate(x.shape[2:]))
    if gate == "recorded":
        return _from_quantiles(x, recorded(op))
    if gate == "reset":
        return jnp.where(x > 0, 0.0, RESET)
    g = jnp.clip(jax.nn.log_sigmoid(x), -5, 0)
    if gate == "weak":
        return g / 16
    return g.at[..., 0].multiply(SLOW) if gate == "mixed" else g


def gated(
    x: Float[Array, "B T HV *K"],
    gate: Callable[[Float[Array, "B T HV G"]], Array],
) -> Float[Array, "B T HV *K"]:
    """Log decay of a raw gate input, with an axis of channels or without."""
    return gate(x) if x.ndim == 4 else gate(x[..., None])[..., 0]


def initial_gate(shape: tuple[int, ...]) -> SoftplusGate:
    """The gate that a layer with these value heads, and channels if it has any, begins with."""
    rate_key, step_key = jax.random.split(jax.random.key(0))
    a_log = log_uniform_rate(rate_key, shape[:1], jnp.float32)
    return SoftplusGate(a_log, inverse_softplus_step(step_key, shape, jnp.float32))


@functools.cache
def recorded(op: Op) -> Float[np.ndarray, "heads quantiles"]:
    """Of log decays of a trained model, evenly spaced from the least to the greatest: `record_gates.py`."""
    return np.array(json.loads(RECORDED.read_text())[op]["quantiles"])


def _from_quantiles(
    x: Float[Array, "B T HV *K"],
    quantiles: Float[np.ndarray, "heads quantiles"],
) -> Float[Array, "B T HV *K"]:
    """Normal x as that quantile of a recorded head's decays which x is of a normal's."""
    levels = np.linspace(0, 1, quantiles.shape[1])
    heads = jnp.asarray(np.resize(quantiles, (x.shape[2], quantiles.shape[1])), x.dtype)

    def of_head(x: Array, values: Array) -> Array:
        return jnp.interp(norm.cdf(x), levels, values)

    return jax.vmap(of_head, in_axes=(2, 0), out_axes=2)(x, heads)
