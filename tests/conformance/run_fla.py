"""Runs Flash Linear Attention's own tests of KDA and GDN, unchanged, against jfla.

    python tests/conformance/run_fla.py CHECKOUT [--out FOLDER] [--implementation NAME] [-k TESTS] [-n WORKERS]

CHECKOUT is a clone of github.com/fla-org/flash-linear-attention, which stays as it is. Prints a table of what passed,
what took each call and what is not supported, and writes it with the record of every case to FOLDER. Exits with 1 if
a case failed or none ran, and with pytest's status if it ended early. All other options go to pytest. Needs PyTorch,
Triton, what the checkout needs, and pytest.
"""

import argparse
import dataclasses
import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import subprocess
import sys
import tempfile

import fla_table

HERE = pathlib.Path(__file__).resolve().parent
TESTS = ("tests/ops/test_kda.py", "tests/ops/test_gdn.py")


def environment(checkout: pathlib.Path) -> dict[str, str]:
    """The environment of the tests: the checkout's `fla`, this folder, this clone's `jfla`."""
    folders = [checkout, HERE, HERE.parents[1]]
    old = os.environ.get("PYTHONPATH")
    paths = [str(folder) for folder in folders] + ([old] if old else [])
    return (
        os.environ
        | {
            "PYTHONPATH": os.pathsep.join(paths),
            "PYTHONDONTWRITEBYTECODE": "1",  # the checkout stays as it is
            "FLA_DISABLE_BACKEND_DISPATCH": "1",  # else FLA skips its cases with grouped heads
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # PyTorch needs its part of the GPU's memory
        }
    )


def commit(folder: pathlib.Path) -> str:
    """The commit that is checked out, "+" behind it where files were changed."""
    git = ["git", "-C", str(folder)]
    head = subprocess.run(
        [*git, "rev-parse", "--short=10", "HEAD"], capture_output=True, text=True
    )
    if head.returncode:
        return "no git repository"
    changed = subprocess.run([*git, "diff", "--quiet", "HEAD"], check=False).returncode
    return head.stdout.strip() + "+" * bool(changed)


def described(arguments: argparse.Namespace, rest: list[str]) -> dict[str, str]:
    """What was run, where, at which commits."""
    import jax

    packages = ("jax", "torch", "triton")
    versions = [
        f"{package} {importlib.metadata.version(package)}" for package in packages
    ]
    return {
        "Flash Linear Attention": commit(arguments.checkout),
        "jfla": commit(HERE),
        "device": jax.devices()[0].device_kind,
        "versions": ", ".join([f"Python {platform.python_version()}", *versions]),
        "implementation": arguments.implementation or "as jfla chooses",
        "options of pytest": " ".join(rest) or "none",
        "date": datetime.date.today().isoformat(),
    }


def main() -> int:
    """Runs the tests, prints and writes the tables; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("checkout", type=pathlib.Path)
    parser.add_argument(
        "--out", type=pathlib.Path, default=pathlib.Path("fla-conformance")
    )
    parser.add_argument(
        "--implementation", choices=("pallas", "xla"), help="what jfla chooses"
    )
    arguments, rest = parser.parse_known_args()
    files = [arguments.checkout.resolve() / name for name in TESTS]
    if missing := [str(path) for path in files if not path.is_file()]:
        parser.error(
            f"checkout must have {' and '.join(TESTS)}, there is no {', '.join(missing)}"
        )
    with tempfile.TemporaryDirectory() as folder:
        record = pathlib.Path(folder, "record.json")
        options = [
            "-p",
            "fla_plugin",
            "-p",
            "no:cacheprovider",
            "--record",
            str(record),
        ]
        options += ["-o", "log_cli=false", "-q"]
        if arguments.implementation:
            options += ["--implementation", arguments.implementation]
        command = [sys.executable, "-m", "pytest", *options, *rest, *map(str, files)]
        done = subprocess.run(
            command, env=environment(arguments.checkout.resolve()), check=False
        )
        if not record.exists():
            sys.stderr.write(
                "error: pytest wrote no record; what it said stands above\n"
            )
            return done.returncode or 1
        found = fla_table.cases(json.loads(record.read_text()))
    head = described(arguments, rest)
    if done.returncode not in (0, 1):  # 1 is a failed case, which the tables have
        head["not all cases"] = f"pytest ended with status {done.returncode}"
    text = fla_table.markdown(head, found)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "table.md").write_text(text)
    everything = {"head": head, "cases": [dataclasses.asdict(case) for case in found]}
    (arguments.out / "cases.json").write_text(json.dumps(everything, indent=1) + "\n")
    print(text)
    return fla_table.exit_status(found) or done.returncode


if __name__ == "__main__":
    sys.exit(main())
