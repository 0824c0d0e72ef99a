"""The implementations by name: the three of this library, and the peers; why one cannot run."""

import functools
import importlib
import importlib.metadata
import importlib.util
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import jfla
from benchmarks.inputs import MAIN, Arrays, call_options, differentiated
from benchmarks.programs import DecodeProgram, JaxProgram, Program, Refused, Results
from benchmarks.shapes import Case


class Provider(NamedTuple):
    """How an implementation is made.

    `packages` must be importable; `build` makes the program of a case or raises `Refused`.
    `tunes`: its first call may time kernels, and wants the device for itself.
    `on_disk`: what it compiles takes long, serves all lengths, and stays on disk for other processes.
    """

    build: Callable[[Case], Program]
    packages: tuple[str, ...] = ()
    ours: bool = False
    tunes: bool = True
    on_disk: bool = False

    @property
    def compiles_beside(self) -> bool:
        """Whether another process may make its first calls while this one measures."""
        return self.on_disk and not self.tunes


def jax_program(op: Callable[..., jfla.DeltaRuleOutput], case: Case) -> JaxProgram:
    """The case with `op`.

    It takes the five arrays and, by name, `initial_state`, `segment_ids`, `return_final_state`, and of a model's call
    `gate` and `qk_norm`.
    """

    def call(arrays: Arrays, state: bool) -> jfla.DeltaRuleOutput:
        main = [arrays[name] for name in MAIN]
        rest = {
            name: arrays[name]
            for name in ("initial_state", "segment_ids")
            if name in arrays
        }
        return op(*main, **rest, **call_options(arrays), return_final_state=state)

    def forward(arrays: Arrays) -> Results:
        out = call(arrays, state=case.shape.packing is None)
        return {name: x for name, x in out._asdict().items() if x is not None}

    def both(arrays: Arrays) -> Results:
        output, adjoint = jax.vjp(
            lambda x: call(arrays | x, state=False).output, differentiated(arrays)
        )
        (gradients,) = adjoint(arrays["do"])
        return {"output": output} | _named_gradients(gradients)

    if case.timed == "decode":
        return DecodeProgram(forward)
    return JaxProgram(both if case.timed == "forward+backward" else forward)


def _named_gradients(gradients: Arrays) -> Results:
    return {f"d{name}": x for name, x in gradients.items()}


def _op(implementation: str, case: Case) -> Program:
    """Packed sequences with their number, which the peers are told with `cu_seqlens`, too."""
    form = "recurrent" if case.timed == "decode" else "chunk"
    op = getattr(jfla, f"{form}_{case.op}")
    known = {} if case.shape.packing is None else {"num_segments": case.shape.segments}

    def call(*main: Any, **rest: Any) -> jfla.DeltaRuleOutput:
        return op(*main, **rest, **known, implementation=implementation)

    return jax_program(call, case)


def _pallas(case: Case) -> Program:
    if case.timed == "scan+output":
        return importlib.import_module("benchmarks.stages").ours(case)
    return _op("pallas", case)


def _mma(case: Case) -> Program:
    """The mma.sync kernels, on a Hopper GPU too."""
    _no_stages(case)
    form = "recurrent" if case.timed == "decode" else "chunk"
    op = getattr(jfla, f"{form}_{case.op}")

    def call(*main: Any, **rest: Any) -> jfla.DeltaRuleOutput:
        with jfla.pallas.mma_kernels():
            return op(*main, **rest, implementation="pallas")

    return jax_program(call, case)


def _pallas_chain(case: Case) -> Program:
    """Packed sequences whose number is not told: those of a row are walked one after the other."""
    _packed(case)
    _no_stages(case)
    op = getattr(jfla, f"chunk_{case.op}")
    return jax_program(functools.partial(op, implementation="pallas"), case)


def _pallas_states(case: Case) -> Program:
    """Packed sequences with a state of their own going in and coming out, and gradients of both.

    The states that go in are 0, so that the results are those of the other implementations.
    """
    shape = case.shape
    _packed(case)
    _no_stages(case)
    op = getattr(jfla, f"chunk_{case.op}")
    states = (shape.batch, shape.segments, shape.value_heads, shape.dim, shape.dim)

    def call(arrays: Arrays) -> jfla.DeltaRuleOutput:
        main = [arrays[name] for name in MAIN]
        rest = {name: arrays[name] for name in ("segment_ids", "initial_state")}
        return op(
            *main,
            **rest,
            **call_options(arrays),
            return_final_state=True,
            implementation="pallas",
        )

    def forward(arrays: Arrays) -> Results:
        out = call(arrays | {"initial_state": jnp.zeros(states)})
        return {"output": out.output, "final_state": out.final_state}

    def both(arrays: Arrays) -> Results:
        inputs = {"initial_state": jnp.zeros(states)} | differentiated(arrays)
        out, adjoint = jax.vjp(lambda x: call(arrays | x), inputs)
        (gradients,) = adjoint(
            out._replace(output=arrays["do"], final_state=jnp.zeros(states))
        )
        return {"output": out.output} | _named_gradients(gradients)

    return JaxProgram(both if case.timed == "forward+backward" else forward)


