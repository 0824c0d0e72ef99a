"""The demo's two tasks: Python's standard library as bytes, and associative recall in other bytes.

A row of recall is `PAIRS` key-value pairs and then queries: a key that was given, and behind it its
value. The model is scored on the values behind queried keys alone, which takes a memory that is
written and read by content.
Reference: Arora et al., Zoology: Measuring and Improving Recall in Efficient Language Models
(arXiv:2312.04927).
"""

import dataclasses
import pathlib
import sysconfig
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Int32, UInt8

from jfla.nn.sharding import BATCH, placement

if TYPE_CHECKING:
    import grain

VOCAB = 256
PAIRS = 8
SYMBOLS = 16  # keys, and as many values
FIRST_KEY = 128  # above ASCII
FIRST_VALUE = 192
_HELD_OUT_EVERY = 16  # one file in so many is never trained on
_LEAST_BYTES = 100_000
_SKIPPED = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idlelib",
    "encodings",
    "__pycache__",
}


class Corpus(NamedTuple):
    """Source code as ASCII bytes; `held_out` comes from files that `train` does not contain."""

    train: UInt8[np.ndarray, " n"]
    held_out: UInt8[np.ndarray, " m"]
    files: int


class Batch(NamedTuple):
    """Rows of T + 1 tokens; `scored` marks the positions whose next token counts.

    `segment_ids` are those of packed documents, at the first T tokens; None where a row is one.
    """

    tokens: Int32[np.ndarray | jax.Array, "B T_plus_1"]
    scored: Bool[np.ndarray | jax.Array, "B T"]
    segment_ids: Int32[np.ndarray | jax.Array, "B T"] | None = None


@dataclasses.dataclass(frozen=True)
class Batches:
    """The rows of a data set, `size` of them a step. Those of a step depend on it alone.

    **Fields:** `rows`, each a batch without its first axis.
    """

    rows: "grain.MapDataset[Batch]"
    size: int

    def batch(self, step: int) -> Batch:
        """The batch of a step: arrays of NumPy or, under a mesh, of JAX, split over the devices.

        A process reads the rows that its own devices hold, and no others.
        """
        first = self.size * step
        rows = [self.rows[first + row] for row in self._rows_here()]
        return jax.tree.map(lambda *x: _placed(np.stack(x), self.size), *rows)

    def _rows_here(self) -> list[int]:
        """The rows of a batch that this process's devices hold, in order."""
        sharding = placement((BATCH,), (self.size,))
        if sharding is None:
            return list(range(self.size))
        here = set()
        for index in sharding.addressable_devices_indices_map((self.size,)).values():
            assert index is not None  # there is one for every device of this process
            here.update(range(self.size)[index[0]])
        return sorted(here)


def _placed(x: np.ndarray, size: int) -> np.ndarray | jax.Array:
    """An array of `size` rows on the devices of the mesh, from those of this process."""
    shape = (size, *x.shape[1:])
    sharding = placement((BATCH, None), shape)
    return (
        x
        if sharding is None
        else jax.make_array_from_process_local_data(sharding, x, shape)
    )


def load_corpus(folder: pathlib.Path | None = None) -> Corpus:
    """Reads the standard library's .py files by name, without tests and installed packages.

    **Raises:** `FileNotFoundError` when the folder holds less than 100 kB of them, as in a zipped
    Python.
    """
    if folder is None:
        folder = pathlib.Path(sysconfig.get_path("stdlib"))
    train = []
    held_out = []
    files = 0
    for path in sorted(folder.rglob("*.py")):
        if _SKIPPED & set(path.relative_to(folder).parts):
            continue
        files += 1
        part = train if files % _HELD_OUT_EVERY else held_out
        part.append(path.read_bytes())
    size = sum(map(len, train)) + sum(map(len, held_out))
    if size < _LEAST_BYTES or not held_out:
        raise FileNotFoundError(
            f"the demo reads Python's own source, at least {_LEAST_BYTES} bytes of .py in {folder}"
        )
    return Corpus(_ascii(train), _ascii(held_out), files)


def _ascii(texts: list[bytes]) -> UInt8[np.ndarray, " n"]:
    """The texts, line by line, with "?" for what is not ASCII."""
    text = b"\n".join(texts).decode("ascii", errors="replace")
    return np.frombuffer(text.replace("\ufffd", "?").encode(), np.uint8)


def batches(
    row: Callable[[np.random.Generator], Batch], size: int, steps: int, seed: int
) -> Batches:
    """Batches of `size` rows, each drawn by `row` as a batch of one.

    Row i depends on `seed` and i alone, so that a run resumes anywhere, on any number of processes.
    """

    import grain  # here, so that text can be read without

    def drawn(_: int, rng: np.random.Generator) -> Batch:
        return jax.tree.map(lambda x: x[0], row(rng))

    return Batches(
        grain.MapDataset.range(size * steps).seed(seed).random_map(drawn), size
    )


def text_rows(
    rng: np.random.Generator, text: UInt8[np.ndarray, " n"], rows: int, time: int
) -> Batch:
    """Rows of `time + 1` bytes cut anywhere; every next byte counts."""
    start = rng.integers(len(text) - time, size=(rows, 1))
    tokens = text[start + np.arange(time + 1)]
    return Batch(tokens.astype(np.int32), np.ones((rows, time), bool))


def recall_rows(rng: np.random.Generator, rows: int, time: int) -> Batch:
    """Pairs, then queries. Each row draws keys and values anew: nothing is learned by heart."""
    if time <= 2 * PAIRS:
        raise ValueError(
            f"time must be above {2 * PAIRS}, the length of {PAIRS} pairs, got {time}"
        )
    shuffled = np.argsort(rng.random((rows, SYMBOLS)), axis=1)
    keys = FIRST_KEY + shuffled[:, :PAIRS]
    values = FIRST_VALUE + rng.integers(SYMBOLS, size=(rows, PAIRS))
    queries = rng.integers(PAIRS, size=(rows, time // 2 + 1 - PAIRS))
    given = np.tile(np.arange(PAIRS), (rows, 1))
    order = np.concatenate([given, queries], axis=1)
    pairs = [np.take_along_axis(symbols, order, axis=1) for symbols in (keys, values)]
    tokens = np.stack(pairs, axis=2).reshape(rows, -1)[:, : time + 1]
    position = np.arange(time)
    is_key = position % 2 == 0
    scored = np.tile((position >= 2 * PAIRS) & is_key, (rows, 1))
    return Batch(tokens.astype(np.int32), scored)
