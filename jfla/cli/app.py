"""The commands and their options. Each imports what does its work when it runs: help comes fast."""

import contextlib
import enum
import pathlib
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from rich.console import Console

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_show_locals=False
)


# What a folder can be the reason of; nothing else is said without its traceback.
_OF_A_FOLDER = (ValueError, FileNotFoundError, ImportError)
_GOES_ON = "The same command goes on from the last checkpoint."


class Op(enum.StrEnum):
    """The two ops."""

    kda = "kda"
    gdn = "gdn"


class Implementation(enum.StrEnum):
    """The implementations that can be asked for by name."""

    pallas = "pallas"
    xla = "xla"


class DType(enum.StrEnum):
    """The dtypes of a computation."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Readme(enum.StrEnum):
    """What `jfla bench` does with the README's block and docs/benchmarks.md."""

    write = "write"
    check = "check"


@app.callback()
def jfla() -> None:
    """Kimi Delta Attention and Gated DeltaNet for JAX."""


@app.command()
def info() -> None:
    """Show versions, devices, and which implementation each op takes here and why."""
    from jfla.cli.info import show

    show(Console())


@app.command()
def demo(
    op: Annotated[
        Op, typer.Option(help="Kimi Delta Attention or Gated DeltaNet.")
    ] = Op.kda,
    steps: Annotated[
        int, typer.Option(min=1, help="Training steps of each of the two models.")
    ] = 150,
    out: Annotated[
        pathlib.Path,
        typer.Option(file_okay=False, help="Folder of checkpoints, curve and results."),
    ] = pathlib.Path("jfla-demo"),
    implementation: Annotated[
        Implementation | None,
        typer.Option(help="Implementation of the op; chosen by itself when left out."),
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, help="Seed of parameters, data and sampling.")
    ] = 0,
    mesh: Annotated[
        str | None,
        typer.Option(
            help="Split rows, time and heads over all devices: data=2,sequence=2,model=1."
        ),
    ] = None,
    coordinator: Annotated[
        str | None,
        typer.Option(
            help="Several processes: HOST:PORT of the first, or auto for what the cluster says."
        ),
    ] = None,
    num_processes: Annotated[
        int | None, typer.Option(min=1, help="With HOST:PORT: how many there are.")
    ] = None,
    process_id: Annotated[
        int | None,
        typer.Option(min=0, help="With HOST:PORT: which this one is, from 0."),
    ] = None,
) -> None:
    """Train two small models here: one on Python's own source, one on associative recall.

    Both are saved as they go. The same command goes on where an interrupted one stopped; a larger
    --steps goes on from a finished one. Of several processes, each is started with the same options
    but its --process-id, and the first one writes and prints.
    """
    from jfla.cli import processes
    from jfla.cli.demo import run
    from jfla.cli.mesh import parse

    wanted = implementation.value if implementation else None
    with _said(stopped=_GOES_ON):
        shape = parse(mesh) if mesh is not None else None
        processes.start(coordinator, num_processes, process_id)
        console = Console(quiet=not processes.is_first())
        run(op.value, steps, out, wanted, seed, console, mesh_shape=shape)


@app.command()
def generate(
    model: Annotated[
        pathlib.Path,
        typer.Option(help="Folder of a published model: config.json, .safetensors."),
    ],
    prompt: Annotated[
        str,
        typer.Option(
            help='Text; or token ids, "12 7 301", where there is no tokenizer.'
        ),
    ],
    max_tokens: Annotated[
        int, typer.Option(min=1, help="End after so many tokens.")
    ] = 256,
    temperature: Annotated[
        float | None,
        typer.Option(min=0, help="0: always the likeliest; the authors' or 1."),
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(min=1, help="Of the k likeliest; the authors' or all.")
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            help="Of the likeliest with p of the probability; the authors' or all."
        ),
    ] = None,
    dtype: Annotated[
        DType | None,
        typer.Option(help="As published, float32 on a CPU, when left out."),
    ] = None,
    implementation: Annotated[
        Implementation | None,
        typer.Option(help="Implementation of the op; chosen by itself when left out."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of sampling.")] = 0,
) -> None:
    """Let a published model go on with a prompt: text as it comes, then its speed.

    The text goes to standard output; what was chosen, and why, to standard error.
    """
    from jfla.cli.generate import Options, run

    options = Options(
        model=model,
        prompt=prompt,
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        dtype=dtype.value if dtype else None,
        implementation=implementation.value if implementation else None,
        seed=seed,
    )
    with _said(*_OF_A_FOLDER):
        run(options, Console(soft_wrap=True), Console(stderr=True))


@app.command()
def finetune(
    model: Annotated[
        pathlib.Path,
        typer.Option(help="Folder of a published model: config.json, .safetensors."),
    ],
    data: Annotated[
        pathlib.Path,
        typer.Option(
            exists=True,
            dir_okay=False,
            help='JSON lines: {"text": ...}, {"tokens": [...]} or {"prompt": ..., "completion": ...}.',
        ),
    ],
    out: Annotated[
        pathlib.Path,
        typer.Option(
            file_okay=False, help="Folder of checkpoints, curve and the model."
        ),
    ] = pathlib.Path("jfla-finetune"),
    full: Annotated[
        bool, typer.Option("--full", help="Train all parameters, not LoRA's.")
    ] = False,
    rank: Annotated[int, typer.Option(min=1, help="Of LoRA's updates.")] = 16,
    steps: Annotated[
        int | None,
        typer.Option(min=1, help="Training steps; three passes when left out."),
    ] = None,
    rows: Annotated[
        int | None, typer.Option(min=1, help="Rows of packed documents a step.")
    ] = None,
    time: Annotated[int | None, typer.Option(min=1, help="Tokens of a row.")] = None,
    learning_rate: Annotated[
        float | None, typer.Option(min=0, help="Largest; 2e-4, or 1e-5 with --full.")
    ] = None,
    dtype: Annotated[
        DType | None,
        typer.Option(help="As published, float32 on a CPU, when left out."),
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, help="Seed of LoRA and the order of rows.")
    ] = 0,
) -> None:
    """Go on training a published model on documents, and save it in the format it came in.

    It is saved as it goes. The same command goes on where an interrupted one stopped; a larger
    --steps goes on from a finished one.
    """
    from jfla.cli.finetune import Options, run

    options = Options(
        model=model,
        data=data,
        out=out,
        full=full,
        rank=rank,
        steps=steps,
        rows=rows,
        time=time,
        learning_rate=learning_rate,
        dtype=dtype.value if dtype else None,
        seed=seed,
    )
    with _said(*_OF_A_FOLDER, stopped=_GOES_ON):
        run(options, Console())


