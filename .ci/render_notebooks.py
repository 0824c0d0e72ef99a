"""Executes notebooks/*.py and writes each, with its outputs, as the .ipynb next to it; files as arguments pick some.

With --run as the first argument nothing is written.
"""

import base64
import io
import os
import pathlib
import sys
import tempfile

import jupytext
import nbformat
from nbclient import NotebookClient
from PIL import Image
from traitlets.config import Config

FOLDER = pathlib.Path(__file__).resolve().parents[1] / "notebooks"
_COLORS = (
    256  # of a figure's palette: half of the bytes of true color, and hardly to be seen
)


def main() -> None:
    """Renders one notebook after the other; on the CPU, unless the environment says otherwise."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    only_run = sys.argv[1:2] == ["--run"]
    picked = {pathlib.Path(name).stem for name in sys.argv[2 if only_run else 1 :]}
    for source in sorted(FOLDER.glob("*.py")):
        if not picked or source.stem in picked:
            target, notebook = source.with_suffix(".ipynb"), render(source)
            if only_run:
                continue
            if str(FOLDER.parent) in nbformat.writes(notebook):
                raise ValueError(
                    f"{source.name} must not show where this checkout is; its output has {FOLDER.parent}"
                )
            nbformat.write(notebook, target)
            print(f"{target.name}: {target.stat().st_size // 1024} KiB")


def render(source: pathlib.Path) -> nbformat.NotebookNode:
    """The executed notebook. Ids, times and counts that change from run to run are left out."""
    notebook = jupytext.read(source)
    with tempfile.TemporaryDirectory() as sockets:
        # Not TCP: of two kernels that start at a time, one may find that the other has taken its ports.
        by_files = {"transport": "ipc", "ip": f"{sockets}/kernel"}
        NotebookClient(
            notebook,
            timeout=1800,
            kernel_name="python3",
            record_timing=False,
            resources={"metadata": {"path": str(FOLDER)}},
            config=Config({"KernelManager": by_files}),
        ).execute()
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if "image/png" in data:
                data["image/png"] = _small(data["image/png"])
                data.pop("text/plain", None)
    return notebook


def _small(png: str) -> str:
    picture = (
        Image.open(io.BytesIO(base64.b64decode(png)))
        .convert("RGB")
        .quantize(_COLORS, dither=Image.Dither.NONE)
    )
    buffer = io.BytesIO()
    picture.save(buffer, "png", optimize=True)
    return base64.b64encode(buffer.getvalue()).decode()


if __name__ == "__main__":
    main()
