"""The demo's data: recall rows that can be answered, text cut from the corpus, batches that depend on the step."""

import functools

import numpy as np
import pytest

from jfla.cli import data


@pytest.fixture(scope="module")
def corpus() -> data.Corpus:
    return data.load_corpus()


def test_every_recall_answer_stands_in_the_row():
    tokens, scored, _ = data.recall_rows(np.random.default_rng(0), rows=50, time=101)
    assert tokens.shape == (50, 102)
    assert scored.shape == (50, 101)
    assert scored.sum(axis=1).tolist() == [-(-(101 - 2 * data.PAIRS) // 2)] * 50
    for row, where in zip(tokens, scored):
        pairs = dict(row[: 2 * data.PAIRS].reshape(-1, 2).tolist())
        assert len(pairs) == data.PAIRS
        for position in np.flatnonzero(where):
            assert row[position + 1] == pairs[row[position]]


def test_recall_cannot_be_learned_by_heart():
    """The value behind a key is as good as uniform over rows."""
    tokens, *_ = data.recall_rows(
        np.random.default_rng(0), rows=4000, time=2 * data.PAIRS + 1
    )
    first = tokens[tokens[:, 0] == data.FIRST_KEY, 1] - data.FIRST_VALUE
    counts = np.bincount(first, minlength=data.SYMBOLS)
    assert len(first) > 150
    assert counts.max() < 3 * counts.mean()


def test_a_row_too_short_for_its_pairs_is_refused():
    with pytest.raises(ValueError, match=r"time must be above 16.*got 16"):
        data.recall_rows(np.random.default_rng(0), rows=1, time=16)


def test_text_is_ascii_cut_from_the_corpus(corpus: data.Corpus):
    assert corpus.train.max() < data.FIRST_KEY
    assert len(corpus.train) > 10 * len(corpus.held_out) > 100_000
    tokens, scored, _ = data.text_rows(
        np.random.default_rng(0), corpus.train, rows=3, time=64
    )
    assert scored.all()
    for row in tokens:
        assert row.astype(np.uint8).tobytes() in corpus.train.tobytes()


def test_held_out_files_are_not_trained_on(corpus: data.Corpus):
    tokens, *_ = data.text_rows(
        np.random.default_rng(0), corpus.held_out, rows=20, time=400
    )
    train = corpus.train.tobytes()
    seen = [row.astype(np.uint8).tobytes() in train for row in tokens]
    assert sum(seen) <= 1  # licences and tables occur twice


def test_a_python_without_sources_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="Python's own source"):
        data.load_corpus(tmp_path)


def test_a_batch_depends_on_seed_and_step_alone():
    row = functools.partial(data.recall_rows, rows=1, time=40)
    short, long, other = (
        data.batches(row, 2, steps, seed) for steps, seed in ((5, 1), (9, 1), (9, 2))
    )
    for step in (4, 0, 2):
        np.testing.assert_array_equal(short.batch(step).tokens, long.batch(step).tokens)
        assert (short.batch(step).tokens != other.batch(step).tokens).any()
    assert (long.batch(3).tokens != long.batch(4).tokens).any()
