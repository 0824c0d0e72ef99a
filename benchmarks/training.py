"""Trains KDA and GDN models on text: with the kernels, with another seed, and in float32 by "xla".

    python -m benchmarks.training --out FILE.json [--op kda] [--steps 3000] [--budget-seconds 520]

All runs of an op see the same rows in the same order and begin, but for the other seed, with the same parameters. The
file is written every few seconds. Runs that it already holds whole are kept, so that several calls can share the work;
the runs in float32 share what is left of the budget, and their losses are compared over the steps that they reach.

The kernels compute in bfloat16 with parameters in float32. In the float32 runs the op is float32 throughout; other
matrix products are float32 at JAX's default precision, which on a GPU is TF32.
"""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import pathlib
import sysconfig
import time
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax
from jaxtyping import Array, Int32, UInt8
from rich.console import Console

from benchmarks import ceilings, records
from benchmarks.cost import cost
from benchmarks.records import Record
from benchmarks.shapes import OPS, Op, Shape
from benchmarks.step_parts import parts
from jfla import nn
from jfla.cli import data
from jfla.cli.train import adamw, metrics

DATA_SEED = 0
WRITE_SECONDS = 10.0
TEXT_BYTES = 64_000_000  # of installed packages
Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Model:
    """Sizes of a model and of its training."""

    num_layers: int = 12
    hidden_size: int = 768
    num_heads: int = 6
    head_dim: int = 128
    rows: int = 8
    time: int = 1024
    steps: int = 3000
    learning_rate: float = 6e-4
    # steps of one call of the compiled program, whose losses are averaged
    every: int = 10

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.rows * self.time

    def config(self, op: Op, variant: "Variant") -> nn.DeltaLMConfig:
        """The language model of bytes."""
        return nn.DeltaLMConfig(
            vocab_size=data.VOCAB,
            hidden_size=self.hidden_size,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            head_dim=self.head_dim,
            op=op,
            dtype=variant.dtype,
            implementation=variant.implementation,
        )

    def optimizer(self) -> optax.GradientTransformation:
        """AdamW with warm-up and cosine."""
        return adamw(self.learning_rate, self.steps, max(1, min(200, self.steps // 10)))


MODELS = {
    "100m": Model(),
    "tiny": Model(
        num_layers=2, hidden_size=32, num_heads=2, head_dim=16, rows=2, time=64, steps=20,
        learning_rate=4e-3, every=5,
    ),
}  # fmt: skip


class Variant(NamedTuple):
    """How a model is trained; the name is that of the curve."""

    name: str
    dtype: str
    implementation: Literal["pallas", "xla"]
    seed: int


def variants() -> list[Variant]:
    """The kernels twice, in the second place by another seed, then float32. Without a GPU "xla" stands for them."""
    ours: Literal["pallas", "xla"] = (
        "pallas" if jax.default_backend() == "gpu" else "xla"
    )
    return [
        Variant("kernels", "bfloat16", ours, 0),
        Variant("seed", "bfloat16", ours, 1),
        Variant("float32", "float32", "xla", 0),
    ]


def corpus(limit: int = TEXT_BYTES) -> UInt8[np.ndarray, " n"]:
    """The standard library's source, then that of installed packages, by name, until they have `limit` bytes."""
    texts = [data.load_corpus().train]
    wanted = limit
    for package in sorted(pathlib.Path(sysconfig.get_path("purelib")).glob("*/")):
        if wanted <= 0:
            break
        with contextlib.suppress(FileNotFoundError):  # a small one
            texts.append(data.load_corpus(package).train)
            wanted -= len(texts[-1])
    return np.concatenate(texts)


def rows_of(
    text: UInt8[np.ndarray, " n"], model: Model, step: int
) -> Int32[np.ndarray, "B T"]:
    """Rows of T + 1 bytes. They depend on the step alone."""
    rng = np.random.default_rng((DATA_SEED, step))
    return np.asarray(data.text_rows(rng, text, model.rows, model.time).tokens)


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def advance(
    graph: Any, optimizer: optax.GradientTransformation, state: Any, tokens: Array
) -> Any:
    """As many steps as `tokens` [steps, B, T + 1] has; the state, and the bits per byte of each."""

    def step(state: tuple[Any, Any], tokens: Array) -> tuple[tuple[Any, Any], Array]:
        params, opt_state = state

        def loss(params: Any) -> Array:
            scored = jnp.ones((tokens.shape[0], tokens.shape[1] - 1), bool)
            return metrics(nnx.merge(graph, params), data.Batch(tokens, scored)).bits  # type: ignore[arg-type]

        bits, grads = jax.value_and_grad(loss)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), bits

    return lax.scan(step, state, tokens)


def graph_of(model: Model, op: Op, variant: Variant) -> Any:
    """A model without its parameters."""
    made = nnx.eval_shape(
        lambda: nn.DeltaLM(model.config(op, variant), rngs=nnx.Rngs(0))
    )
    return nnx.graphdef(made)


def begun(model: Model, op: Op, key: Array) -> tuple[Any, Any]:
    """Parameters of a model, float32 in every variant, and the optimizer's state.

    Not jitted: as one program the random numbers of 12 layers take XLA two minutes to compile.
    """
    made = nn.DeltaLM(model.config(op, variants()[-1]), rngs=nnx.Rngs(key))
    params = nnx.state(made, nnx.Param)
    return params, jax.jit(model.optimizer().init)(params)


def flops_per_token(model: Model, op: Op, params: Any) -> float:
    """Of a step, nothing twice: 6 per entry of a matrix that a token meets, 3 times the op's forward."""
    matrices = sum(
        leaf.size
        for path, leaf in nnx.to_flat_state(params)
        if path[-1] == "kernel" and "conv" not in str(path[-2])
    )
    shape = Shape(model.rows, model.time, model.num_heads, model.head_dim)
    of_op = 3 * cost(op, "forward", shape).flops / model.tokens
    return 6.0 * matrices + model.num_layers * of_op


class Trainer:
    """Does the runs and keeps their record on disk."""

    def __init__(
        self, path: pathlib.Path, record: Record, model: Model, text: Any, say: Say
    ):
        self._path = path
        self._record = record
        self._model = model
        self._text = text
        self._say = say
        self._compiled: dict[
            tuple[Op, str], concurrent.futures.Future[tuple[Any, float]]
        ] = {}

    def has(self, op: Op, variant: Variant) -> bool:
        """Whether the record holds this run whole."""
        return (
            self._kept_steps({"op": op, "variant": variant.name}) == self._model.steps
        )

    def run(self, op: Op, variant: Variant, until: float) -> None:
        """Trains until the steps are done or the clock shows `until`, and measures the parts of a step."""
        model = self._model
        if time.monotonic() >= until:
            self._say(f"{op} {variant.name}: no time left")
            return
        graph = graph_of(model, op, variant)
        state = begun(model, op, jax.random.key(variant.seed))
        program, seconds = self._compiled[op, variant.dtype].result()
        run: Record = {
            "op": op,
            "variant": variant.name,
            "implementation": variant.implementation,
        }
        run |= {"dtype": variant.dtype, "seed": variant.seed, "steps": 0, "bits": []}
        run["compile_seconds"] = round(seconds, 1)
        run["parameters"] = sum(x.size for x in jax.tree.leaves(state[0]))
        run["flops_per_token"] = flops_per_token(model, op, state[0])
        state = self._steps(run, program, state, until)
        if variant.name == "kernels" and run["steps"] > model.every:
            self._parts(op, variant, nnx.merge(graph, state[0]), state[1], run)

    def compile(self, todo: list[tuple[Op, Variant]]) -> None:
        """Compiles every program of some runs, side by side, and waits for them: nothing else is then timed."""
        kinds: dict[tuple[Op, str], tuple[Op, Variant]]
        kinds = {(op, variant.dtype): (op, variant) for op, variant in todo}
        with concurrent.futures.ThreadPoolExecutor() as pool:
            self._compiled = {
                key: pool.submit(self._program, *kinds[key]) for key in kinds
            }

    def _program(self, op: Op, variant: Variant) -> tuple[Any, float]:
        """The compiled steps, and the seconds it took, others beside it."""
        start = time.monotonic()
        graph = graph_of(self._model, op, variant)
        state = jax.eval_shape(
            functools.partial(begun, self._model, op), jax.random.key(0)
        )
        lowered = advance.lower(graph, self._model.optimizer(), state, self._rows(0))
        return lowered.compile(), time.monotonic() - start

    def _rows(self, step: int) -> Int32[np.ndarray, "steps B T"]:
        model = self._model
        steps = range(step, step + model.every)
        return np.stack([rows_of(self._text, model, i) for i in steps])

    def _steps(self, run: Record, program: Any, state: Any, until: float) -> Any:
        """Does the steps; the first call, which warms up, is not timed."""
        model = self._model
        spent = 0.0
        written = time.monotonic()
        while run["steps"] < model.steps and time.monotonic() < until:
            tokens = self._rows(run["steps"])
            start = time.monotonic()
            state, bits = program(state, tokens)
            bits = np.asarray(bits)
            if run["steps"]:
                spent += time.monotonic() - start
            run["steps"] += model.every
            run["bits"].append(round(float(bits.mean()), 5))
            timed = run["steps"] - model.every
            if timed:
                run["step_ms"] = round(1e3 * spent / timed, 4)
                run["tokens_per_s"] = round(model.tokens * timed / spent)
            done = run["steps"] >= model.steps or time.monotonic() >= until
            if done or time.monotonic() - written > WRITE_SECONDS:
                written = time.monotonic()
                self._report(run)
        return state

    def _report(self, run: Record) -> None:
        """Keeps the run, unless an earlier one of the same kind went further, and says how far it is."""
        rate = run.get("tokens_per_s", 0)
        record = self._record
        tflop_per_s = rate * run["flops_per_token"] * 1e-12
        if run["dtype"] == "bfloat16":
            run["of_matmul"] = round(tflop_per_s / record["matmul_tflop_per_s"], 4)
            if record["peak_tflop_per_s"]:
                run["of_peak"] = round(tflop_per_s / record["peak_tflop_per_s"], 4)
        if not self._kept_steps(run) > run["steps"]:
            self._replace("runs", run, ("op", "variant"))
            records.write(self._path, record)
        line = f"{run['op']} {run['variant']}: step {run['steps']}, {run['bits'][-1]:.4f} bits"
        self._say(f"{line}, {rate:,} tokens/s, {tflop_per_s:.0f} TFLOP/s")

    def _kept_steps(self, run: Record) -> int:
        """Of the run of this kind that the record holds, 0 without one."""
        kind = (run["op"], run["variant"])
        runs = self._record["runs"]
        return max(
            (old["steps"] for old in runs if (old["op"], old["variant"]) == kind),
            default=0,
        )

    def _parts(
        self, op: Op, variant: Variant, model: nn.DeltaLM, opt_state: Any, run: Record
    ) -> None:
        tokens = jnp.asarray(rows_of(self._text, self._model, 0)[:, :-1])
        found = parts(model, tokens, self._model.optimizer(), opt_state, run["step_ms"])
        row = {"op": op, "implementation": variant.implementation, **found}
        self._replace("parts", row, ("op",))
        records.write(self._path, self._record)
        self._say(f"{op} parts of a step: {found}")

    def _replace(self, name: str, row: Record, keys: tuple[str, ...]) -> None:
        """Adds a row in the place of an older one of the same keys."""
        rows = self._record[name]
        rows[:] = [old for old in rows if any(old[key] != row[key] for key in keys)] + [
            row
        ]


def train(
    path: pathlib.Path,
    model: Model,
    ops: tuple[Op, ...],
    budget: float,
    commit: str | None,
    say: Say,
) -> Record:
    """Does all runs that the record at `path` lacks, as far as `budget` seconds go."""
    deadline = time.monotonic() + budget
    text = corpus()
    device = records.head(commit)
    matmul = ceilings.measured(repeats=5).matmul_tflop_per_s
    new = device | {
        "model": dataclasses.asdict(model),
        "text": {
            "bytes": len(text),
            "sha256": hashlib.sha256(text.tobytes()).hexdigest()[:16],
        },
        "peak_tflop_per_s": records.data_sheet_peak(device["device"]),
        "runs": [],
        "parts": [],
    }
    record = records.continued(path, new)
    before = record.get("matmul_tflop_per_s", 0.0)
    record["matmul_tflop_per_s"] = float(f"{max(matmul, before):.4g}")
    trainer = Trainer(path, record, model, text, say)
    *quick, slow = variants()
    order = itertools.product((*quick, slow), ops)
    todo: list[tuple[Op, Variant]]
    todo = [(op, variant) for variant, op in order if not trainer.has(op, variant)]
    if todo and time.monotonic() < deadline:
        trainer.compile(todo)
        say(f"compiled what {len(todo)} runs need")
    left = sum(variant == slow for _, variant in todo)
    for op, variant in todo:
        until = deadline
        if variant == slow:
            now = time.monotonic()
            until = now + (deadline - now) / left
            left -= 1
        trainer.run(op, variant, until)
    records.write(path, record)
    return record


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.training", description=__doc__
    )
    parser.add_argument(
        "--out", type=pathlib.Path, required=True, help="the record, JSON"
    )
    parser.add_argument("--model", choices=MODELS, default="100m")
    parser.add_argument("--op", choices=OPS, action="append", help="both by default")
    parser.add_argument("--steps", type=int, help="of each run")
    parser.add_argument("--budget-seconds", type=float, default=520.0)
    parser.add_argument("--commit", help="where there is no git to ask")
    given = parser.parse_args()
    model = MODELS[given.model]
    if given.steps is not None:
        model = dataclasses.replace(model, steps=given.steps)
    if model.steps < 1 or model.steps % model.every:
        parser.error(f"--steps must be a multiple of {model.every}, got {model.steps}")
    began = time.monotonic()
    console = Console(width=160)

    def say(text: str) -> None:
        console.print(f"{time.monotonic() - began:5.0f} s  {text}", highlight=False)

    say(jax.devices()[0].device_kind)
    ops = tuple(given.op or OPS)
    train(given.out, model, ops, given.budget_seconds, given.commit, say)


if __name__ == "__main__":
    main()
