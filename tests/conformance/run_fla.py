"""Runs Flash Linear Attention's own tests of KDA and GDN, unchanged, against jfla.

    python tests/conformance/run_fla.py CHECKOUT [--out FOLDER] [--implementation NAME] [-k TESTS] [-n WORKERS]

CHECKOUT is a clone of github.com/fla-org/flash-linear-attention, which stays as it is. Prints a table of what passed,
what took each call and what is not supported, and writes it with the record of every case to FOLDER. Cases that found
no memory beside those of other workers run again, one at a time. Exits with 1 if a case failed or none ran, and with
pytest's status if it ended early. All other options go to pytest. Needs PyTorch, Triton, what the checkout needs, and
pytest.
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
from typing import Any

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
    # Of a copy without .git inside of another repository git would tell that one's commit.
    if head.returncode or not (folder / ".git").exists():
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
        "jfla": commit(HERE.parents[1]),
        "device": jax.devices()[0].device_kind,
        "versions": ", ".join([f"Python {platform.python_version()}", *versions]),
        "implementation": arguments.implementation or "as jfla chooses",
        "options of pytest": " ".join(rest) or "none",
        "date": datetime.date.today().isoformat(),
    }


def run_pytest(
    checkout: pathlib.Path, tests: list[str], options: list[str]
) -> tuple[int, dict[str, dict[str, Any]] | None]:
    """The status of pytest on `tests` of a checkout, and the plugin's record of the cases if it wrote one."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "record.json")
        command = [sys.executable, "-m", "pytest", "-q", "-o", "log_cli=false"]
        command += ["-p", "fla_plugin", "-p", "no:cacheprovider", "--record", str(path)]
        command += [*options, *(str(checkout / test) for test in tests)]
        done = subprocess.run(command, env=environment(checkout), check=False)
        record = json.loads(path.read_text()) if path.exists() else None
    return done.returncode, record


def parsed() -> tuple[argparse.Namespace, list[str]]:
    """The options of this script, and those of pytest."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("checkout", type=pathlib.Path)
    out = pathlib.Path("fla-conformance")
    parser.add_argument("--out", type=pathlib.Path, default=out)
    names = ("pallas", "xla")
    parser.add_argument("--implementation", choices=names, help="what jfla chooses")
    parser.add_argument("-n", dest="workers", help="processes of pytest-xdist")
    arguments, rest = parser.parse_known_args()
    files = [arguments.checkout.resolve() / name for name in TESTS]
    if missing := [str(path) for path in files if not path.is_file()]:
        parser.error(
            f"checkout must have {' and '.join(TESTS)}, there is no {', '.join(missing)}"
        )
    return arguments, rest


def main() -> int:
    """Runs the tests, prints and writes the tables; returns the exit status."""
    arguments, rest = parsed()
    checkout = arguments.checkout.resolve()
    options = list(rest)
    if arguments.implementation:
        options += ["--implementation", arguments.implementation]
    workers = ["-n", arguments.workers] if arguments.workers else []
    status, record = run_pytest(checkout, list(TESTS), options + workers)
    if record is None:
        sys.stderr.write("error: pytest wrote no record; what it said stands above\n")
        return status or 1
    head = described(arguments, rest + workers)
    again = fla_table.out_of_memory(record)
    if workers and again and status == 1:
        status, alone = run_pytest(checkout, again, options)
        record |= alone or {}
        head["found no memory beside other cases, run again alone"] = str(len(again))
    if status not in (0, 1):  # 1 is a failed case, which the tables have
        head["not all cases"] = f"pytest ended with status {status}"
    found = fla_table.cases(record)
    text = fla_table.markdown(head, found)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "table.md").write_text(text)
    everything = {"head": head, "cases": [dataclasses.asdict(case) for case in found]}
    (arguments.out / "cases.json").write_text(json.dumps(everything, indent=1) + "\n")
    print(text)
    return fla_table.exit_status(found) or status


if __name__ == "__main__":
    sys.exit(main())
