"""A scan without TMA waits for its own copies of a chunk, also where the scan beside it reads more of each chunk."""

from typing import NamedTuple

import jax
import pytest
from support.kernel_cases import MAIN, Call, by_kernels, inputs

import jfla
from jfla.pallas.common.scan.cta import ScanCta
from jfla.pallas.mgpu import copies, kernel_code


class Counted(NamedTuple):
    """Of one scan's copies of a chunk."""

    reads_queries: bool
    copies: int
    waited_for: int
    stages: int


@pytest.mark.parametrize(
    ("op", "capability", "dim"),
    [("kda", "8.0", 64), ("gdn", "8.9", 64), ("gdn", "8.0", 128)],
)
def test_copies_of_a_chunk_are_counted_as_they_are_started(
    op, capability, dim, monkeypatch
):
    started = 0
    counted: list[Counted] = []
    cp_async = copies.cp_async
    copy_chunk = ScanCta.copy_chunk

    def counting_copy(*args):
        nonlocal started
        started += 1
        cp_async(*args)

    def counting_chunk(scan, chunk, stage):
        before = started
        copy_chunk(scan, chunk, stage)
        reads_queries = scan.gmem.chunks.q_from_start is not None
        copied = started - before
        waited_for = scan.copies_per_chunk
        counted.append(Counted(reads_queries, copied, waited_for, scan.config.stages))

    monkeypatch.setattr(copies, "cp_async", counting_copy)
    monkeypatch.setattr(ScanCta, "copy_chunk", counting_chunk)
    # Kernels that another test has lowered are not traced again.
    monkeypatch.setattr(kernel_code, "_KNOWN", {})
    arrays, _ = inputs(Call(op, group=1, key_dim=dim, value_dim=dim))
    main = [arrays[name] for name in MAIN]

    def gradients(do: jax.Array, *main: jax.Array) -> tuple[jax.Array, ...]:
        _, adjoint = jax.vjp(lambda *main: by_kernels(op)(*main).output, *main)
        return adjoint(do)

    with jfla.pallas.compiling_for(capability):
        traced = jax.jit(gradients).trace(arrays["v"], *main)
        traced.lower(lowering_platforms=("cuda",))
    assert {scan.reads_queries for scan in counted} == {False, True}
    for scan in counted:
        assert scan.stages > 1
        assert scan.copies == scan.waited_for
