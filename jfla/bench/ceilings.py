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
    """The faster of two copies that read and write 2 GiB each, the runtime's own and `x + 1`, both in
    float32: a kernel that reads 2 bytes at a time reaches less. On a CPU 16 MiB: for more than that, memory is mapped
    anew at each call, which is most of the time. A bfloat16 product of 8192^3 (CPU: float32, 1024^3).

    Random numbers: on zeros a GPU draws less power and is faster.
    """
    gpu = jax.default_backend() == "gpu"
    x = jax.random.normal(jax.random.key(0), (2**29 if gpu else 2**22,))
    copies = [_ms(jax.jit(function), x, repeats) for function in (jnp.copy, lambda x: x + 1)]
    n, bytes_ = 8192 if gpu else 1024, 2 * x.nbytes
    del x
    factors = tuple(jax.random.normal(jax.random.key(1), (2, n, n), jnp.bfloat16 if gpu else jnp.float32))
    product_ms = _ms(jax.jit(lambda ab: ab[0] @ ab[1]), factors, repeats)
    return Ceilings(bytes_ / min(copies) * 1e-9, 2 * n**3 / product_ms * 1e-9)


def _ms(function: jax.stages.Wrapped, x: object, repeats: int) -> float:
    return measure.timing(function, jax.block_until_ready, [x], repeats).ms
