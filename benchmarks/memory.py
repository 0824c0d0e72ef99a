"""Memory and time of a training step, by size of the model, length of the row and what `remat` keeps.

    python -m benchmarks.memory --out FILE.json [--op kda] [--case 90m:16384] [--budget-seconds 470] [--described]

A case is compiled before it is run: where it would not fit, its peak is known all the same. With `--described` it is
compiled for an H200 on a machine without one, and not run. Rows that the file already holds are kept, so that several
calls can share the work.
"""

import argparse
import concurrent.futures
import contextlib
import functools
import os
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.experimental import topologies
from jaxtyping import Array
from rich.console import Console
from rich.table import Table

from benchmarks import records
from benchmarks.h200 import H200
from benchmarks.records import Record
from benchmarks.shapes import OPS
from jfla import nn, pallas

REMAT: dict[str, Any] = {
    "False": False,
    "save_op_and_mlp": nn.remat_policies.save_op_and_mlp,
    "save_op": nn.remat_policies.save_op,
    "True": True,
}
MODELS: dict[str, dict[str, Any]] = {
    "tiny": {"num_layers": 1, "hidden_size": 32, "num_heads": 2, "head_dim": 16},
    "90m": {"num_layers": 12, "hidden_size": 768, "num_heads": 6, "head_dim": 128},
    "310m": {"num_layers": 24, "hidden_size": 1024, "num_heads": 8, "head_dim": 128},
    "1.2b": {"num_layers": 24, "hidden_size": 2048, "num_heads": 16, "head_dim": 128},
}
CASES: tuple[str, ...] = ("90m:16384", "90m:65536", "310m:16384", "1.2b:16384")
VOCAB = 256
REPEATS = 3
FITS = 0.97  # of the memory that the device's allocator has
MIB = 2**20
Say = Callable[[str], None]


def config_of(
    op: Any, model: str, remat: str, described: bool = False
) -> nn.DeltaLMConfig:
    """A language model of bytes."""
    gpu = described or jax.default_backend() == "gpu"
    return nn.DeltaLMConfig(
        vocab_size=VOCAB,
        op=op,
        dtype=jnp.bfloat16,
        implementation="pallas" if gpu else "xla",
        remat=REMAT[remat],
        **MODELS[model],
    )


def compiled(
    op: Any, model: str, length: int, remat: str, described: bool = False
) -> Any:
    """The program of a row."""
    config = config_of(op, model, remat, described)
    made = nnx.eval_shape(lambda: nn.DeltaLM(config, rngs=nnx.Rngs(0)))
    graph, params = nnx.split(made)
    optimizer = _adamw()
    state = (params, jax.eval_shape(optimizer.init, params))
    arguments = (state, jax.ShapeDtypeStruct((1, length), jnp.int32))
    with _target(described) as place:
        placed = jax.tree.map(place, arguments)
        return _step.lower(graph, optimizer, *placed).compile()


@contextlib.contextmanager
def _target(described: bool) -> Iterator[Callable[[Any], Any]]:
    """What puts the shape of an argument where a program runs, while that is compiled for."""
    if not described:
        yield lambda x: x
        return
    topology = topologies.get_topology_desc(
        platform="cuda", topology_name="1x1x1", target_config=H200, topology="1x1x1"
    )
    there = jax.sharding.SingleDeviceSharding(topology.devices[0])
    with pallas.compiling_for("9.0"):
        yield lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=there)


def measured(
    op: Any, model: str, length: int, remat: str, program: Any, described: bool = False
) -> Record:
    """A row: peak, what a block keeps, and the time of a step, or why there is none."""
    config = config_of(op, model, remat, described)
    made = nnx.eval_shape(lambda: nn.DeltaLM(config, rngs=nnx.Rngs(0)))
    tokens = jnp.zeros((1, length), jnp.int32)
    row: Record = {"op": op, "model": model, "time": length, "remat": remat}
    row["parameters"] = sum(x.size for x in jax.tree.leaves(nnx.state(made)))
    peak = _peak_bytes(program)
    row["peak_mib"] = round(peak / MIB, 1)
    with _target(described):
        row["kept_mib"] = round(_kept_bytes(config, length) / MIB, 2)
    if described:
        return row | {"refused": "not run"}
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", float("inf"))
    if peak > FITS * limit:
        return row | {"refused": "does not fit"}
    return row | _run(program, config, _adamw(), tokens)


@functools.cache  # one object: what is compiled with it serves every row
def _adamw() -> optax.GradientTransformation:
    return optax.adamw(1e-4)


def _peak_bytes(program: Any) -> int:
    """As the compiler allots it."""
    m = program.memory_analysis()
    results = m.output_size_in_bytes - m.alias_size_in_bytes
    return m.argument_size_in_bytes + m.temp_size_in_bytes + results


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def _step(
    graph: Any,
    optimizer: optax.GradientTransformation,
    state: tuple[Any, Any],
    tokens: Array,
) -> tuple[tuple[Any, Any], Array]:
    params, opt_state = state

    def loss_of(params: Any) -> Array:
        return nn.next_token_loss(nnx.merge(graph, params)(tokens), tokens)

    loss, grads = jax.value_and_grad(loss_of)(params)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), loss


