"""Peer: the Hopper kernels for KDA of cuDNN's frontend, called by addresses of tensors."""

from typing import Any

import torch  # type: ignore[import-not-found]
from cudnn.linear_attention.hopper import cuda_bwd_host, cuda_host  # type: ignore[import-not-found]

from benchmarks.inputs import MAIN
from benchmarks.programs import Program, Refused, Results, TorchProgram
from benchmarks.shapes import Case


def build(case: Case) -> Program:
    """The program of a case."""
    if case.op != "kda":
        raise Refused("its Hopper kernels are of KDA alone")
    if case.timed not in ("forward", "forward+backward"):
        raise Refused(f"it has no {case.timed}")
    if case.shape.dim != 128 or case.shape.heads != case.shape.value_heads:
        raise Refused(
            "its Hopper kernels take K = V = 128 and as many value heads as heads"
        )
    function = _both if case.timed == "forward+backward" else _forward
    return TorchProgram(function, _with_lengths_and_state, _keys_before_values)


def _with_lengths_and_state(x: dict[str, Any]) -> dict[str, Any]:
    """Sequences end to end, each with an initial state; the backward has a workspace."""
    batch, time, heads, dim = x["q"].shape
    if "cu_seqlens" not in x:
        ends = torch.arange(batch + 1, device="cuda", dtype=torch.int32) * time
        x = x | {"cu_seqlens": ends}
    sequences = x["cu_seqlens"].numel() - 1
    state = torch.zeros(sequences, heads, dim, dim, device="cuda")
    x = x | {"state": state}
    if "do" in x:
        size = cuda_bwd_host.workspace_bytes(batch * time, heads, sequences)
        workspace = torch.empty(size, device="cuda", dtype=torch.uint8)
        x = x | {"workspace": workspace}
    return x


def _keys_before_values(results: Results) -> Results:
    """Its states are [N, H, V, K]."""
    return results | {
        name: x.mT for name, x in results.items() if name == "final_state"
    }


def _sizes(x: dict[str, Any]) -> tuple[int, int, int]:
    batch, time, heads, _ = x["q"].shape
    return batch * time, heads, x["cu_seqlens"].numel() - 1


def _forward(x: dict[str, Any]) -> Results:
    tokens, heads, sequences = _sizes(x)
    output = torch.empty_like(x["v"])
    final = torch.empty_like(x["state"])
    main = [x[name] for name in MAIN]
    arrays = (*main, x["cu_seqlens"], x["state"], output, final)
    addresses = [a.data_ptr() for a in arrays]
    cuda_host.launch(0, _stream(), *addresses, tokens, sequences, heads)
    # With packed sequences the states are not what the other implementations return.
    if sequences != x["q"].shape[0]:
        return {"output": output}
    return {"output": output, "final_state": final}


def _both(x: dict[str, Any]) -> Results:
    results = _forward(x)
    tokens, heads, sequences = _sizes(x)
    gradients = [torch.empty_like(x[name]) for name in MAIN]
    d_final = torch.zeros_like(x["state"])
    d_initial = torch.empty_like(x["state"])
    main = [x[name] for name in MAIN]
    read = (x["workspace"], x["do"], *main, x["cu_seqlens"], x["state"], d_final)
    written = (*gradients, d_initial)
    addresses = [a.data_ptr() for a in (*read, *written)]
    cuda_bwd_host.launch(0, _stream(), *addresses, tokens, heads, sequences)
    named = {f"d{name}": x for name, x in zip(MAIN, gradients)}
    return {"output": results["output"]} | named


def _stream() -> int:
    return torch.cuda.current_stream().cuda_stream
