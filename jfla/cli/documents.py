"""Documents of a JSON-lines file as token ids, packed into rows of one length, in batches by step."""

import json
import pathlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import grain
import numpy as np
from jaxtyping import Bool, Int32

from jfla.cli.data import Batch, Batches
from jfla.cli.tokenizer import Tokenizer

_FORMS = '{"text": ...}, {"tokens": [...]} or {"prompt": ..., "completion": ...}'
_BINS = 64  # rows that are open at a time: a document goes into the first that has room


class Document(NamedTuple):
    """Tokens, and which of them are to be predicted."""

    tokens: Int32[np.ndarray, " n"]
    predicted: Bool[np.ndarray, " n"]


def read(
    path: pathlib.Path, tokenizer: Tokenizer, stop: tuple[int, ...], vocab_size: int
) -> list[Document]:
    """The documents of a file, one JSON object a line.

    A text is encoded and ends with the first stop token; token ids are taken as they are. Of a
    prompt and its completion, each a text or ids, the completion alone is to be predicted.

    **Raises:** `ValueError` that names the line for anything else, for tokens that the model does
    not have, and for a file in which nothing is to be predicted.
    """
    documents = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                document = _document(json.loads(line), tokenizer, stop)
                _check(document, vocab_size)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
            # Behind nothing, the first token cannot be predicted.
            if document.predicted[1:].any():
                documents.append(document)
    if not documents:
        raise ValueError(f"{path} must hold documents of two tokens or more, got none")
    return documents


def _document(found: Any, tokenizer: Tokenizer, stop: tuple[int, ...]) -> Document:
    keys = set(found) if isinstance(found, dict) else set()
    if keys >= {"prompt", "completion"}:
        prompt = _tokens(found["prompt"], tokenizer, ())
        completion = _tokens(found["completion"], tokenizer, stop, special=False)
    elif keys & {"text", "tokens"}:
        prompt = []
        completion = _tokens(
            found["text" if "text" in keys else "tokens"], tokenizer, stop
        )
    else:
        raise ValueError(f"a document must be {_FORMS}, got {str(found)[:60]}")
    tokens = np.array([*prompt, *completion], np.int64)
    return Document(tokens, np.arange(len(tokens)) >= len(prompt))


def _tokens(
    value: Any, tokenizer: Tokenizer, stop: tuple[int, ...], *, special: bool = True
) -> list[int]:
    if isinstance(value, str):
        return [*tokenizer.encode(value, special=special), *stop[:1]]
    if isinstance(value, list) and all(type(token) is int for token in value):
        return value
    raise ValueError(
        f"a text or a list of token ids was expected, got {str(value)[:60]}"
    )


def _check(document: Document, vocab_size: int) -> None:
    outside = [int(x) for x in document.tokens if not 0 <= x < vocab_size]
    if outside:
        raise ValueError(f"tokens must be in 0 .. {vocab_size - 1}, got {outside[:5]}")


def pack(documents: list[Document], time: int, seed: int) -> list[Batch]:
    """Rows of `time + 1` tokens, each a batch without its first axis, as full as first fit makes them.

    A longer document is cut into pieces, which do not see each other.
    """
    rng = np.random.default_rng(seed)
    pieces = [piece for document in documents for piece in _pieces(document, time)]
    order = rng.permutation(len(pieces))
    source = grain.MapDataset.source([pieces[i]._asdict() for i in order])
    packed = grain.experimental.FirstFitPackIterDataset(
        source.to_iter_dataset(),
        length_struct={"tokens": time + 1, "predicted": time + 1},
        num_packing_bins=_BINS,
        seed=seed,
    )
    return [_row(row) for row in packed]


def _pieces(document: Document, time: int) -> Iterator[Document]:
    """Of at most `time + 1` tokens: the last token of one is the first of the next, to predict from."""
    for start in range(0, len(document.tokens) - 1, time):
        piece = Document(*(x[start : start + time + 1] for x in document))
        if piece.predicted[1:].any():
            yield Document(piece.tokens.astype(np.int32), piece.predicted)


def _row(row: dict[str, np.ndarray]) -> Batch:
    segments = row["tokens_segment_ids"]
    same = (segments[1:] == segments[:-1]) & (segments[1:] > 0)
    scored = same & row["predicted"][1:].astype(bool)
    return Batch(row["tokens"], scored, segments[:-1].astype(np.int32))


def batches(rows: list[Batch], size: int, seed: int) -> Batches:
    """`size` rows a step, in a new order at every pass. Batch i depends on `seed` and i alone."""
    return Batches(grain.MapDataset.source(rows).shuffle(seed).repeat(), size)
