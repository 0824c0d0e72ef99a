"""What this device does at best: bytes per second of a copy, operations per second of a matrix product."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jfla.bench import measure


class Ceilings(NamedTuple):
    """Measured on the machine and in the run that the rows belong to."""

    copy_tb_per_s: float
    matmul_tflop_per_s: float


def measured(repeats: int) -> Ceilings:
    """A copy that reads and writes 2 GiB each (CPU: 64 MiB); a bfloat16 product of 8192^3 (CPU: float32, 1024^3).

    Random numbers: on zeros a GPU draws less power and is faster. The copy changes the sign, or it would be left out.
    """
    gpu = jax.default_backend() == "gpu"
    x = jax.random.normal(jax.random.key(0), (2**30 if gpu else 2**24,), jnp.bfloat16 if gpu else jnp.float32)
    copy = jax.jit(jnp.negative)
    copy_ms = measure.timing(copy, jax.block_until_ready, [x], repeats).ms
    n = 8192 if gpu else 1024
    a, b = jax.random.normal(jax.random.key(1), (2, n, n), x.dtype)
    product_ms = measure.timing(jax.jit(lambda ab: ab[0] @ ab[1]), jax.block_until_ready, [(a, b)], repeats).ms
    return Ceilings(2 * x.nbytes / copy_ms * 1e-9, 2 * n**3 / product_ms * 1e-9)
