"""Peer: FlashInfer's prefill of GDN, forward alone, in PyTorch. It takes decays as factors, made before it is timed."""

from typing import Any

import torch  # type: ignore[import-not-found]
from flashinfer.gdn_prefill import chunk_gated_delta_rule  # type: ignore[import-not-found]

from benchmarks.inputs import MAIN
from benchmarks.programs import Program, Refused, Results, TorchProgram
from benchmarks.shapes import Case


def build(case: Case) -> Program:
    """The program of a case."""
    if case.op != "gdn":
        raise Refused("it has GDN alone")
    if case.timed != "forward":
        raise Refused(f"it has no {case.timed}, but the forward alone")
    if case.shape.dim != 128:
        raise Refused("its Hopper kernel takes K = V = 128")

    def forward(x: dict[str, Any]) -> Results:
        main = {name: x[name] for name in MAIN}
        output, final = chunk_gated_delta_rule(
            **main,
            output_final_state=True,
            output_state=torch.empty_like(x["state"]),
            cu_seqlens=x["ends"],
        )
        return {"output": output, "final_state": final}

    def restore(results: Results) -> Results:
        """Rows beside one another again; its states are [N, H, V, K]."""
        output = results["output"].unflatten(0, (case.shape.batch, case.shape.time))
        # With packed sequences the states are not what the other implementations return.
        if case.shape.packing is not None:
            return {"output": output}
        return {"output": output, "final_state": results["final_state"].mT}

    return TorchProgram(forward, _end_to_end, restore)


def _end_to_end(x: dict[str, Any]) -> dict[str, Any]:
    """Rows as sequences one behind the other, the decay as a factor, and room for the states."""
    batch, time, _, dim = x["q"].shape
    ends = x.get("cu_seqlens")
    if ends is None:
        ends = torch.arange(batch + 1, device="cuda") * time
    found = {name: x[name].flatten(0, 1).contiguous() for name in MAIN}
    found["g"] = found["g"].exp()
    state = torch.empty(ends.numel() - 1, x["v"].shape[2], dim, dim, device="cuda")
    return found | {"ends": ends.long(), "state": state}
