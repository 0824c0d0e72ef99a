"""The pass "scan+output": what follows the work inside the chunks, on operands that are made
before.

`ours` runs our kernel; `chunk_operands` makes the same operands for kernels of other libraries.
"""

from benchmarks import internals
from benchmarks.inputs import MAIN, Arrays
from benchmarks.internals import ChunkOperands
from benchmarks.programs import JaxProgram, Program, Refused, Results
from benchmarks.shapes import Case


def ours(case: Case) -> Program:
    """The kernel that scans the states and writes the output."""
    _whole_chunks(case)
    if case.shape.dim not in internals.SUPPORTED_DIMS:
        raise Refused(
            f"K = {case.shape.dim}; its stages are timed on {internals.SUPPORTED_DIMS}"
        )

    def arrange(arrays: Arrays) -> tuple:
        main = [arrays[name] for name in MAIN]
        if reason := internals.why_not_pallas(case.op, main):
            raise Refused(reason)
        return internals.scan_operands(case.op, main)

    def run(x: tuple) -> Results:
        output, final = internals.scan_output(x)
        return {"output": output, "final_state": final}

    return JaxProgram(run, arrange)


def chunk_operands(case: Case, arrays: Arrays) -> ChunkOperands:
    """By the portable stages, in float32."""
    _whole_chunks(case)
    return internals.chunk_operands(case.op, [arrays[name] for name in MAIN])


def _whole_chunks(case: Case) -> None:
    if case.shape.packing is not None or case.shape.time % internals.CHUNK:
        raise Refused("its stages are timed on whole chunks without packing")
    if case.is_models_call:
        raise Refused("its stages are timed on decays and unit keys")
