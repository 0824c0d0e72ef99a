"""Times chunked "xla" against `lax.scan` of the recurrence: `python -m jfla.cli.xla_vs_scan`."""

import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

import jfla
from jfla.cli.info import cpu_name

BATCH = 1
TIME = 4096
HEADS = 4
DIM = 128
REPEATS = 7

_CHUNKED = {"kda": jfla.chunk_kda, "gdn": jfla.chunk_gdn}
_RECURRENT = {"kda": jfla.reference.recurrent_kda, "gdn": jfla.reference.recurrent_gdn}

Inputs = tuple[Array, Array, Array, Array, Array]  # q, k, v, g, beta
Pass = Callable[[Inputs], Any]


def arguments(op: str) -> Inputs:
    """float32 inputs: unit keys, a gate of about -0.1 nats per token, beta in (0, 1)."""
    keys = jax.random.split(jax.random.key(0), 5)
    token = (BATCH, TIME, HEADS)
    qk = jax.random.normal(keys[0], (2, *token, DIM))
    q, k = qk / jnp.linalg.norm(qk, axis=-1, keepdims=True)
    v = jax.random.normal(keys[1], (*token, DIM))
    gate_shape = (*token, DIM) if op == "kda" else token
    g = -0.1 * jax.random.uniform(keys[2], gate_shape)
    beta = jax.random.uniform(keys[3], token)
    return q, k, v, g, beta


def pairs(op: str) -> dict[str, tuple[Pass, Pass]]:
    """(chunked, scan), jitted, for the forward and for forward + backward."""

    def chunked(inputs: Inputs) -> Array:
        return _CHUNKED[op](*inputs, implementation="xla").output

    def scan(inputs: Inputs) -> Array:
        return _RECURRENT[op](*inputs).output

    return {
        "forward": (jax.jit(chunked), jax.jit(scan)),
        "forward + backward": (_gradient(chunked), _gradient(scan)),
    }


def _gradient(forward: Pass) -> Pass:
    def loss(inputs: Inputs) -> Array:
        return jnp.sum(forward(inputs) ** 2)

    return jax.jit(jax.grad(loss))


def medians(functions: tuple[Pass, ...], inputs: Inputs) -> list[float]:
    """Median seconds of each function.

    They take turns, so that a busy moment falls on all of them. The first call of a turn is not
    timed: the memory of the other function (the scan's backward touches 3 GB) is given back to the
    system during it.
    """
    times: list[list[float]] = [[] for _ in functions]
    for function in functions:
        jax.block_until_ready(function(inputs))
    for _ in range(REPEATS):
        for function, seconds in zip(functions, times):
            jax.block_until_ready(function(inputs))
            start = time.perf_counter()
            jax.block_until_ready(function(inputs))
            seconds.append(time.perf_counter() - start)
    return [statistics.median(seconds) for seconds in times]


def main() -> None:
    """Prints one line per op and pass: medians in milliseconds and their ratio."""
    device = cpu_name() if jax.default_backend() == "cpu" else jax.devices()[0].device_kind
    shape = f"B={BATCH} T={TIME} H={HEADS} K=V={DIM}"
    print(f"{shape} float32, median of {REPEATS}, alternating")
    print(f"jax {jax.__version__}, Python {platform.python_version()}, {device}")
    for op in ("kda", "gdn"):
        inputs = arguments(op)
        for name, functions in pairs(op).items():
            chunked, scan = (1e3 * seconds for seconds in medians(functions, inputs))
            times = f"xla {chunked:8.1f} ms   scan {scan:8.1f} ms"
            print(f"{op} {name:18}  {times}   {scan / chunked:5.1f}x")


if __name__ == "__main__":
    main()
