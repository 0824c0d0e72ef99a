"""Every kernel of the table compiled down to machine code for an H200, on a machine without a GPU, and its report."""

import os
import pathlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from support.compile_for_h200 import compile_for_h200
from support.compile_report import check_report, facts
from support.described_calls import describe, value_and_gradients

import jfla
from jfla.pallas import support
from jfla.pallas.segments import SegmentChunks, segment_chunks

CONFIGURATIONS = [
    (op, dims, raw, batch)
    for op in ("kda", "gdn")
    for dims, raw, batch in (
        ((64, 64), True, 64),
        ((128, 128), True, 1),
        ((128, 128), False, 64),
        ((128, 128), False, 16),
        ((64, 128), True, 64),
        ((128, 64), True, 1),
        ((128, 256) if op == "kda" else (256, 256), False, 1),
        ((256, 256) if op == "kda" else (128, 256), True, 1),
        ((64, 256), True, 1),
        ((256, 64), True, 1),
        ((256, 128), True, 1),
    )
]
# Bytes, at most; of other kernels nothing.
SPILLED = {
    "jfla_grads_kda": 32,
    "jfla_intra_kda_beside_output_scan": 16,
}
# The same where packed segments lie in place; the scans with K = 256.
SPILLED_IN_PLACE = {
    "jfla_intra_kda_beside_output_scan": 40,
    "jfla_intra_kda": 20,
    "jfla_output_scan": 12,
    "jfla_backward_scans": 8,
}
REPORT = pathlib.Path(__file__).with_name("h200_report.json")
# The instructions that a kernel must not lose, by the start of their names in machine code.
COUNTED = {
    "wgmma": "HGMMA",
    "copies in": "UTMALDG",
    "copies out": "UTMASTG",
    "exp2": "MUFU.EX2",
}
DECODE_COUNTED = {"16-byte loads": "LD.E.128", "16-byte stores": "ST.E.128"}
DECODE_CONFIGURATIONS = [
    ("kda", (128, 128), 1, 64, ""),
    ("kda", (64, 128), 8, 64, ""),
    ("gdn", (128, 64), 3, 1, ""),
    ("kda", (128, 128), 8, 256, "every state"),
    ("kda", (128, 128), 8, 2048, "every state"),
    ("kda", (256, 256), 8, 64, ""),
    ("kda", (128, 128), 1, 256, "bfloat16 pool"),
    ("kda", (128, 128), 1, 2048, "bfloat16 pool"),
    ("gdn", (128, 128), 4, 64, "bfloat16 pool, rows of any length"),
    ("kda", (64, 64), 8, 1, "bfloat16"),
    ("kda", (256, 256), 8, 64, "pool, every state"),
]


def marks(op: str, dims: tuple[int, int]) -> list[pytest.MarkDecorator]:
    """One process for each op. CI has time for these; the others are compiled with `-m aot`."""
    quick = {
        "kda": [(64, 64), (128, 128), (128, 256)],
        "gdn": [(64, 64), (128, 128), (64, 128), (256, 256)],
    }[op]
    return [pytest.mark.xdist_group(op), *([] if dims in quick else [pytest.mark.slow])]


@pytest.mark.aot
@pytest.mark.parametrize(
    ("op", "dims", "raw", "batch"),
    [pytest.param(*x, marks=marks(*x[:2])) for x in CONFIGURATIONS],
)
def test_kernels_compile_as_written_down(op, dims, raw, batch, capfd, monkeypatch):
    """No kernel spills a register (but see `SPILLED`), or has lost an instruction of the tensor cores or of TMA.

    Instructions are counted in `h200_report.json`.

    A kernel that two configurations share is compiled, and reported, once in a process. With JFLA_WRITE_REPORT=1 the
    file is written instead, in a process for each configuration, so that all of its kernels are there. No kernel's
    matmuls wait for each other one by one, as they do when the compiler finds a result used before it was waited for,
    or one register too few.
    """
    monkeypatch.setitem(os.environ, "MOSAIC_GPU_DUMP_PTXAS", "1")
    monkeypatch.setitem(os.environ, "MOSAIC_GPU_DUMP_SASS", "1")
    arrays, static = describe(op, dims, raw, batch)
    segment_ids = (
        jax.ShapeDtypeStruct(arrays["v"].shape[:2], jnp.int32) if raw else None
    )
    chunk = getattr(jfla, f"chunk_{op}")

    def both(arrays: dict[str, Any], segment_ids: Any) -> dict[str, Any]:
        static["segment_ids"] = segment_ids
        static["return_final_state"] = not raw
        out, adjoint = jax.vjp(lambda x: chunk(**x, **static), arrays)
        return adjoint(out)[0]

    compile_for_h200(both, arrays, segment_ids)
    now = facts("".join(capfd.readouterr()), COUNTED)
    assert any(kernel.get("wgmma") for kernel in now.values()), (
        "expected machine code that no earlier test compiled"
    )
    name = f"{op} K{dims[0]} V{dims[1]}, {'raw gates, packed' if raw else 'decays'}, B{batch}"
    assert not [kernel for kernel in now if "serialized" in now[kernel]]
    for kernel, found in now.items():
        assert found["spilled bytes"] <= SPILLED.get(kernel, 0), kernel
    check_report(REPORT, name, now, COUNTED)