def _scan(case: Case) -> Program:
    if case.timed == "decode":
        raise Refused('one token of the scan is "xla"')
    _no_stages(case)
    return jax_program(getattr(jfla.reference, f"recurrent_{case.op}"), case)


def _xla(case: Case) -> Program:
    _no_stages(case)
    return _op("xla", case)


def _no_stages(case: Case) -> None:
    if case.timed == "scan+output":
        raise Refused("its stages are not kernels")


def _packed(case: Case) -> None:
    if case.shape.packing is None:
        raise Refused("the sequences are not packed")


def _peer(module: str, *, has_gates: bool = False) -> Callable[[Case], Program]:
    """Of a module with `build`; `has_gates` where it takes a model's call."""

    def build(case: Case) -> Program:
        if case.is_models_call and not has_gates:
            raise Refused("it is timed on decays and unit keys")
        cache = os.environ.get("TRITON_CACHE_DIR")
        try:
            found = importlib.import_module(f"benchmarks.{module}")
        except ImportError as missing:
            raise Refused(f"cannot be imported: {missing}") from missing
        finally:
            # jax-triton empties it; the peers after it would find no folder for their kernels.
            os.environ.pop("TRITON_CACHE_DIR", None)
            os.environ |= {} if cache is None else {"TRITON_CACHE_DIR": cache}
        return found.build(case)

    return build


PROVIDERS: dict[str, Provider] = {
    "pallas": Provider(_pallas, ours=True, tunes=False),
    "pallas_chain": Provider(_pallas_chain, ours=True, tunes=False),
    "pallas_states": Provider(_pallas_states, ours=True, tunes=False),
    "xla": Provider(_xla, ours=True),
    "scan": Provider(_scan, ours=True),
    "mma": Provider(_mma, ours=True, tunes=False),
    "fla": Provider(
        _peer("peer_fla", has_gates=True), ("torch", "triton", "fla"), on_disk=True
    ),
    "fla_kernels": Provider(
        _peer("peer_fla_kernels"), ("torch", "triton", "fla", "jax_triton")
    ),
    "flash_qla": Provider(
        _peer("peer_flash_qla"),
        ("torch", "tilelang", "flash_qla"),
        tunes=False,
        on_disk=True,
    ),
    "flashinfer": Provider(_peer("peer_flashinfer"), ("torch", "flashinfer")),
    "cudnn": Provider(_peer("peer_cudnn"), ("torch", "cudnn")),
    "tokamax": Provider(_peer("peer_tokamax"), ("tokamax",)),
    # All its products are in kernels of its own, so XLA has none to time.
    "jla": Provider(_peer("peer_jla"), ("jla",), tunes=False),
}
DISTRIBUTIONS = {
    "jfla": "jfla",
    "jax": "jax",
    "jaxlib": "jaxlib",
    "torch": "torch",
    "triton": "triton",
    "fla": "fla-core",
    "flash_qla": "flash-qla",
    "tilelang": "tilelang",
    "flashinfer": "flashinfer-python",
    "cudnn": "nvidia-cudnn-frontend",
    "tokamax": "tokamax",
    "jla": "jax-linear-attention",
    "jax_triton": "jax-triton",
}


def unavailable(name: str) -> str | None:
    """Why an implementation cannot run here at all, or None.

    >>> print(unavailable("xla"))
    None
    """
    provider = PROVIDERS[name]
    missing = [package for package in provider.packages if not _importable(package)]
    if missing:
        names = [DISTRIBUTIONS.get(package, package) for package in missing]
        return f"no package {', '.join(names)}"
    if not provider.ours and jax.default_backend() != "gpu":
        return "needs an NVIDIA GPU"
    return None


def settings() -> dict[str, str]:
    """What the environment says that can matter to a result."""
    names = ("FLA_CACHE_MODE", "XLA_FLAGS")
    return {name: os.environ[name] for name in names if name in os.environ}


def versions() -> dict[str, str]:
    """Versions of what can matter to a result; those that are absent are left out."""
    found = {}
    for distribution in DISTRIBUTIONS.values():
        try:
            found[distribution] = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _importable(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except (ModuleNotFoundError, ValueError):
        return False
