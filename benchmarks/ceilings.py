"""What this device does at best: bytes a second of a copy, operations a second of a matmul."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from benchmarks import measure

STEPS = 16  # of the copy on a CPU


class Ceilings(NamedTuple):
    """Measured on the machine and in the run that the rows belong to."""

    copy_tb_per_s: float
    matmul_tflop_per_s: float


def measured(repeats: int) -> Ceilings:
    """A copy and a bfloat16 product of 8192^3 (CPU: float32, 1024^3), of random numbers: on zeros a
    GPU draws less power and is faster.

    The copy is the faster of two that read and write 2 GiB each, the runtime's own and `x + 1`, in
    float32: what reads 2 bytes at a time reaches less. On a CPU `x + 1` goes over 64 MiB `STEPS`
    times in place: memory for a new result would have to be mapped, which takes ten times as long.
    """
    gpu = jax.default_backend() == "gpu"
    x = jax.random.normal(jax.random.key(0), (2**29 if gpu else 2**24,))
    copies = (jnp.copy, _plus_one) if gpu else (_plus_one_in_place,)
    copy_ms = min(_ms(jax.jit(copy), x, repeats) for copy in copies)
    bytes_ = 2 * x.nbytes * (1 if gpu else STEPS)
    del x
    n = 8192 if gpu else 1024
    dtype = jnp.bfloat16 if gpu else jnp.float32
    factors = tuple(jax.random.normal(jax.random.key(1), (2, n, n), dtype))
    matmul_ms = _ms(jax.jit(lambda ab: ab[0] @ ab[1]), factors, repeats)
    return Ceilings(
        copy_tb_per_s=bytes_ / copy_ms * 1e-9,
        matmul_tflop_per_s=2 * n**3 / matmul_ms * 1e-9,
    )


def _plus_one(x: Array) -> Array:
    return x + 1


def _plus_one_in_place(x: Array) -> Array:
    return lax.fori_loop(0, STEPS, lambda _, x: x + 1, x)


def _ms(function: jax.stages.Wrapped, x: object, repeats: int) -> float:
    return measure.timing(function, jax.block_until_ready, [x], repeats).ms
