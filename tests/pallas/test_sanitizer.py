"""The kernels under compute-sanitizer: hazards in shared memory, accesses out of bounds, threads missing at a barrier.

It sees every access on a device, those of copies and of the tensor cores, too. Needs the package
nvidia-cuda-sanitizer-api: the tool of an older CUDA toolkit checks no copies of tensors.
"""

import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
from support.sanitized_call import CALLS

TESTS = pathlib.Path(__file__).parents[1]
TOOLS = {
    # By hazards: the analysis of them leaves out reads of what a cp.async has not written yet.
    "racecheck": [
        "--racecheck-report=all",
        "--check-tensor-ops=yes",
        "--num-cuda-barriers=64",
    ],
    "memcheck": ["--report-api-errors=no"],
    "synccheck": [],
}
FIRST_PORT = 49152


def sanitizer() -> str | None:
    """The command."""
    spec = importlib.util.find_spec("nvidia")
    folders = [] if spec is None else spec.submodule_search_locations or []
    packaged = [f"{folder}/cu13/compute-sanitizer" for folder in folders]
    return shutil.which("compute-sanitizer", path=os.pathsep.join(packaged))


@pytest.mark.gpu
@pytest.mark.skipif(sanitizer() is None, reason="needs nvidia-cuda-sanitizer-api")
@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("name", CALLS)
def test_nothing_is_found(name, tool):
    # The tools of processes side by side talk through ports of their own.
    port = FIRST_PORT + 100 * (
        list(CALLS).index(name) * len(TOOLS) + list(TOOLS).index(tool)
    )
    command = [
        sanitizer(),
        f"--tool={tool}",
        "--kernel-name=regex=jfla",
        "--show-backtrace=device",
        "--print-limit=20",
        f"--port={port}",
        *TOOLS[tool],
        sys.executable,
        "-m",
        "support.sanitized_call",
        name,
    ]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(
            [str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]
        ),
        "XLA_FLAGS": "--xla_gpu_autotune_level=0 --xla_gpu_enable_command_buffer=",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    found = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300
    )
    log = found.stdout + found.stderr
    assert f"computed: {name}" in log, log
    summary = re.search(r"=+ (?:RACECHECK|ERROR) SUMMARY: (.*)", log)
    assert summary is not None, log
    assert summary[1].startswith("0 "), log
