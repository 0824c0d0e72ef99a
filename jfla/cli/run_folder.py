"""A run's own folder: claimed by its settings, refused to another; and JSON written whole."""

import dataclasses
import json
import pathlib
from typing import Any

from jfla.cli import processes
from jfla.cli.refused import Refused

RESULTS = "results.json"
_SETTINGS = "run.json"


def claim(out: pathlib.Path, settings: Any) -> None:
    """Makes the folder this run's own: new, empty, or begun under the same settings, a dataclass.

    The first process does it; the others are refused what it is refused.
    """
    why = ""
    if processes.is_first():
        try:
            _claim(out, settings)
        except Refused as refused:
            why = str(refused)
    why = processes.told(why)
    if why:
        raise Refused("out", why)
    if not (out / _SETTINGS).exists():
        raise Refused(
            "out",
            f"{out} must be a folder that all processes share, got one that is not",
        )


def _claim(out: pathlib.Path, settings: Any) -> None:
    wanted = dataclasses.asdict(settings)
    path = out / _SETTINGS
    if path.exists():
        found = json.loads(path.read_text())
        differing = [name for name in found if wanted.get(name) != found[name]]
        if found != wanted:
            other = ", ".join(f"{name} = {found[name]}" for name in differing)
            raise Refused(
                "out",
                f"{out} holds a run with {other}: give another folder or remove this one",
            )
        return
    if out.exists() and any(not child.name.startswith(".") for child in out.iterdir()):
        raise Refused(
            "out",
            f"{out} is not empty and not a folder of such a run: give another one",
        )
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
