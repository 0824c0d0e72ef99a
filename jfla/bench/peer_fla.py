"""Peer: Flash Linear Attention's Triton ops in PyTorch, without the libraries that it would hand calls on to.

Its TileLang kernels are off for KDA. For GDN they stay where it takes them by default: on Hopper its Triton kernel of
the backward refuses Triton 3.4 to 3.7. `safe_gate` (KDA) allows its faster form for decays of at least -5 per token,
which all gates of the bench have.
"""

import os
from collections.abc import Callable
from typing import Any

os.environ["FLA_FLASH_QLA"] = os.environ["FLA_FLASH_KDA"] = "0"  # read when it is imported

import torch  # type: ignore[import-not-found]
from fla.ops.gated_delta_rule import (  # type: ignore[import-not-found]
    chunk_gated_delta_rule,
    fused_recurrent_gated_delta_rule,
)
from fla.ops.kda import chunk_kda, fused_recurrent_kda  # type: ignore[import-not-found]

from jfla.bench.inputs import MAIN
from jfla.bench.programs import Program, Refused, Results, TorchProgram
from jfla.bench.shapes import Case


def build(case: Case) -> Program:
    """The program of a case."""
    if case.timed == "scan+output":
        raise Refused("its stages are timed as fla_kernels")
    os.environ.pop("FLA_TILELANG", None)  # read at every call
    if case.op == "kda":
        os.environ["FLA_TILELANG"] = "0"
        op = fused_recurrent_kda if case.timed == "decode" else chunk_kda
        return torch_program(op, case, {} if case.timed == "decode" else {"safe_gate": True})
    return torch_program(fused_recurrent_gated_delta_rule if case.timed == "decode" else chunk_gated_delta_rule, case)


def torch_program(op: Callable[..., Any], case: Case, options: dict[str, Any] | None = None) -> TorchProgram:
    """A case by an op with the interface of Flash Linear Attention's."""

    def call(x: dict[str, Any], main: list[Any]) -> tuple[Any, Any]:
        named = dict(zip(MAIN, main)) | {name: x[name] for name in ("initial_state", "cu_seqlens") if name in x}
        return op(**named, output_final_state=case.shape.packing is None, **(options or {}))

    def forward(x: dict[str, Any]) -> Results:
        with torch.no_grad():
            output, final = call(x, [x[name] for name in MAIN])
        return {"output": output} | ({} if final is None else {"final_state": final})

    def both(x: dict[str, Any]) -> Results:
        main = [x[name].detach().requires_grad_() for name in MAIN]
        output = call(x, main)[0]
        gradients = torch.autograd.grad(output, main, x["do"])
        return {"output": output.detach()} | {f"d{name}": gradient for name, gradient in zip(MAIN, gradients)}

    return TorchProgram(both if case.timed == "forward+backward" else forward, _long_lengths)


def _long_lengths(x: dict[str, Any]) -> dict[str, Any]:
    return x | {"cu_seqlens": x["cu_seqlens"].long()} if "cu_seqlens" in x else x
