"""Peer: Flash Linear Attention's Triton ops in PyTorch, without the libraries it dispatches to.

Its TileLang kernels are off for KDA. For GDN they stay where it takes them by default: on Hopper
its Triton kernel of the backward refuses Triton 3.4 to 3.7. `safe_gate` (KDA) allows its faster
form for decays of at least -5 per token; below them its results are not finite.
"""

import os
from collections.abc import Callable
from typing import Any

# Both are read when it is imported.
os.environ["FLA_FLASH_QLA"] = "0"
os.environ["FLA_FLASH_KDA"] = "0"

import torch  # type: ignore[import-not-found]
from fla.ops.gated_delta_rule import (  # type: ignore[import-not-found]
    chunk_gated_delta_rule,
    fused_recurrent_gated_delta_rule,
)
from fla.ops.kda import chunk_kda, fused_recurrent_kda  # type: ignore[import-not-found]

from benchmarks.inputs import MAIN
from benchmarks.programs import Program, Refused, Results, TorchProgram
from benchmarks.shapes import Case

BOUNDED = ("production", "strong", "weak", "mixed")  # gates of at least -5 per token


def build(case: Case) -> Program:
    """The program of a case."""
    if case.timed == "scan+output":
        raise Refused("its stages are timed as fla_kernels")
    os.environ.pop("FLA_TILELANG", None)  # read at every call
    decode = case.timed == "decode"
    if case.op == "gdn":
        op = fused_recurrent_gated_delta_rule if decode else chunk_gated_delta_rule
        return torch_program(op, case)
    os.environ["FLA_TILELANG"] = "0"
    if decode:
        return torch_program(fused_recurrent_kda, case)
    return torch_program(chunk_kda, case, {"safe_gate": case.gate in BOUNDED})


def torch_program(
    op: Callable[..., Any], case: Case, options: dict[str, Any] | None = None
) -> TorchProgram:
    """A case by an op with the interface of Flash Linear Attention's."""

    def call(x: dict[str, Any], main: list[Any]) -> tuple[Any, Any]:
        named = dict(zip(MAIN, main))
        rest = {name: x[name] for name in ("initial_state", "cu_seqlens") if name in x}
        return op(
            **named,
            **rest,
            output_final_state=case.shape.packing is None,
            **(options or {}),
        )

    def forward(x: dict[str, Any]) -> Results:
        with torch.no_grad():
            output, final = call(x, [x[name] for name in MAIN])
        return {"output": output} | ({} if final is None else {"final_state": final})

    def both(x: dict[str, Any]) -> Results:
        main = [x[name].detach().requires_grad_() for name in MAIN]
        output = call(x, main)[0]
        gradients = torch.autograd.grad(output, main, x["do"])
        named = {f"d{name}": gradient for name, gradient in zip(MAIN, gradients)}
        return {"output": output.detach()} | named

    return TorchProgram(
        both if case.timed == "forward+backward" else forward, _long_lengths
    )


def _long_lengths(x: dict[str, Any]) -> dict[str, Any]:
    return x | {"cu_seqlens": x["cu_seqlens"].long()} if "cu_seqlens" in x else x
