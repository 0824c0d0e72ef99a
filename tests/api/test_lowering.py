"""What has no kernels gets plain JAX: every op, with gradients, lowered here for platforms that this machine is not."""

import jax
import jax.numpy as jnp
import pytest

import jfla

OPS = [jfla.chunk_kda, jfla.chunk_gdn, jfla.recurrent_kda, jfla.recurrent_gdn]


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)
@pytest.mark.parametrize(
    "platform", ["tpu", pytest.param("rocm", marks=pytest.mark.slow)]
)
def test_ops_and_gradients_are_lowered_for(platform: str, op):
    """Nothing in them is a GPU's alone, and no kernel of another platform is called."""
    tokens = (1, 130, 2)
    x = jax.ShapeDtypeStruct((*tokens, 64), jnp.bfloat16)
    beta = jax.ShapeDtypeStruct(tokens, jnp.float32)
    g = x if op.__name__.endswith("kda") else beta

    def loss(q, k, v, g, beta):
        return jnp.sum(op(q, k, v, g, beta, qk_norm=True).output.astype(jnp.float32))

    gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3, 4)))
    exported = jax.export.export(gradients, platforms=[platform])(x, x, x, g, beta)
    assert exported.platforms == (platform,)
    assert "mosaic" not in exported.mlir_module()
