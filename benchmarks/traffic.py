"""What a device gets from the others, in bytes, read off programs compiled for several H200s: no GPU is needed.

    JAX_PLATFORMS=cpu UV_PROJECT_ENVIRONMENT=.venv-aot uv run --group aot python -m benchmarks.traffic

Of one call with time split, forward, and forward and backward, by the kind of collective, beside the formula of
docs/scaling.md.
"""

import argparse
import collections
import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jfla
from benchmarks.h200 import H200
from benchmarks.internals import MAX_GATHERED

COLLECTIVE = re.compile(
    r"= (.*?) (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(-start)?\("
)
SHAPE = re.compile(r"\b([a-z]+\d+)\[([\d,]*)\]")


def received(text: str, devices: int) -> dict[str, int]:
    """Bytes that a device gets in one run of a compiled program, by collective."""
    found: collections.Counter[str] = collections.Counter()
    for result, kind, start in COLLECTIVE.findall(text):
        shapes = [found for found in SHAPE.findall(result) if found[0] != "u32"]
        # The result of a start operation has its operands beside its results.
        if start and kind != "all-reduce":
            shapes = shapes[len(shapes) // 2 :]
        size = sum(
            math.prod(int(n) for n in shape.split(",") if n)
            * jnp.dtype(_dtype(name)).itemsize
            for name, shape in shapes
        )
        # A gathered array has the device's own part; an all-reduce goes around a ring twice.
        share = {"all-gather": 1, "all-reduce": 2}.get(kind)
        found[kind] += (
            size if share is None else share * size * (devices - 1) // devices
        )
    return dict(found)


def _dtype(name: str) -> str:
    """XLA's name of a type as NumPy's."""
    kinds = {"f": "float", "s": "int", "u": "uint"}
    if name == "bf16":
        return "bfloat16"
    return kinds[name[0]] + name[1:]


def formula(
    devices: int, heads: int, key_dim: int, value_dim: int, backward: bool
) -> int:
    """The maps of one row: R and C, then R^T and D; the last step of doubling, and the shift, have no R."""
    r, c = 4 * heads * key_dim * key_dim, 4 * heads * key_dim * value_dim
    if devices <= MAX_GATHERED:
        once = (devices - 1) * (r + c)
    else:
        steps = math.ceil(math.log2(devices))
        once = (steps - 1) * (r + c) + 2 * c
    return once * (2 if backward else 1)


def compiled(
    op: str, devices: int, tokens: int, heads: int, dim: int, backward: bool
) -> str:
    """The program of a call on a sequence of `tokens` a device."""
    shape = f"1x1x{devices}"
    topology = topologies.get_topology_desc(
        platform="cuda", topology_name=shape, target_config=H200, topology=shape
    )
    mesh = Mesh(np.array(topology.devices), ("t",), axis_types=(AxisType.Auto,))
    time = P(None, "t")

    def described(*rest: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        shape = (1, tokens * devices, heads, *rest)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, time))

    chunk = functools.partial(getattr(jfla, f"chunk_{op}"), implementation="pallas")
    local = lambda *x: chunk(*x, sequence_axis="t").output
    call = jax.shard_map(local, mesh=mesh, in_specs=time, out_specs=time)

    def both(do: jax.Array, *x: jax.Array) -> Any:
        out, adjoint = jax.vjp(call, *x)
        return out, adjoint(do)

    q = described(dim)
    g = described(*([dim] if op == "kda" else []), dtype=jnp.float32)
    arrays = (q, q, q, g, described(dtype=jnp.float32))
    with jfla.pallas.compiling_for("9.0"):
        traced = (
            jax.jit(both).trace(q, *arrays)
            if backward
            else jax.jit(call).trace(*arrays)
        )
        return traced.lower().compile().as_text() or ""


def main() -> None:
    """Prints a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--op", default="gdn", choices=["kda", "gdn"])
    parser.add_argument("--devices", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--tokens", type=int, default=1024, help="of each device")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--dim", type=int, default=128)
    options = parser.parse_args()
    print("| devices | forward | forward and backward | formula |")
    print("|---|---|---|---|")
    for devices in options.devices:
        row = [str(devices)]
        for backward in (False, True):
            text = compiled(
                options.op,
                devices,
                options.tokens,
                options.heads,
                options.dim,
                backward,
            )
            by_kind = received(text, devices)
            row.append(", ".join(f"{kind} {size:,}" for kind, size in by_kind.items()))
        sizes = [
            formula(devices, options.heads, options.dim, options.dim, backward)
            for backward in (False, True)
        ]
        print(
            "| " + " | ".join([*row, " / ".join(f"{size:,}" for size in sizes)]) + " |"
        )


if __name__ == "__main__":
    main()
