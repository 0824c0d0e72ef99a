"""The tiny published models of the goldens: their folders, results of their authors' code, and tolerances."""

import json
import pathlib

import numpy as np

FOLDER = pathlib.Path(__file__).parents[1] / "goldens" / "models"
TOLERANCES = json.loads((FOLDER / "tolerances.json").read_text())
FAMILIES = sorted(path.name for path in FOLDER.iterdir() if path.is_dir())


def golden(family: str) -> dict[str, np.ndarray]:
    with np.load(FOLDER / family / "golden.npz") as file:
        return {name: file[name] for name in file.files}