@app.command()
def serve_demo(
    op: Annotated[
        Op, typer.Option(help="Kimi Delta Attention or Gated DeltaNet.")
    ] = Op.kda,
    requests: Annotated[
        int, typer.Option(min=1, help="Random requests, of any length.")
    ] = 32,
    slots: Annotated[int, typer.Option(min=1, help="Requests that run at a time.")] = 8,
    out: Annotated[
        pathlib.Path, typer.Option(file_okay=False, help="Folder of the picture.")
    ] = pathlib.Path("jfla-demo"),
    seed: Annotated[
        int, typer.Option(min=0, help="Seed of parameters and requests.")
    ] = 0,
) -> None:
    """Serve random requests from a pool of states: throughput and latency, one at a time and many."""
    from jfla.cli.serve import Workload, run

    run(op.value, out, Console(), Workload(requests=requests, slots=slots, seed=seed))


@app.command()
def bench(
    sets: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="paper and decode on a GPU, else quick; or fla, ..."
        ),
    ] = None,
    shapes: Annotated[
        list[str] | None,
        typer.Option("--shape", help="Of the sets, by name: B1 T8192 H32 D128; all."),
    ] = None,
    ops: Annotated[
        list[str] | None, typer.Option("--op", help="kda, gdn; both when left out.")
    ] = None,
    passes: Annotated[
        list[str] | None,
        typer.Option("--pass", help="forward, backward, decode, ...; all."),
    ] = None,
    gates: Annotated[
        list[str] | None,
        typer.Option(
            "--gate",
            help="production, published, model (raw gates, as layers call), ...; production.",
        ),
    ] = None,
    implementations: Annotated[
        list[str] | None,
        typer.Option(
            "--implementation",
            help="pallas, xla, fla, ...; all that can run and are fast here.",
        ),
    ] = None,
    json: Annotated[
        pathlib.Path | None,
        typer.Option(help="Rows are added to this file as they come."),
    ] = None,
    repeats: Annotated[
        int,
        typer.Option(min=0, help="Samples of each time; 0: 7 on a GPU, 3 elsewhere."),
    ] = 0,
    plot: Annotated[
        pathlib.Path | None, typer.Option(help="Draw the times: .svg or .png.")
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=0, help="Begin no case after that time.")
    ] = float("inf"),
    readme: Annotated[
        Readme | None,
        typer.Option(help="Measure nothing; write or check the generated pages."),
    ] = None,
) -> None:
    """Measure the ops and their peers on this machine: time, error, memory. Options can be given several times."""
    command = _benchmarks()
    console = Console()
    try:
        if readme is not None:
            command.readme(readme.value, console)
            return
        plan = command.Plan(
            sets=tuple(sets or ()),
            ops=tuple(ops or ()),
            passes=tuple(passes or ()),
            gates=tuple(gates or ()),
            implementations=tuple(implementations or ()),
            json=json,
            repeats=repeats,
            seconds=seconds,
            shapes=tuple(shapes or ()),
        )
        command.measure(plan, plot, console)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


@app.command()
def bench_merge(
    files: Annotated[
        list[pathlib.Path],
        typer.Argument(exists=True, help="What runs of jfla bench --json wrote."),
    ],
    out: Annotated[pathlib.Path, typer.Option(help="The file to write.")],
) -> None:
    """Put the results of several runs of one device, date and commit into one file, without losing rows."""
    command = _benchmarks()
    try:
        command.merge(files, out)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


@contextlib.contextmanager
def _said(*errors: type[Exception], stopped: str = "") -> Iterator[None]:
    """Says `errors` in a line, with the option where one is to blame, and what an interrupt left."""
    from jfla.cli.refused import Refused

    try:
        yield
    except Refused as refused:
        option = f"--{refused.option}"
        raise typer.BadParameter(str(refused), param_hint=option) from None
    except errors as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        typer.echo(f"Stopped. {stopped}".strip(), err=True)
        raise typer.Exit(130) from None


def _benchmarks() -> Any:
    """What measures; or says in a sentence how to get it, and ends."""
    from jfla.cli.bench import Absent, command

    try:
        return command()
    except Absent as absent:
        typer.echo(str(absent), err=True)
        raise typer.Exit(1) from None
