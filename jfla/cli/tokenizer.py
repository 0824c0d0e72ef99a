"""Text and token ids: a model folder's tokenizer where its package is installed, else ids as they are."""

import pathlib
from collections.abc import Callable
from typing import Any, Protocol

FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
)


class Tokenizer(Protocol):
    """What the commands ask of a tokenizer."""

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids, with the tokens that a text begins or ends with if `special`."""
        ...

    def stream(self) -> Callable[[int], str]:
        """A function from each token in turn to the text that can be shown with it."""
        ...


class TextTokenizer:
    """A tokenizer of the package `tokenizers`."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids, with the tokens that a text begins or ends with if `special`."""
        return list(self._tokenizer.encode(text, add_special_tokens=special).ids)

    def stream(self) -> Callable[[int], str]:
        """Holds back a token that is part of a character until the rest of it comes."""
        from tokenizers.decoders import DecodeStream  # type: ignore[import-not-found]

        decoder = DecodeStream(skip_special_tokens=True)
        return lambda token: decoder.step(self._tokenizer, token) or ""


class TokenIds:
    """No tokenizer: numbers in, numbers out. `why` says how to get text."""

    def __init__(self, why: str):
        self.why = why

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids written as numbers, with spaces or commas between."""
        del special  # there are none to add
        words = text.replace(",", " ").split()
        if not all(word.isascii() and word.isdigit() for word in words):
            shown = text if len(text) < 40 else text[:40] + "..."
            raise ValueError(
                f'a prompt must be token ids, as "12 7 301", got {shown!r}: {self.why}'
            )
        return [int(word) for word in words]

    def stream(self) -> Callable[[int], str]:
        """Each id and a space."""
        return lambda token: f"{token} "


def load_tokenizer(folder: pathlib.Path) -> tuple[Tokenizer, str, str]:
    """The folder's tokenizer, what it is, and why that one.

    **Raises:** `ValueError` for a file that is no tokenizer.
    """
    present = [name for name in FILES if (folder / name).is_file()]
    why = f"{folder} has no tokenizer.json"
    if "tokenizer.json" in present:
        try:
            from tokenizers import Tokenizer as Fast  # type: ignore[import-not-found]
        except ImportError:
            why = "reading tokenizer.json needs tokenizers: pip install tokenizers"
            return TokenIds(why), "token ids", why
        path = folder / "tokenizer.json"
        try:
            return (
                TextTokenizer(Fast.from_file(str(path))),
                path.name,
                "tokenizers is installed",
            )
        except Exception as error:  # the package raises nothing narrower
            raise ValueError(f"{path} must be a tokenizer, got {error}") from error
    if present:
        try:
            from transformers import AutoTokenizer  # type: ignore[import-not-found]
        except ImportError:
            why = f"reading {present[0]} needs transformers: pip install transformers"
            return TokenIds(why), "token ids", why
        # Code that a folder brings along is never run.
        loaded = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        fast = getattr(loaded, "backend_tokenizer", None)
        if fast is not None:
            return TextTokenizer(fast), present[0], "transformers is installed"
        why = f"transformers reads {present[0]} only without a stream of text"
    return TokenIds(why), "token ids", why