@pytest.mark.aot
@pytest.mark.parametrize(
    ("op", "dims", "raw", "time"),
    [
        ("gdn", (128, 128), False, 1003),
        pytest.param("gdn", (128, 128), False, 9003, marks=pytest.mark.slow),
        pytest.param("kda", (128, 128), True, 9003, marks=pytest.mark.slow),
        pytest.param("kda", (128, 128), True, 1003, marks=pytest.mark.slow),
        pytest.param("gdn", (256, 256), True, 1003, marks=pytest.mark.slow),
        pytest.param("kda", (256, 256), False, 1003, marks=pytest.mark.slow),
    ],
)
def test_chunks_of_segments_in_place_spill_few_bytes(
    op, dims, raw, time, capfd, monkeypatch
):
    """Tokens of no whole number of chunks, nor of TMA's tiles of rows; with 9,003 two kernels are one launch."""
    monkeypatch.setitem(os.environ, "MOSAIC_GPU_DUMP_PTXAS", "1")
    arrays, static = describe(op, dims, raw, batch=2, time=time)
    arrays["initial_state"] = jax.ShapeDtypeStruct((2, 3, 2, *dims), jnp.float32)
    segment_ids = jax.ShapeDtypeStruct((2, time), jnp.int32)
    chunk = getattr(jfla, f"chunk_{op}")

    def both(arrays: dict[str, Any], segment_ids: Any) -> dict[str, Any]:
        call = {**static, "segment_ids": segment_ids, "return_final_state": True}
        out, adjoint = jax.vjp(lambda x: chunk(**x, **call), arrays)
        return adjoint(out)[0]

    compile_for_h200(both, arrays, segment_ids)
    now = facts("".join(capfd.readouterr()), {})
    assert len(now) >= 4
    assert any("beside_output_scan" in kernel for kernel in now) == (time == 9003)
    for kernel, found in now.items():
        assert found["spilled bytes"] <= (SPILLED | SPILLED_IN_PLACE).get(kernel, 0), (
            kernel
        )
        assert "serialized" not in found, kernel


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.parametrize("raw", [False, True])
def test_segments_in_turn_spill_few_bytes(raw, capfd, monkeypatch):
    """Of KDA, one row of many heads, without states: one chain of chunks in place, which has a ring and resets."""
    monkeypatch.setitem(os.environ, "MOSAIC_GPU_DUMP_PTXAS", "1")
    tables = []

    def spy(*ids: jax.Array, in_turn: bool) -> SegmentChunks:
        tables.append(in_turn)
        return segment_chunks(*ids, in_turn=in_turn)

    monkeypatch.setattr("jfla.pallas.arrays.segment_chunks", spy)
    arrays, static = describe("kda", (128, 128), raw, batch=1, time=4000)
    many = {
        name: jax.ShapeDtypeStruct((1, 4000, 32, *x.shape[3:]), x.dtype)
        for name, x in arrays.items()
        if name != "gate"
    }
    if raw:
        rates = jax.ShapeDtypeStruct((32,), jnp.float32)
        many["gate"] = jfla.SoftplusGate(rates, None)
    ids = jax.ShapeDtypeStruct((1, 4000), jnp.int32)

    def forward(arrays: dict[str, Any], segment_ids: Any) -> jax.Array:
        call = {**static, "segment_ids": segment_ids, "num_segments": 20}
        return jfla.chunk_kda(**arrays, **call).output

    compile_for_h200(forward, many, ids)
    assert tables == [True]
    now = facts("".join(capfd.readouterr()), {})
    assert "jfla_intra_kda_beside_output_scan" in now
    for kernel, found in now.items():
        assert found["spilled bytes"] <= SPILLED.get(kernel, 0), kernel
        assert "serialized" not in found, kernel


