"""A small DeltaLM of all parts, with random weights, and some tokens for it."""

import dataclasses

import jax
from flax import nnx

import jfla.nn

VOCAB, TIME = 19, 24
CONFIG = jfla.nn.DeltaLMConfig(
    vocab_size=VOCAB, hidden_size=16, num_layers=3, num_heads=1, head_dim=8, num_value_heads=2, op="gdn",
    attention_layers=(1,), attention_heads=2, intermediate_size=32, tie_embeddings=True,
)  # fmt: skip
KEY = jax.random.key(5)


def make(config=CONFIG, **changes):
    return jfla.nn.DeltaLM(dataclasses.replace(config, **changes), rngs=nnx.Rngs(0))


def some_tokens():
    return jax.random.randint(jax.random.key(1), (3, TIME), 0, VOCAB)


@nnx.jit
def logits_of(model, tokens, segment_ids=None):
    return model(tokens, segment_ids)
