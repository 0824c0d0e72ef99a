"""Compiles one call for one GPU: `python -m support.compile_for CAPABILITY CALL`, with the call as JSON.

In a process of its own, because Mosaic GPU goes on compiling for the first architecture of a process. It writes the
reports of ptxas and nvdisasm, and last a line of JSON: bytes of shared memory of every kernel.
"""

import contextlib
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

import jfla
from support.compile_report import Facts, facts
from support.described_calls import describe, value_and_gradients
from support.described_gpus import GPUS

_TESTS = pathlib.Path(__file__).parents[1]


def compiled(capability: str, counted: dict[str, str], **call: Any) -> Facts:
    """The facts of every kernel of a call; see `function_of` for its arguments."""
    command = [
        sys.executable,
        "-m",
        "support.compile_for",
        capability,
        json.dumps(call),
    ]
    report = {
        "JAX_PLATFORMS": "cpu",
        "MOSAIC_GPU_DUMP_PTXAS": "1",
        "MOSAIC_GPU_DUMP_SASS": "1",
    }
    done = subprocess.run(
        command,
        cwd=_TESTS,
        env=os.environ | report,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    now = facts(done.stdout, counted)
    taken = json.loads(done.stdout.splitlines()[-1])
    assert now.keys() == taken.keys()
    for name, kernel in now.items():
        kernel["shared memory"] = taken[name]
    return now


def function_of(
    op: str, dims: tuple[int, int], kind: str, time: int, features: list[str]
) -> tuple[Any, tuple[Any, ...]]:
    """A function and the shapes of its arguments.

    `kind` is "chunk", forward and backward, or "decode". `features` are "raw" gates with norms, "packed", an "initial"
    and a "final" state, states "along time" and of "segments", and "float16".
    """
    batch = 8
    arrays, static = describe(op, dims, "raw" in features, batch, time)
    states = (batch, 3) if "segments" in features else (batch,)
    if "initial" in features:
        arrays["initial_state"] = jax.ShapeDtypeStruct((*states, 2, *dims), jnp.float32)
    if "float16" in features:
        half = {
            name: jax.ShapeDtypeStruct(arrays[name].shape, jnp.float16)
            for name in "qkv"
        }
        arrays |= half
    static["return_final_state"] = "final" in features
    if "along time" in features:
        static["return_states_every"] = 128
    segment_ids = None
    if "packed" in features:
        segment_ids = jax.ShapeDtypeStruct(arrays["v"].shape[:2], jnp.int32)
    if kind == "chunk":
        return value_and_gradients(op, static), (arrays, segment_ids)
    recurrent = getattr(jfla, f"recurrent_{op}")
    return lambda arrays: recurrent(**arrays, **static), (arrays,)


@contextlib.contextmanager
def shared_memory(limit: int) -> Iterator[dict[str, int]]:
    """Bytes that a CTA of every kernel lowered inside takes, by name; none may take more than `limit`."""
    from jax.experimental.mosaic.gpu import core
    from jaxlib.mlir import ir

    found: dict[str, int] = {}
    size_of = core._smem_tree_size

    def recorded(buffers: object) -> int:
        size = size_of(buffers)
        function = ir.InsertionPoint.current.block.owner
        name = ir.StringAttr(function.attributes["sym_name"]).value.removesuffix(
            "_mosaic_gpu"
        )
        found[name] = max(found.get(name, 0), size)
        return size

    core._smem_tree_size = recorded
    with core.artificial_shared_memory_limit(limit):
        yield found


def main() -> None:
    """Compiles what the command line says."""
    capability, call = sys.argv[1:]
    gpu = GPUS[capability]
    function, arguments = function_of(**json.loads(call))
    with shared_memory(gpu.smem_per_cta) as found:
        gpu.compile(function, *arguments)
    sys.stdout.flush()
    print(f"\n{json.dumps(found)}")


if __name__ == "__main__":
    main()
