"""The settings of a `config.json`, read one by one; everything wrong with them is one error."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

_DTYPES = ("float32", "bfloat16", "float16")
_LARGEST = 2**31
# No model comes near; a file that says more would be built layer by layer for hours.
_MOST_LAYERS = 10_000


class Settings:
    """Settings with a note of each that is missing, of another kind, or not supported."""

    def __init__(
        self,
        values: Mapping[str, Any],
        where: str,
        path: str = "",
        problems: list | None = None,
    ):
        self.values = values
        self.where = where
        self.path = path
        self.problems: list[str] = [] if problems is None else problems

    def part(self, name: str) -> "Settings":
        """The settings inside of one; none where it is absent or null."""
        values = self.values.get(name)
        if values is not None and not isinstance(values, dict):
            self._note(name, "an object")
            values = None
        return Settings(values or {}, self.where, f"{self.path}{name}.", self.problems)

    def size(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        """A whole number of at least `least`."""
        value = self.values.get(name, default)
        whole = isinstance(value, int) and not isinstance(value, bool)
        if not whole or not least <= value <= _LARGEST:
            self._note(name, f"a whole number in {least} .. {_LARGEST}")
            return least
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A positive number."""
        value = self.values.get(name, default)
        real = isinstance(value, int | float) and not isinstance(value, bool)
        if not real or not 0 < value < float("inf"):
            self._note(name, "a positive number")
            return 1.0
        return float(value)

    def flag(self, name: str, default: bool | None = None) -> bool:
        """True or false."""
        value = self.values.get(name, default)
        if not isinstance(value, bool):
            self._note(name, "true or false")
            return False
        return value

    def only(self, name: str, *allowed: Any) -> None:
        """One of the values that the layers here can do; the first where it is absent."""
        if self.values.get(name, allowed[0]) not in allowed:
            self._note(name, " or ".join(map(repr, allowed)))

    def names(
        self, name: str, allowed: tuple[str, ...], default: list[str]
    ) -> list[str]:
        """A list of `len(default)` of the allowed words."""
        value = self.values.get(name)
        if value is None:
            return default
        fits = isinstance(value, list) and len(value) == len(default)
        if not fits or any(word not in allowed for word in value):
            self._note(name, f"{len(default)} of {' or '.join(allowed)}")
            return default
        return value

    def numbers(self, name: str) -> list[int]:
        """A list of whole numbers."""
        value = self.values.get(name) or []
        if not isinstance(value, list) or not all(isinstance(x, int) for x in value):
            self._note(name, "a list of whole numbers")
            return []
        return value

    def layers(self, name: str = "num_hidden_layers") -> int:
        """The number of layers."""
        layers = self.size(name)
        if layers > _MOST_LAYERS:
            self._note(name, f"at most {_MOST_LAYERS}")
            return 1
        return layers

    def dtype(self) -> Any:
        """What the weights are published in, float32 where nothing is said."""
        name = self.values.get("dtype") or self.values.get("torch_dtype") or "float32"
        if name not in _DTYPES:
            self._note("dtype", " or ".join(_DTYPES))
            name = "float32"
        return jnp.dtype(name)

    def complain(self, problem: str) -> None:
        """Notes something else."""
        self.problems.append(problem)

    def check(self) -> None:
        """Raises a `ValueError` that lists what was noted."""
        if self.problems:
            lines = "\n  ".join(self.problems)
            raise ValueError(
                f"{len(self.problems)} settings of {self.where} cannot be:\n  {lines}"
            )

    def _note(self, name: str, wanted: str) -> None:
        got = repr(self.values[name]) if name in self.values else "nothing"
        got = got if len(got) < 100 else got[:100] + "..."
        self.problems.append(f"{self.path}{name} must be {wanted}, got {got}")
