"""The mma.sync kernels compiled down to machine code for every GPU that takes them, on a machine without one."""

import pathlib
from typing import Any

import pytest
from support.compile_report import check_report

REPORT = pathlib.Path(__file__).with_name("mma_report.json")
# The instructions that a kernel must not lose, by the start of their names in machine code.
COUNTED = {"mma": "HMMA", "copies in": "LDGSTS", "exp2": "MUFU.EX2"}
WITHOUT_PRODUCTS = {"jfla_copy_ends", "jfla_return_ends", "jfla_gate_grads"}
DECODE_COUNTED = {"16-byte loads": "LD.E.128", "16-byte stores": "ST.E.128"}
CAPABILITIES = ("8.0", "8.6", "8.9", "10.0", "10.3", "12.0", "12.1")
# Each with the instructions and the memory of another one: fewer of these are compiled.
ALIKE = ("8.6", "10.3", "12.1")
DIMS = ((64, 64), (128, 128), (64, 128), (128, 64))
RAW = ("raw", "packed")
PLAIN = ("initial", "final")
CHUNKED = [
    (op, dims, RAW if dims[0] == dims[1] else PLAIN)
    for op in ("kda", "gdn")
    for dims in DIMS
]
# In the smallest shared memory that there is.
MORE = [
    ("gdn", (128, 128), features)
    for features in (
        ("float16", *PLAIN),
        ("along time",),
        ("segments", "packed", *PLAIN),
    )
] + [("kda", (128, 128), ("float16", *PLAIN))]
DECODED = [("kda", 1), ("gdn", 4)]
# CI has time for one of each architecture; the others are compiled with `-m aot`.
QUICK = (
    ("8.0", "gdn", (64, 64), RAW),
    ("8.9", "kda", (64, 64), RAW),
    ("10.0", "gdn", (64, 128), PLAIN),
    ("12.0", "gdn", (128, 64), PLAIN),
    ("8.6", "kda", 1),
)


def cases(*kinds: tuple[Any, ...]) -> list[Any]:
    """For `pytest.mark.parametrize`; those that are not quick are slow."""
    return [
        pytest.param(*kind, marks=[] if kind in QUICK else [pytest.mark.slow])
        for kind in kinds
    ]


@pytest.mark.aot
@pytest.mark.parametrize(
    ("capability", "op", "dims", "features"),
    cases(
        *(
            (capability, *kind)
            for capability in CAPABILITIES
            if capability not in ALIKE
            for kind in CHUNKED
        ),
        *(
            (capability, op, (128, 128), RAW)
            for capability in ALIKE
            for op in ("kda", "gdn")
        ),
        *(("8.9", *kind) for kind in MORE),
    ),
)
def test_kernels_compile_as_written_down(capability, op, dims, features):
    """Forward and backward: no kernel spills a register, takes more shared memory than there is, or loses instructions.

    Facts stand in `mma_report.json`, which JFLA_WRITE_REPORT=1 writes, in one process.
    """
    from support.compile_for import compiled

    now = compiled(
        capability, COUNTED, op=op, dims=dims, kind="chunk", time=256, features=features
    )
    name = f"{capability} {op} K{dims[0]} V{dims[1]}, {', '.join(features)}"
    assert len(now) >= 4
    assert all(now[kernel]["mma"] for kernel in now.keys() - WITHOUT_PRODUCTS)
    assert not {kernel for kernel in now if now[kernel]["spilled bytes"]}
    check_report(REPORT, name, now, COUNTED)


@pytest.mark.aot
@pytest.mark.parametrize(
    ("capability", "op", "time"),
    cases(*((capability, *kind) for capability in CAPABILITIES for kind in DECODED)),
)
def test_the_decode_kernel_compiles_as_written_down(capability, op, time):
    """The state goes through device memory 16 bytes at a time."""
    from support.compile_for import compiled

    features = ("raw", *PLAIN)
    now = compiled(
        capability,
        DECODE_COUNTED,
        op=op,
        dims=(128, 128),
        kind="decode",
        time=time,
        features=features,
    )
    assert not {kernel for kernel in now if now[kernel]["spilled bytes"]}
    check_report(
        REPORT, f"{capability} {op} K128 V128, decode T{time}", now, DECODE_COUNTED
    )