def _drawn(
    config: nn.DeltaLMConfig, optimizer: optax.GradientTransformation
) -> tuple[Any, Any]:
    """Parameters, not jitted: as one program their random numbers take XLA minutes to compile."""
    params = nnx.state(nn.DeltaLM(config, rngs=nnx.Rngs(0)))
    return params, jax.jit(optimizer.init)(params)


def _kept_bytes(config: nn.DeltaLMConfig, length: int) -> int:
    """What the first block leaves for its backward besides its parameters, its input included, as it is traced."""
    made = nnx.eval_shape(lambda: nn.DeltaLM(config, rngs=nnx.Rngs(0)))
    graph, params = nnx.split(made.blocks[0])
    x = jax.ShapeDtypeStruct((1, length, config.hidden_size), config.dtype)

    def left(params: Any, x: Array) -> Any:
        def block(params: Any, x: Array) -> Array:
            return nnx.merge(graph, params)(x, None, None)[0]

        if config.remat is not False:
            policy = None if config.remat is True else config.remat
            block = jax.checkpoint(block, policy=policy)
        return jax.vjp(block, params, x)[1]

    size = lambda tree: sum(
        leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree)
    )
    return size(jax.eval_shape(left, params, x)) - size(params)


def _run(
    program: Any, config: nn.DeltaLMConfig, optimizer: Any, tokens: Array
) -> Record:
    before = records.peak_bytes() or 0
    tokens = jax.random.randint(jax.random.key(0), tokens.shape, 0, VOCAB)
    times = []
    try:
        state = _drawn(_without_remat(config), optimizer)
        for _ in range(REPEATS + 1):  # the first warms up
            start = time.perf_counter()
            state, loss = program(state, tokens)
            jax.block_until_ready(loss)
            times.append(time.perf_counter() - start)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return {"refused": "out of memory"}
    row: Record = {"step_ms": round(1e3 * min(times[1:]), 3)}
    peak = records.peak_bytes()
    if peak is not None and peak > before:  # else an earlier case was larger
        row["device_peak_mib"] = round(peak / MIB, 1)
    return row


def _without_remat(config: nn.DeltaLMConfig) -> nn.DeltaLMConfig:
    """The same for all rows of a model, whose parameters are then drawn by one program."""
    return nn.DeltaLMConfig(**{**vars(config), "remat": False})


def measure(
    path: pathlib.Path,
    op: Any,
    cases: list[str],
    budget: float,
    commit: str | None,
    say: Say,
    described: bool = False,
) -> Record:
    """Measures what the record at `path` lacks; no case is begun after `budget` seconds."""
    began = time.monotonic()
    head = records.head(commit) | {"vocab": VOCAB, "rows": []}
    if described:
        head |= {"device": "NVIDIA H200 (described)", "platform": "described"}
    record = records.continued(path, head)
    kept = [_key(row) for row in record["rows"]]
    keys = [
        (op, model, int(length), remat)
        for model, length in _split(cases)
        for remat in REMAT
    ]
    todo = [key for key in keys if key not in kept]
    # All side by side, before anything is timed: a program of 24 layers takes XLA minutes.
    with concurrent.futures.ThreadPoolExecutor() as pool:
        compiling = [pool.submit(compiled, *key, described) for key in todo]
        programs = [program.result() for program in compiling]
    say(f"compiled {len(programs)} programs")
    for key, program in zip(todo, programs):
        if time.monotonic() - began > budget:
            say(f"no time left for {key}")
            continue
        row = measured(*key, program, described)
        record["rows"].append(row)
        records.write(path, record)
        say(str(row))
    return record


def _split(cases: list[str]) -> list[list[str]]:
    return [case.split(":") for case in cases]


def _key(row: Record) -> tuple[Any, ...]:
    return row["op"], row["model"], row["time"], row["remat"]


def main() -> None:
    """Prints the rows as they come, then a table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.memory", description=__doc__
    )
    parser.add_argument(
        "--out", type=pathlib.Path, required=True, help="the record, JSON"
    )
    parser.add_argument("--op", choices=OPS, default="kda")
    parser.add_argument(
        "--case", action="append", help=f"MODEL:T; {', '.join(CASES)} by default"
    )
    parser.add_argument("--budget-seconds", type=float, default=470.0)
    parser.add_argument("--commit", help="where there is no git to ask")
    parser.add_argument(
        "--described", action="store_true", help="compile for an H200, run nothing"
    )
    given = parser.parse_args()
    # Nearly all of a GPU's memory, in the place of JAX's three quarters; read when the GPU is first used.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
    began = time.monotonic()
    console = Console(width=160)

    def say(text: str) -> None:
        console.print(f"{time.monotonic() - began:5.0f} s  {text}", highlight=False)

    cases = given.case or list(CASES)
    call = (
        given.out,
        given.op,
        cases,
        given.budget_seconds,
        given.commit,
        say,
        given.described,
    )
    record = measure(*call)
    table = Table(
        "op", "model", "T", "remat", "peak, GiB", "kept a block, MiB", "step, ms"
    )
    for row in record["rows"]:
        time_ = row.get("step_ms", row.get("refused"))
        sizes = (f"{row['peak_mib'] / 1024:.2f}", str(row["kept_mib"]), str(time_))
        table.add_row(*map(str, _key(row)), *sizes)
    console.print(table)


if __name__ == "__main__":
    main()
