"""Peer: FlashQLA's TileLang kernels for GDN, in PyTorch."""

from flash_qla import chunk_gated_delta_rule  # type: ignore[import-not-found]

from benchmarks.peer_fla import torch_program
from benchmarks.programs import Program, Refused
from benchmarks.shapes import Case


def build(case: Case) -> Program:
    """The program of a case."""
    if case.op != "gdn":
        raise Refused("it has GDN alone")
    if case.timed not in ("forward", "forward+backward"):
        raise Refused(f"it has no {case.timed}")
    if case.shape.dim != 128:
        raise Refused("its kernels take K = V = 128")
    return torch_program(chunk_gated_delta_rule, case)
