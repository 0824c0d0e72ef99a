"""Peer: Flash Linear Attention's Triton ops in PyTorch, without the libraries it dispatches to.

Its TileLang kernels are off for KDA. For GDN they stay where it takes them by default: on Hopper
its Triton kernel of the backward refuses Triton 3.4 to 3.7. `safe_gate` (KDA) allows its faster
form for decays of at least -5 per token; below them its results are not finite. A model's call is
one of both ops: they take the gate's parameters, and normalise q and k.
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

from benchmarks.inputs import GATE_PARAMETERS, MAIN
from benchmarks.programs import Program, Refused, Results, TorchProgram
from benchmarks.shapes import Case

BOUNDED = ("production", "strong", "weak", "mixed")  # gates of at least -5 per token


def build(case: Case) -> Program:
    """The program of a case."""
    if case.timed == "scan+output":
        raise Refused("its stages are timed as fla_kernels")
    os.environ.pop("FLA_TILELANG", None)  # read at every call
    decode = case.timed == "decode"
    if decode and case.is_models_call:
        raise Refused("its recurrent ops are timed on decays and unit keys")
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
    names = (*MAIN, *GATE_PARAMETERS) if case.is_models_call else MAIN

    def call(x: dict[str, Any], differentiated: dict[str, Any]) -> tuple[Any, Any]:
        rest = {name: x[name] for name in ("initial_state", "cu_seqlens") if name in x}
        return op(
            **{name: differentiated[name] for name in MAIN},
            **rest,
            **(_gate(differentiated) if case.is_models_call else {}),
            output_final_state=case.shape.packing is None,
            **(options or {}),
        )

    def forward(x: dict[str, Any]) -> Results:
        with torch.no_grad():
            output, final = call(x, x)
        return {"output": output} | ({} if final is None else {"final_state": final})

    def both(x: dict[str, Any]) -> Results:
        leaves = {name: x[name].detach().requires_grad_() for name in names}
        output = call(x, leaves)[0]
        gradients = torch.autograd.grad(output, list(leaves.values()), x["do"])
        named = {f"d{name}": gradient for name, gradient in zip(names, gradients)}
        return {"output": output.detach()} | named

    return TorchProgram(
        both if case.timed == "forward+backward" else forward, _long_lengths
    )


def _gate(x: dict[str, Any]) -> dict[str, Any]:
    """What an op is told of a model's call; the biases of all channels in one line."""
    a_log, dt_bias = (x[name] for name in GATE_PARAMETERS)
    return {
        "A_log": a_log,
        "dt_bias": dt_bias.flatten(),
        "use_gate_in_kernel": True,
        "use_qk_l2norm_in_kernel": True,
    }


def _long_lengths(x: dict[str, Any]) -> dict[str, Any]:
    return x | {"cu_seqlens": x["cu_seqlens"].long()} if "cu_seqlens" in x else x
