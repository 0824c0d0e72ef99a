"""The Hopper kernels' door: what they support, interpret mode, and the two ops."""

import contextlib
from collections.abc import Iterator
from typing import Any

from jax import Array

from jfla._types import DeltaRuleOutput, Inputs, Options

__all__ = ["chunked", "interpret", "recurrent", "supported", "unsupported"]


def supported(q: Array, k: Array, v: Array, g: Array, beta: Array, **arguments: Any) -> str | None:
    """None when the kernels can take this call of `chunk_kda` or `chunk_gdn` (g decides which), else the reason."""
    return "the kernels are not part of this version"


def unsupported(form: str, inputs: Inputs, options: Options) -> str | None:
    return "the kernels are not part of this version"


@contextlib.contextmanager
def interpret() -> Iterator[None]:
    yield


def chunked(inputs: Inputs, options: Options) -> DeltaRuleOutput:
    raise NotImplementedError(unsupported("chunk", inputs, options))


def recurrent(inputs: Inputs, options: Options) -> DeltaRuleOutput:
    raise NotImplementedError(unsupported("recurrent", inputs, options))
