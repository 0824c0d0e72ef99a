"""Times "xla" against `lax.scan` of the recurrence: `python -m benchmarks.xla_vs_scan`."""

import json
import pathlib
import platform
import statistics
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

import jfla
from benchmarks.results import device_name

BATCH = 1
TIME = 4096
HEADS = 4
DIM = 128
REPEATS = 7


def arguments(op: str) -> dict[str, Array]:
    """float32 inputs of one sequence: unit keys, decays of 0 to -0.1, beta in (0, 1)."""
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
    recurrent = {
        "kda": jfla.reference.recurrent_kda,
        "gdn": jfla.reference.recurrent_gdn,
    }[op]

    def forward(function: Callable, **options: str) -> Callable:
        return lambda inputs: function(**inputs, **options).output

    def both(function: Callable, **options: str) -> Callable:
        return jax.grad(
            lambda inputs: jnp.sum(forward(function, **options)(inputs) ** 2)
        )

    found = {}
    for name, wrap in (("forward", forward), ("forward + backward", both)):
        xla = jax.jit(wrap(chunked, implementation="xla"))
        scan = jax.jit(wrap(recurrent))
        found[name] = (xla, scan)
    return found


def medians(functions: tuple[Callable, ...], inputs: dict[str, Array]) -> list[float]:
    """Median seconds of each function. They take turns, so that a busy moment falls on all of them.

    The first call of a turn is not timed: the memory of the other function (the scan's backward
    touches 3 GB) is given back to the system during it.
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
    """Prints a line per op and pass; writes all of them to the JSON file that is named, if any."""
    shape = f"B = {BATCH}, T = {TIME}, H = {HEADS}, K = V = {DIM}, float32"
    method = f"medians of {REPEATS} alternating runs"
    versions = {"python": platform.python_version(), "jax": jax.__version__}
    device = device_name(jax.devices()[0])
    print(f"{shape}, {method}; {device}; {versions}")
    rows = []
    for op in ("kda", "gdn"):
        inputs = arguments(op)
        for name, functions in pairs(op).items():
            xla, scan = (1e3 * seconds for seconds in medians(functions, inputs))
            print(
                f"{op} {name:18}  xla {xla:8.1f} ms   scan {scan:8.1f} ms   {scan / xla:5.1f}x"
            )
            rows.append({"op": op, "pass": name, "xla_ms": xla, "scan_ms": scan})
    if sys.argv[1:]:
        head = {
            "device": device,
            "versions": versions,
            "shape": shape,
            "method": method,
        }
        pathlib.Path(sys.argv[1]).write_text(
            json.dumps(head | {"rows": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
