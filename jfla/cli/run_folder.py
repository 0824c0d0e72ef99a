"""A run's own folder: claimed by its settings, refused to another; and JSON written whole."""

import dataclasses
import json
import pathlib
from typing import Any

RESULTS = "results.json"


class Refused(ValueError):
    """An option that cannot be had; `option` is its name."""

    def __init__(self, option: str, message: str):
        super().__init__(message)
        self.option = option


def claim(out: pathlib.Path, settings: Any) -> None:
    """Makes the folder this run's own: new, empty, or begun under the same settings, a dataclass."""
    wanted = dataclasses.asdict(settings)
    path = out / "run.json"
    if path.exists():
        found = json.loads(path.read_text())
        differing = [name for name in found if wanted.get(name) != found[name]]
        if found != wanted:
            other = ", ".join(f"{name} = {found[name]}" for name in differing)
            raise Refused(
                "out", f"{out} holds a run with {other}: give another folder or remove this one"
            )
        return
    if out.exists() and any(not child.name.startswith(".") for child in out.iterdir()):
        raise Refused("out", f"{out} is not empty and not a folder of such a run: give another one")
    out.mkdir(parents=True, exist_ok=True)
    write_json(path, wanted)


def finished(out: pathlib.Path, steps: int) -> dict[str, Any] | None:
    """The results of a run of at least so many steps, or None."""
    path = out / RESULTS
    if not path.exists():
        return None
    results = json.loads(path.read_text())
    return results if results["steps"] >= steps else None


def write_json(path: pathlib.Path, value: dict[str, Any]) -> None:
    """JSON, whole or not at all."""
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(json.dumps(value, indent=2) + "\n")
    temporary.replace(path)
