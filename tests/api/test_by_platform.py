"""A function for each platform: which one runs, which are traced, and under which matmul precision."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jfla.by_platform import by_platform

X = np.arange(6.0, dtype=np.float32).reshape(2, 3)


class Traced:
    """`x` to `(scale * x, sum)`, counting its traces."""

    def __init__(self, scale: float):
        self.scale = scale
        self.count = 0

    def __call__(self, x: jax.Array, none: None) -> tuple[jax.Array, jax.Array]:
        self.count += 1
        return self.scale * x, jnp.sum(x)


def on_cpu_or(cpu: Traced, other: Traced):
    return jax.jit(lambda x: by_platform(x, None, cpu=cpu, default=other))


def test_only_what_is_lowered_is_traced():
    here, elsewhere = Traced(2.0), Traced(3.0)
    scaled, total = on_cpu_or(here, elsewhere)(X)
    np.testing.assert_array_equal(scaled, 2 * X)
    np.testing.assert_array_equal(total, 15.0)
    assert (here.count, elsewhere.count) == (1, 0)


@pytest.mark.parametrize("platform", ["cpu", "tpu", "cuda"])
def test_each_platform_gets_its_function(platform):
    here, elsewhere = Traced(2.0), Traced(3.0)
    exported = jax.export.export(on_cpu_or(here, elsewhere), platforms=[platform])(X)
    factor = "2.0" if platform == "cpu" else "3.0"
    assert f"dense<{factor}" in exported.mlir_module()
    assert elsewhere.count == (platform != "cpu")


def test_several_platforms_in_one_module():
    exported = jax.export.export(
        on_cpu_or(Traced(2.0), Traced(3.0)), platforms=["cpu", "cuda", "tpu"]
    )(X)
    np.testing.assert_array_equal(exported.call(X)[0], 2 * X)
    assert "dense<2.0" in exported.mlir_module()
    assert "dense<3.0" in exported.mlir_module()


def test_vmap_of_what_is_traced_late():
    chosen = jax.vmap(
        lambda x: by_platform(x, None, cpu=Traced(2.0), default=Traced(3.0))
    )
    scaled, totals = jax.jit(chosen)(X)
    np.testing.assert_array_equal(scaled, 2 * X)
    np.testing.assert_array_equal(totals, X.sum(axis=1))
    module = jax.export.export(jax.jit(chosen), platforms=["tpu"])(X).mlir_module()
    assert "dense<3.0" in module
    assert "tensor<2x3xf32>" in module


def test_matmul_precision_of_the_call():
    def product(x: jax.Array) -> jax.Array:
        return x @ x.T

    def call(x: jax.Array) -> jax.Array:
        with jax.default_matmul_precision("highest"):
            return by_platform(x, cpu=lambda x: x @ x.T, default=product)

    module = jax.export.export(jax.jit(call), platforms=["tpu"])(X).mlir_module()
    assert "precision = [HIGHEST, HIGHEST]" in module