@pytest.mark.aot
@pytest.mark.parametrize("op", ["kda", "gdn"])
def test_groups_of_sequences_compile_without_more_spills(op, capfd, monkeypatch):
    """As on an H100, beside their intra-chunk kernel."""
    monkeypatch.setitem(os.environ, "MOSAIC_GPU_DUMP_PTXAS", "1")
    monkeypatch.setattr(support, "bytes_per_us", lambda _: 3.03e6)
    arrays, static = describe(op, (128, 128), raw=False, batch=128, time=4096)
    chunk = getattr(jfla, f"chunk_{op}")
    compile_for_h200(lambda arrays: chunk(**arrays, **static).output, arrays)
    now = facts("".join(capfd.readouterr()), {})
    beside = f"jfla_intra_{op}_beside_output_scan"
    assert set(now) == {beside}
    assert now[beside]["spilled bytes"] <= SPILLED.get(beside, 0)
    assert "serialized" not in now[beside]


@pytest.mark.aot
@pytest.mark.slow
def test_groups_of_sequences_that_keep_states_spill_few_bytes(capfd, monkeypatch):
    """As on an H200: a loop over chunks in one over spans, in one over groups."""
    monkeypatch.setitem(os.environ, "MOSAIC_GPU_DUMP_PTXAS", "1")
    arrays, static = describe("gdn", (128, 128), raw=False, batch=96, time=4096)
    compile_for_h200(value_and_gradients("gdn", static), arrays, None)
    now = facts("".join(capfd.readouterr()), {})
    beside = "jfla_intra_gdn_beside_output_scan"
    assert "jfla_backward_scans_beside_grads_gdn" in now
    assert now[beside]["spilled bytes"] <= 4
    assert "serialized" not in now[beside]


@pytest.mark.aot
@pytest.mark.parametrize(
    ("op", "dims", "qk_norm", "batch"),
    [
        pytest.param("gdn", (128, 128), True, 64, marks=pytest.mark.slow),
        pytest.param("gdn", (128, 128), False, 16, marks=pytest.mark.slow),
        pytest.param("gdn", (256, 256), True, 1, marks=pytest.mark.slow),
        ("gdn", (64, 64), False, 1),
        pytest.param("kda", (128, 128), True, 64, marks=pytest.mark.slow),
        pytest.param("kda", (128, 128), False, 16, marks=pytest.mark.slow),
        pytest.param("kda", (256, 256), True, 1, marks=pytest.mark.slow),
    ],
)
def test_float16_does_not_spill(op, dims, qk_norm, batch, capfd, monkeypatch):
    """Forward and backward, whose matmuls are in float16 then; of KDA, in which some registers are spilled, few."""
    monkeypatch.setitem(os.environ, "MOSAIC_GPU_DUMP_PTXAS", "1")
    arrays, static = describe(op, dims, qk_norm, batch)
    half = {
        name: jax.ShapeDtypeStruct(arrays[name].shape, jnp.float16) for name in "qkv"
    }

    def both(arrays: dict[str, Any]) -> dict[str, Any]:
        function = getattr(jfla, f"chunk_{op}")
        chunk = lambda x: function(**x, **static, return_final_state=True)
        out, adjoint = jax.vjp(chunk, arrays)
        return adjoint(out)[0]

    compile_for_h200(both, arrays | half)
    now = facts("".join(capfd.readouterr()), {})
    # Each by itself, or two in one launch
    for kernel in (f"intra_{op}", "output_scan", "backward_scans", f"grads_{op}"):
        assert any(kernel in launch for launch in now), kernel
    # With JAX 0.11.2 and raw gates, by itself.
    allowed = SPILLED | {"jfla_intra_kda": 16}
    for kernel, found in now.items():
        assert found["spilled bytes"] <= allowed.get(kernel, 0), kernel
        assert "serialized" not in found, kernel


@pytest.mark.aot
@pytest.mark.parametrize(("op", "dims", "time", "batch", "how"), DECODE_CONFIGURATIONS)
def test_the_decode_kernel_compiles_as_written_down(
    op, dims, time, batch, how, capfd, monkeypatch
):
    """No spilled register, and the state goes through device memory 16 bytes at a time: every number once each way.

    Where every token's state is wanted, the loop over tokens has those stores, and there are no others.
    """
    monkeypatch.setitem(os.environ, "MOSAIC_GPU_DUMP_PTXAS", "1")
    monkeypatch.setitem(os.environ, "MOSAIC_GPU_DUMP_SASS", "1")
    arrays, static = describe(op, dims, raw=True, batch=batch, time=time)
    heads = arrays["v"].shape[2]
    dtype = jnp.bfloat16 if "bfloat16" in how else jnp.float32
    arrays["initial_state"] = jax.ShapeDtypeStruct((batch, heads, *dims), dtype)
    if "pool" in how:
        arrays["state_slots"] = jax.ShapeDtypeStruct((batch,), jnp.int32)
    if "rows" in how:
        arrays["segment_ids"] = jax.ShapeDtypeStruct((batch, time), jnp.int32)
    every = "every state" in how
    recurrent = getattr(jfla, f"recurrent_{op}")

    def decode(arrays: dict[str, Any]) -> jfla.DeltaRuleOutput:
        return recurrent(
            **arrays, **static, return_final_state=True, return_states=every
        )

    compile_for_h200(decode, arrays)
    now = facts("".join(capfd.readouterr()), DECODE_COUNTED)
    assert not [kernel for kernel in now if now[kernel]["spilled bytes"]]
    name = (
        f"{op} K{dims[0]} V{dims[1]}, decode T{time}{', ' * bool(how)}{how}, B{batch}"
    )
    check_report(REPORT, name, now, DECODE_COUNTED)


