"""A server over a pool of states: requests that come and go get what each would get alone."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jfla.nn

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 2,
    "head_dim": 16,
}


@pytest.fixture(params=["kda", "gdn"], scope="module")
def model(request):
    config = jfla.nn.DeltaLMConfig(**SIZES, op=request.param)
    return jfla.nn.DeltaLM(config, rngs=nnx.Rngs(0))


def alone(model, prompt, length):
    """Greedy tokens by a full pass over everything before each of them."""
    tokens = list(prompt)
    for _ in range(length):
        padded = np.zeros((1, 64), np.int32)
        padded[0, : len(tokens)] = tokens
        logits = full_pass(model, jnp.asarray(padded))[0, len(tokens) - 1]
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


@nnx.jit
def full_pass(model, tokens):
    return model(tokens)


def draw(number, seed=0):
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(1, 64, rng.integers(1, 30)).tolist() for _ in range(number)]
    return prompts, rng.integers(1, 9, number).tolist()


@pytest.mark.parametrize("prefill_tokens", [1, 40])
def test_requests_get_the_tokens_that_each_gets_alone(model, prefill_tokens):
    """More requests than slots, some of which come while others run; prompts alone in a call, and packed."""
    prompts, lengths = draw(7)
    server = jfla.nn.Server(model, num_slots=3, prefill_tokens=prefill_tokens)
    requests = []
    for prompt, length in zip(prompts, lengths):
        requests.append(server.submit(prompt, length))
        server.step()
        assert len(server.running) <= 3
    server.run()
    assert not server.busy
    for request, prompt, length in zip(requests, prompts, lengths):
        assert request.finished
        assert request.slot is None
        assert request.submitted <= request.first <= request.last
        assert request.tokens == alone(model, prompt, length)


def test_states_are_those_of_each_alone(model):
    """The pools behind the prompts and some tokens, against caches of one row, in float32 to 1e-5."""
    prompts, _ = draw(3, seed=1)
    server = jfla.nn.Server(model, num_slots=4)
    requests = [server.submit(prompt, 5) for prompt in prompts]
    for _ in range(3):  # a prefill and two tokens
        server.step()
    for request in requests:
        assert len(request.tokens) == 3
        seen = [*request.prompt, *request.tokens[:-1]]
        _, caches = model(jnp.asarray([seen]), cache=model.init_cache(1, 1))
        for (state, tails), cache in zip(server._pools, caches):
            pairs = [(state, cache.state), *zip(tails, cache.tails)]
            for pool, row in pairs:
                difference = np.linalg.norm(pool[request.slot] - row[0])
                assert difference <= 1e-5 * np.linalg.norm(row[0]) + 1e-7


def test_a_pool_of_bfloat16_and_a_token_that_ends(model):
    prompts, _ = draw(2, seed=2)
    first = alone(model, prompts[0], 6)
    server = jfla.nn.Server(model, num_slots=2, state_dtype=jnp.bfloat16, end=first[0])
    ended, other = server.submit(prompts[0], 6), server.submit(prompts[1], 2)
    server.run()
    assert all(state.dtype == jnp.bfloat16 for state, _ in server._pools)
    assert ended.tokens == first[:1]
    assert 1 <= len(other.tokens) <= 2


def test_what_is_refused(model):
    server = jfla.nn.Server(model)
    with pytest.raises(ValueError, match="prompt must have at least one token"):
        server.submit([], 3)
    with pytest.raises(ValueError, match="length must be at least 1, got 0"):
        server.submit([1], 0)
    with pytest.raises(
        ValueError, match="num_slots and prefill_tokens must be at least 1, got 0"
    ):
        jfla.nn.Server(model, num_slots=0)
    hybrid = jfla.nn.DeltaLM(
        jfla.nn.DeltaLMConfig(**SIZES, attention_layers=(1,)), rngs=nnx.Rngs(0)
    )
    with pytest.raises(
        ValueError, match="delta-rule layers alone, got one with attention"
    ):
        jfla.nn.Server(hybrid)
