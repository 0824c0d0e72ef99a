"""Times the chunked "xla" implementation against `lax.scan` of the recurrence: `python -m jfla.cli.xla_vs_scan`."""

import platform
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

import jfla
from jfla.cli.info import cpu_name

BATCH, TIME, HEADS, DIM = 1, 4096, 4, 128
REPEATS = 7


def arguments(op: str) -> dict[str, Array]:
    """float32 inputs of one sequence: unit keys, a gate of about -0.1 nats per token, beta in (0, 1)."""
    keys = jax.random.split(jax.random.key(0), 5)
    qk = jax.random.normal(keys[0], (2, BATCH, TIME, HEADS, DIM))
    q, k = qk / jnp.linalg.norm(qk, axis=-1, keepdims=True)
    gate_shape = (BATCH, TIME, HEADS, DIM) if op == "kda" else (BATCH, TIME, HEADS)
    return {
        "q": q,
        "k": k,
        "v": jax.random.normal(keys[1], (BATCH, TIME, HEADS, DIM)),
        "g": -0.1 * jax.random.uniform(keys[2], gate_shape),
        "beta": jax.random.uniform(keys[3], (BATCH, TIME, HEADS)),
    }


def pairs(op: str) -> dict[str, tuple[Callable, Callable]]:
    """(chunked, scan), jitted, for the forward and for forward + backward."""
    chunked = {"kda": jfla.chunk_kda, "gdn": jfla.chunk_gdn}[op]
    recurrent = {"kda": jfla.reference.recurrent_kda, "gdn": jfla.reference.recurrent_gdn}[op]

    def forward(function: Callable, **options: str) -> Callable:
        return lambda inputs: function(**inputs, **options).output

    def both(function: Callable, **options: str) -> Callable:
        return jax.grad(lambda inputs: jnp.sum(forward(function, **options)(inputs) ** 2))

    return {
        name: (jax.jit(wrap(chunked, implementation="xla")), jax.jit(wrap(recurrent)))
        for name, wrap in (("forward", forward), ("forward + backward", both))
    }


def medians(functions: tuple[Callable, ...], inputs: dict[str, Array]) -> list[float]:
    """Median seconds of each function. They take turns, so that a busy moment falls on all of them.

    The first call of a turn is not timed: the memory of the other function (the scan's backward touches 3 GB) is given
    back to the system during it.
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
    print(f"B={BATCH} T={TIME} H={HEADS} K=V={DIM} float32, median of {REPEATS}, alternating")
    print(f"jax {jax.__version__}, Python {platform.python_version()}, {device}")
    for op in ("kda", "gdn"):
        inputs = arguments(op)
        for name, functions in pairs(op).items():
            chunked, scan = (1e3 * seconds for seconds in medians(functions, inputs))
            print(f"{op} {name:18}  xla {chunked:8.1f} ms   scan {scan:8.1f} ms   {scan / chunked:5.1f}x")


if __name__ == "__main__":
    main()