@pytest.mark.aot
@pytest.mark.parametrize("which", ["along time", "of segments"])
@pytest.mark.parametrize(
    ("op", "dims", "batch"),
    [
        ("kda", (64, 64), 64),
        ("kda", (64, 64), 8),
        ("gdn", (256, 256), 1),
        ("gdn", (128, 128), 2),
    ],
)
def test_scans_with_several_states_do_not_spill(
    op, dims, batch, which, capfd, monkeypatch
):
    """In bfloat16, forward and backward.

    With K = 256 the state takes every register: the bounds of a segment's loop go to local memory, once a chunk.
    """
    allowed = {"jfla_output_scan": 0, "jfla_backward_scans": 0}
    if dims == (256, 256) and which == "of segments":
        allowed = {"jfla_output_scan": 8, "jfla_backward_scans": 40}
    monkeypatch.setitem(os.environ, "MOSAIC_GPU_DUMP_PTXAS", "1")
    arrays, static = describe(op, dims, raw=False, batch=batch, time=256)
    states = (batch, 2) if which == "along time" else (batch, 3, 2)
    arrays["initial_state"] = jax.ShapeDtypeStruct((*states, *dims), jnp.bfloat16)
    segment_ids = None
    if which == "along time":
        static["return_states_every"] = 128
    else:
        static["return_final_state"] = True
        segment_ids = jax.ShapeDtypeStruct(arrays["v"].shape[:2], jnp.int32)
    chunk = getattr(jfla, f"chunk_{op}")

    def both(arrays: dict[str, Any], segment_ids: Any) -> dict[str, Any]:
        out, adjoint = jax.vjp(
            lambda x: chunk(**x, **static, segment_ids=segment_ids), arrays
        )
        return adjoint(out)[0]

    compile_for_h200(both, arrays, segment_ids)
    now = facts("".join(capfd.readouterr()), {})
    if "jfla_output_scan" not in now:  # in one launch with the kernel before it
        del allowed["jfla_output_scan"]
        allowed["jfla_intra_kda_beside_output_scan"] = SPILLED[
            "jfla_intra_kda_beside_output_scan"
        ]
    for kernel, most in allowed.items():
        assert now[kernel]["spilled bytes"] <= most


@pytest.mark.aot
@pytest.mark.parametrize("kind", ["gradients", "packed", "decoding"])
@pytest.mark.parametrize("in_turn", [jax.vmap, lambda f: lambda x: jax.lax.map(f, x)])
def test_slices_stay_outside_of_kernels_that_write_in_place(kind, in_turn):
    """In a fusion XLA forgets that a kernel's result lies over an operand: the result's memory stays as it was."""
    batch, time = 3, 1 if kind == "decoding" else 160
    arrays, static = describe("kda", (128, 128), False, batch=1, time=time)
    if kind == "packed":
        static = {
            "num_segments": 2,
            "segment_ids": jnp.repeat(jnp.array([1, 2]), 80)[None],
        }
    if kind == "decoding":
        arrays["initial_state"] = jax.ShapeDtypeStruct((1, 2, 128, 128), jnp.float32)

    def call(arrays: dict[str, Any]) -> Any:
        if kind == "decoding":
            return tuple(jfla.recurrent_kda(**arrays, return_final_state=True))
        out, adjoint = jax.vjp(lambda x: jfla.chunk_kda(**x, **static).output, arrays)
        return out, adjoint(out)

    rows = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((batch, *x.shape), x.dtype), arrays
    )
    program = compile_for_h200(in_turn(call), rows)
    fused = set(re.findall(r"fusion\(.*calls=%([\w.-]+)", program))
    assert fused
    writing = {
        re.match(r"\s*(?:ENTRY )?%([\w.-]+) \(", computation)[1]
        for computation in program.split("\n\n")
        if re.search("custom-call.*mosaic_gpu.*output_to_operand_aliasing", computation)
    }
    assert writing
    assert not writing & fused
