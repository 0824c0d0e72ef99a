"""The door to the benchmarks, which lie beside the library in a clone and are not installed with it."""

import importlib
from typing import Any

REPOSITORY = "https://github.com/jfla-org/jfla"


class Absent(Exception):
    """There are no benchmarks here; the message says how to run them."""


def command() -> Any:
    """The module `benchmarks.command`. Raises `Absent` where this is not a clone."""
    try:
        return importlib.import_module("benchmarks.command")
    except ModuleNotFoundError as missing:
        if missing.name not in ("benchmarks", "benchmarks.command"):
            raise
        raise Absent(
            f"The benchmarks run from a clone: git clone {REPOSITORY}, and there: uv run jfla bench"
        ) from None
