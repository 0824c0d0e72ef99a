"""Generation by DeltaLM: greedy and sampled, prompts of different lengths, stop tokens, and what it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.small_model import KEY, TIME, VOCAB, logits_of

from jfla.nn.models.generate import sample


def greedy(model, prompt, length):
    """Every token from a pass over everything before it."""
    buffer = np.zeros((len(prompt), TIME), np.int32)
    buffer[:, : prompt.shape[1]] = prompt
    for t in range(prompt.shape[1], prompt.shape[1] + length):
        buffer[:, t] = np.argmax(
            logits_of(model, jnp.asarray(buffer))[:, t - 1], axis=-1
        )
    return buffer[:, prompt.shape[1] : prompt.shape[1] + length]


@pytest.fixture(scope="module")
def continued(model, tokens):
    return greedy(model, tokens[:, :12], 9)


def test_greedy_generation_is_that_of_full_passes(model, tokens, continued):
    prompt = tokens[:, :12]
    np.testing.assert_array_equal(
        model.generate(prompt, 9, key=KEY, temperature=0.0), continued
    )
    np.testing.assert_array_equal(
        model.generate(prompt, 9, key=KEY, temperature=2.0, top_k=1), continued
    )


def test_prompts_of_different_lengths(model, tokens, continued):
    # Row 0 is a whole prompt; row 1 the same with a piece of its own continuation; row 2 the first 3 tokens only.
    rows = [
        tokens[0, :12],
        np.concatenate([tokens[0, :12], continued[0, :4]]),
        tokens[2, :3],
    ]
    prompt, ids = np.zeros((3, 16), np.int32), np.zeros((3, 16), np.int32)
    for row, given in enumerate(rows):
        prompt[row, : len(given)], ids[row, : len(given)] = given, 1
    got = model.generate(
        prompt, 5, key=KEY, temperature=0.0, segment_ids=jnp.asarray(ids)
    )
    given = {"segment_ids": jnp.asarray(ids), "key": KEY, "temperature": 0.0}
    np.testing.assert_array_equal(
        np.stack(list(model.stream(prompt, 5, **given)), axis=1), got
    )
    np.testing.assert_array_equal(got[0], continued[0, :5])
    np.testing.assert_array_equal(got[1], continued[0, 4:9])
    np.testing.assert_array_equal(
        got[2], greedy(model, jnp.stack([tokens[2, :3]] * 3), 5)[2]
    )


def test_the_key_decides(model, tokens):
    prompt = tokens[:, :12]
    run = lambda key: np.asarray(
        model.generate(prompt, 9, key=key, temperature=3.0, top_k=VOCAB)
    )
    first = run(KEY)
    np.testing.assert_array_equal(run(KEY), first)
    assert (run(jax.random.key(6)) != first).any()
    # a key of its own for every step
    assert len({tuple(column) for column in first.T}) > 1
    streamed = model.stream(prompt, 9, key=KEY, temperature=3.0, top_k=VOCAB)
    np.testing.assert_array_equal(np.stack(list(streamed), axis=1), first)


def test_sampling_follows_the_distribution():
    logits = jax.random.normal(jax.random.key(2), (VOCAB,))
    wanted, draws = np.asarray(jax.nn.softmax(logits)), 4000
    sampled = sample(jnp.broadcast_to(logits, (draws, VOCAB)), None, KEY)
    counts = np.bincount(sampled, minlength=VOCAB)
    # Pearson's statistic with 18 degrees of freedom exceeds 42 once in a thousand keys.
    assert np.sum((counts - draws * wanted) ** 2 / (draws * wanted)) < 42
    best = np.argsort(wanted)[-3:]
    counts = np.bincount(
        sample(jnp.broadcast_to(logits, (draws, VOCAB)), 3, KEY), minlength=VOCAB
    )
    assert counts.sum() == counts[best].sum()
    np.testing.assert_allclose(
        counts[best] / draws, wanted[best] / wanted[best].sum(), atol=0.05
    )


@pytest.mark.parametrize("top_k", [None, 4])
def test_top_p_keeps_the_fewest_likely_tokens(top_k):
    logits = jnp.log(jnp.array([[0.1, 0.4, 0.05, 0.3, 0.15]]))
    draw = lambda top_p: sample(jnp.repeat(logits, 2000, axis=0), top_k, KEY, top_p)
    assert set(np.asarray(draw(0.1))) == {1}
    assert set(np.asarray(draw(0.69))) == {1, 3}
    assert set(np.asarray(draw(0.75))) == {1, 3, 4}
    assert set(np.asarray(draw(1.0))) == (
        {0, 1, 2, 3, 4} if top_k is None else {0, 1, 3, 4}
    )


def test_rows_stop_one_by_one(model, tokens, continued):
    prompt = tokens[:, :12]
    # The second row's third token ends it, and any other row that comes to it.
    stop = int(continued[1, 2])
    got = model.generate(prompt, 9, key=KEY, temperature=0.0, stop_tokens=(stop, stop))
    ended = 0
    for row, expected in zip(np.asarray(got), continued):
        found = np.flatnonzero(expected == stop)
        at = found[0] if len(found) else 8
        ended += len(found) > 0
        np.testing.assert_array_equal(row[: at + 1], expected[: at + 1])
        assert set(row[at:]) == {expected[at]}
    assert ended > 0
    # The stream ends with the row that stops last.
    streamed = np.stack(
        list(model.stream(prompt, 9, key=KEY, temperature=0.0, stop_tokens=(stop,))),
        axis=1,
    )
    np.testing.assert_array_equal(streamed, got[:, : streamed.shape[1]])
    rows_going_on = [
        stop not in row[: streamed.shape[1] - 1] for row in np.asarray(got)
    ]
    assert any(rows_going_on)
    # All rows stop at once: the loop does not begin.
    every = tuple(range(VOCAB))
    (first,) = model.stream(prompt, 9, key=KEY, temperature=0.0, stop_tokens=every)
    np.testing.assert_array_equal(first, continued[:, 0])
    got = model.generate(prompt, 9, key=KEY, temperature=0.0, stop_tokens=every)
    np.testing.assert_array_equal(got, np.repeat(continued[:, :1], 9, axis=1))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"length": 0}, "length must be at least 1, got 0"),
        ({"temperature": -1.0}, "temperature must be at least 0"),
        ({"top_k": 20}, r"top_k must be None or in 1 \.\. 19, got 20"),
        ({"top_p": 0.0}, "top_p must be None or above 0 and at most 1, got 0.0"),
        ({"stop_tokens": (3, 19)}, r"stop_tokens must be in 0 \.\. 18, got \[19\]"),
        (
            {"prompt": jnp.zeros((2, 0), int)},
            r"prompt must be \[B, T\] with at least one token",
        ),
    ],
)
def test_bad_generation_arguments(model, arguments, message):
    usual = {"prompt": jnp.zeros((1, 2), int), "length": 1, "key": KEY}
    with pytest.raises(ValueError, match=message):
        model.generate(**(usual | arguments))
    # At the call, not where its first token is asked for.
    with pytest.raises(ValueError, match=message):
        model.stream(**(usual | arguments))
