"""The console script `jfla`: `main` looks for the optional packages; the commands are in app.py."""

import importlib.util
import sys

_PACKAGES = (
    "typer",
    "rich",
    "optax",
    "orbax",
    "grain",
    "matplotlib",
)  # the extra `cli`


def main() -> None:
    """Runs the command line, or says what to install for it."""
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        packages = ", ".join(missing)
        remedy = "pip install 'jfla[cli]'"
        print(
            f"jfla's command line needs {packages}. Install it with: {remedy}",
            file=sys.stderr,
        )
        sys.exit(1)
    from jfla.cli.app import app

    app(prog_name="jfla")
