"""Small calls for compute-sanitizer, each in a process of its own: forward and gradients of one name in `CALLS`."""

import contextlib
import os
import sys
from typing import Any, NamedTuple

import jax

import jfla
from jfla.pallas.backward_overlap import BackwardOverlap
from support.kernel_cases import Call, by_kernels, inputs, results, scheduled

# Few CTAs, so that each takes several chunks, through all stages of its pipelines.
ALONE = {"num_sms": 2, "overlap_ctas": 0, "backward_overlap": None}
BESIDE_THE_SCAN = {"num_sms": 8, "overlap_ctas": 2, "ring_chunks": 4}
BESIDE_THE_GRADIENTS = {
    "overlap_ctas": 0,
    "backward_overlap": BackwardOverlap(2, 6, 0, state_ring=8, dstate_ring=6),
}


class SanitizedCall(NamedTuple):
    """`schedule` is None for the mma.sync kernels."""

    call: Call
    schedule: dict[str, Any] | None


def _named(op: str) -> dict[str, SanitizedCall]:
    def call(gates: str, time: int, dim: int, **more: Any) -> Call:
        return Call(op, gates, time=time, key_dim=dim, value_dim=dim, group=1, **more)

    packed = {"segments": 3, "segment_states": True}
    return {
        "hopper": SanitizedCall(call("strong", 640, 128), ALONE),
        "hopper raw": SanitizedCall(call("raw", 640, 128), ALONE),
        "hopper 64": SanitizedCall(call("raw", 448, 64), ALONE),
        "hopper 256": SanitizedCall(call("strong", 256, 256), ALONE),
        "hopper float16": SanitizedCall(
            call("mixed", 448, 128, dtype="float16"), ALONE
        ),
        "hopper packed": SanitizedCall(call("raw", 450, 128, **packed), {"num_sms": 2}),
        "beside the scan": SanitizedCall(call("strong", 448, 128), BESIDE_THE_SCAN),
        "beside the gradients": SanitizedCall(
            call("strong", 768, 128), BESIDE_THE_GRADIENTS
        ),
        "mma.sync 64": SanitizedCall(call("raw", 320, 64), None),
        "mma.sync": SanitizedCall(call("mixed", 320, 128), None),
        "mma.sync packed": SanitizedCall(call("raw", 330, 64, **packed), None),
    }


CALLS = {
    f"{op} {name}": call for op in ("kda", "gdn") for name, call in _named(op).items()
}


def run(name: str) -> None:
    """Computes one of `CALLS`."""
    call, schedule = CALLS[name]
    arrays, rest = inputs(call)
    if schedule is None:
        op = by_kernels(call.op)
        kernels = jfla.pallas.mma_kernels()
    else:
        op = scheduled(call.op, interpret=False, **schedule)
        kernels = contextlib.nullcontext()
    with kernels:
        found = jax.jit(lambda arrays: results(op, arrays, rest))(arrays)
        jax.block_until_ready(found)


if __name__ == "__main__":
    run(sys.argv[1])
    print(f"computed: {sys.argv[1]}", flush=True)
    # JAX unloads its modules when the process ends, which the tool does not survive.
    os._exit(0)
