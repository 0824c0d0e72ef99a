"""Updates of low rank: a model computes as before, trains them alone, and merges them into its weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.goldens import rms_error

import jfla.nn
from jfla.nn.models.config import LatentSpec, LayerSpec

TOKENS = jax.random.randint(jax.random.key(0), (2, 24), 0, 32)


@nnx.jit
def logits_of(model):
    return model(TOKENS)


def test_of_latent_attention_and_experts():
    experts = jfla.nn.MoEOptions(
        num_experts=4, experts_per_token=2, intermediate_size=16, shared_size=24
    )
    latent = LatentSpec(
        num_heads=2, latent_dim=16, key_dim=16, shared_dim=8, value_dim=16
    )
    layers = (LayerSpec(mixer=latent, mlp=experts),)
    config = jfla.nn.ModelConfig(vocab_size=32, hidden_size=32, layers=layers)
    model = jfla.nn.DeltaLM(config, rngs=nnx.Rngs(0))
    names = {path for path, _ in nnx.to_flat_state(nnx.state(model))}
    before = logits_of(model)
    count = jfla.nn.add_lora(model, 2, rngs=nnx.Rngs(1))
    np.testing.assert_array_equal(logits_of(model), before)
    state = nnx.state(model, nnx.LoRAParam)
    trained = {path for path, _ in nnx.to_flat_state(state)}
    assert len(trained) == 2 * count
    assert not any("router" in path for path in trained)
    for path in (("mixer", "k_proj"), ("mlp", "shared", "gate_proj")):
        assert ("blocks", 0, *path, "lora", "lora_a") in trained
    moved = jax.tree.map(
        lambda x: jnp.cos(jnp.arange(x.size).reshape(x.shape)) / 10, state
    )
    nnx.update(model, moved)
    with_updates = logits_of(model)
    assert rms_error(with_updates, before) > 1e-2
    # Latent attention reads its kernels themselves where it has a cache.
    cached, _ = nnx.jit(lambda model: model(TOKENS, cache=model.init_cache(2, 24)))(
        model
    )
    assert rms_error(cached, with_updates) < 1e-5
    jfla.nn.merge_lora(model)
    assert {path for path, _ in nnx.to_flat_state(nnx.state(model))} == names
    assert rms_error(logits_of(model), with_updates) < 1e-5


def test_an_update_is_the_product_of_its_matrices_rounded_once():
    sizes = {"vocab_size": 16, "hidden_size": 32, "num_layers": 1}
    config = jfla.nn.DeltaLMConfig(
        **sizes, num_heads=2, head_dim=16, op="gdn", param_dtype=jnp.bfloat16
    )
    model = jfla.nn.DeltaLM(config, rngs=nnx.Rngs(0))
    jfla.nn.add_lora(model, 3, scale=0.5, rngs=nnx.Rngs(1))
    projection = model.blocks[0].mixer.o_proj  # [heads, V, D]
    b = np.random.default_rng(0).standard_normal((3, 32)).astype(np.float32)
    projection.lora.lora_b.set_value(jnp.asarray(b))
    kernel = np.asarray(projection.base.kernel[...]).astype(np.float64)
    a = np.asarray(projection.lora.lora_a[...]).astype(np.float64)
    expected = kernel + 0.5 * (a @ b).reshape(kernel.shape)
    jfla.nn.merge_lora(model)
    got = model.blocks[0].mixer.o_proj.kernel[...]
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(got).astype(np.float64), expected, rtol=2**-8)


def test_what_cannot_be():
    sizes = {"vocab_size": 16, "hidden_size": 32, "num_layers": 1}
    config = jfla.nn.DeltaLMConfig(**sizes, num_heads=2, head_dim=16)
    model = jfla.nn.DeltaLM(config, rngs=nnx.Rngs(0))
    for rank, said in ((0, "at least 1, got 0"), (1000, "smaller than W, got 1000")):
        with pytest.raises(ValueError, match=said):
            jfla.nn.add_lora(model, rank, rngs=nnx.Rngs(0))
    jfla.nn.add_lora(model, 2, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="merge_lora"):
        jfla.nn.add_lora(model, 2, rngs=nnx.Rngs(0))
