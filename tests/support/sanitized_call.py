"""Small calls for compute-sanitizer, each in a process of its own: forward and gradients of one name in `CALLS`."""

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

import jax

import jfla
from jfla.pallas.backward_overlap import BackwardOverlap
from support.kernel_cases import (
    Call,
    by_kernels,
    inputs,
    main_and_rest,
    results,
    scheduled,
)

# Few CTAs, so that each takes several chunks, through all stages of its pipelines.
ALONE = {"num_sms": 2, "overlap_ctas": 0, "backward_overlap": None}
BESIDE_THE_SCAN = {"num_sms": 8, "overlap_ctas": 2, "ring_chunks": 4}
BESIDE_THE_GRADIENTS = {
    "overlap_ctas": 0,
    "backward_overlap": BackwardOverlap(2, 6, 0, state_ring=8, dstate_ring=6),
}


def _chunked(op: Callable[..., Any], call: Call) -> Any:
    arrays, rest = inputs(call)
    return jax.jit(lambda arrays: results(op, arrays, rest))(arrays)


def _on_hopper(call: Call, **schedule: Any) -> Any:
    return _chunked(scheduled(call.op, interpret=False, **schedule), call)


def _decoded(call: Call) -> Any:
    arrays, rest = inputs(call)
    main, more = main_and_rest(arrays)
    decode = getattr(jfla, f"recurrent_{call.op}")
    return decode(*main, **more, **rest, implementation="pallas")


def _by_mma_sync(compute: Callable[..., Any], *args: Any) -> Any:
    with jfla.pallas.mma_kernels():
        return compute(*args)


def _named(op: str) -> dict[str, Callable[[], Any]]:
    def call(gates: str, time: int, dim: int, **more: Any) -> Call:
        return Call(op, gates, time=time, key_dim=dim, value_dim=dim, group=1, **more)

    def on_hopper(call: Call, **schedule: Any) -> Callable[[], Any]:
        return functools.partial(_on_hopper, call, **schedule)

    def by_mma_sync(call: Call) -> Callable[[], Any]:
        return functools.partial(_by_mma_sync, _chunked, by_kernels(op), call)

    half = {"dtype": "float16"}
    packed = {"segments": 3, "segment_states": True}
    tokens = call("raw", 6, 128, batch=2)
    return {
        "hopper": on_hopper(call("strong", 640, 128), **ALONE),
        "hopper raw": on_hopper(call("raw", 640, 128), **ALONE),
        "hopper 64": on_hopper(call("raw", 448, 64), **ALONE),
        "hopper 256": on_hopper(call("strong", 256, 256), **ALONE),
        "hopper float16": on_hopper(call("mixed", 448, 128, **half), **ALONE),
        "hopper packed": on_hopper(call("raw", 450, 128, **packed), num_sms=2),
        "hopper in place": on_hopper(call("raw", 450, 128), num_sms=2, in_place=True),
        "hopper time splits": on_hopper(call("raw", 768, 128), time_splits=3, **ALONE),
        "beside the scan": on_hopper(call("strong", 448, 128), **BESIDE_THE_SCAN),
        "decode": functools.partial(_decoded, tokens),
        "mma.sync 64": by_mma_sync(call("raw", 320, 64)),
        "mma.sync": by_mma_sync(call("mixed", 320, 128)),
        "mma.sync packed": by_mma_sync(call("raw", 330, 64, **packed)),
        "mma.sync decode": functools.partial(_by_mma_sync, _decoded, tokens),
    }


CALLS = {
    f"{op} {name}": call for op in ("kda", "gdn") for name, call in _named(op).items()
} | {
    "kda in turn": functools.partial(
        _on_hopper,
        Call("kda", "raw", time=640, segments=4, key_dim=128, value_dim=128, group=1),
        segments_in_turn=True,
        **BESIDE_THE_SCAN,
    ),
    "gdn beside the gradients": functools.partial(
        _on_hopper,
        Call("gdn", "strong", time=768, key_dim=128, value_dim=128, group=1),
        **BESIDE_THE_GRADIENTS,
    ),
    "gdn spans": functools.partial(
        _on_hopper,
        Call("gdn", "raw", time=768, key_dim=128, value_dim=128, group=1),
        num_spans=4,
        **ALONE,
    ),
}


if __name__ == "__main__":
    name = sys.argv[1]
    jax.block_until_ready(CALLS[name]())
    print(f"computed: {name}", flush=True)
    # JAX unloads its modules when the process ends, which the tool does not survive.
    os._exit(0)
