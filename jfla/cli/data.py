"""The demo's two tasks: Python's standard library as bytes, and associative recall in bytes that text never has.

A row of recall is `PAIRS` key-value pairs and then queries: a key that was given, and behind it its value. The model is
scored on the values behind queried keys alone, which takes a memory that is written and read by content.
Reference: Arora et al., Zoology: Measuring and Improving Recall in Efficient Language Models (arXiv:2312.04927).
"""

import pathlib
import sysconfig
from collections.abc import Callable
from typing import NamedTuple

import grain
import numpy as np
from jaxtyping import Bool, Int32, UInt8

VOCAB = 256
PAIRS, SYMBOLS = 8, 16  # as many values as keys
FIRST_KEY, FIRST_VALUE = 128, 192  # above ASCII
_HELD_OUT = 16  # every 16th file is never trained on
_LEAST_BYTES = 100_000
_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "encodings", "__pycache__"}


class Corpus(NamedTuple):
    """Source code as ASCII bytes; `held_out` comes from files that `train` does not contain."""

    train: UInt8[np.ndarray, " n"]
    held_out: UInt8[np.ndarray, " m"]
    files: int


class Batch(NamedTuple):
    """Rows of T + 1 tokens; `scored` marks the positions whose next token counts."""

    tokens: Int32[np.ndarray, "B T_plus_1"]
    scored: Bool[np.ndarray, "B T"]


def load_corpus(folder: pathlib.Path | None = None) -> Corpus:
    """Reads the standard library's own .py files in the order of their names, without tests and installed packages.

    **Raises:** `FileNotFoundError` when the folder holds less than 100 kB of them, as in a zipped Python.
    """
    folder = pathlib.Path(sysconfig.get_path("stdlib")) if folder is None else folder
    paths = [path for path in sorted(folder.rglob("*.py")) if not _SKIPPED & set(path.relative_to(folder).parts)]
    texts = [path.read_bytes() for path in paths]
    held_out = [i % _HELD_OUT == _HELD_OUT - 1 for i in range(len(texts))]
    if sum(map(len, texts)) < _LEAST_BYTES or not any(held_out):
        raise FileNotFoundError(f"the demo reads Python's own source, at least {_LEAST_BYTES} bytes of .py in {folder}")
    parts = (b"\n".join(text for text, out in zip(texts, held_out) if out is wanted) for wanted in (False, True))
    train, held_out = (np.frombuffer(_ascii(part), np.uint8) for part in parts)
    return Corpus(train, held_out, len(paths))


def batches(rows: Callable[[np.random.Generator], Batch], steps: int, seed: int) -> grain.MapDataset[Batch]:
    """One batch per step. Batch i depends on `seed` and i alone, so that a run resumes anywhere."""
    return grain.MapDataset.range(steps).seed(seed).random_map(lambda _, rng: rows(rng))


def text_rows(rng: np.random.Generator, text: UInt8[np.ndarray, " n"], rows: int, time: int) -> Batch:
    """Rows of `time + 1` bytes cut anywhere; every next byte counts."""
    start = rng.integers(len(text) - time, size=(rows, 1))
    return Batch(text[start + np.arange(time + 1)].astype(np.int32), np.ones((rows, time), bool))


def recall_rows(rng: np.random.Generator, rows: int, time: int) -> Batch:
    """Pairs, then queries. Each row draws its keys and their values anew, so nothing can be learned by heart."""
    if time <= 2 * PAIRS:
        raise ValueError(f"time must be above {2 * PAIRS}, the length of {PAIRS} pairs, got {time}")
    keys = np.argsort(rng.random((rows, SYMBOLS)), axis=1)[:, :PAIRS]
    values = rng.integers(SYMBOLS, size=(rows, PAIRS))
    queries = rng.integers(PAIRS, size=(rows, time // 2 + 1 - PAIRS))
    order = np.concatenate([np.tile(np.arange(PAIRS), (rows, 1)), queries], axis=1)
    pairs = [FIRST_KEY + np.take_along_axis(keys, order, axis=1), FIRST_VALUE + np.take_along_axis(values, order, 1)]
    tokens = np.stack(pairs, axis=2).reshape(rows, -1)[:, : time + 1]
    position = np.arange(time)
    scored = np.tile((position >= 2 * PAIRS) & (position % 2 == 0), (rows, 1))
    return Batch(tokens.astype(np.int32), scored)


def _ascii(text: bytes) -> bytes:
    return text.decode("ascii", errors="replace").replace("\ufffd", "?").encode()
