"""Kernels are traced and lowered once: their code is known by what they are made of, in memory and on disk."""

import dataclasses
import enum
import functools
import hashlib
import os
import pathlib
import re
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import pytest
from jax import export
from jaxlib.mlir import ir
from support.kernel_cases import scheduled

import jfla
from jfla.pallas.backward_overlap import BackwardOverlap
from jfla.pallas.mgpu import fingerprint as fingerprints
from jfla.pallas.mgpu import kernel_code
from jfla.pallas.mgpu.fingerprint import fingerprint
from jfla.pallas.mgpu.kernel_code import KernelCode

Lowered = list[jax.stages.Lowered]


@pytest.fixture
def lowered(monkeypatch: pytest.MonkeyPatch) -> Iterator[Lowered]:
    """Kernels that are lowered in this test, of which none is known."""
    found: Lowered = []
    extracted = kernel_code.extracted

    def noting(program: jax.stages.Lowered) -> KernelCode:
        found.append(program)
        return extracted(program)

    monkeypatch.setattr(kernel_code, "_KNOWN", {})
    monkeypatch.setattr(kernel_code, "extracted", noting)
    jax.clear_caches()
    yield found
    jax.clear_caches()


@pytest.fixture
def cache(tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
    """A folder that JAX's compilation cache has in this test."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    yield tmp_path / "jfla-kernels"
    jax.config.update("jax_compilation_cache_dir", before)


def _program(scale: float = 1.0, time: int = 64, capability: str = "9.0") -> str:
    """A GDN forward, in a program that `scale` makes another one."""

    def program(*main: jax.Array) -> jax.Array:
        return scale * jfla.chunk_gdn(*main, implementation="pallas").output

    tokens = jax.ShapeDtypeStruct((1, time, 2, 64), jnp.bfloat16)
    gates = jax.ShapeDtypeStruct((1, time, 2), jnp.float32)
    with jfla.pallas.compiling_for(capability):
        traced = jax.jit(program).trace(tokens, tokens, tokens, gates, gates)
        return traced.lower(lowering_platforms=("cuda",)).as_text()


def _decode(state: jax.Array, *main: jax.Array) -> jfla.DeltaRuleOutput:
    """A decoding step, whose state a kernel writes in place."""
    return jfla.recurrent_gdn(
        *main, initial_state=state, return_final_state=True, implementation="pallas"
    )


def _decoding_arrays() -> list[jax.ShapeDtypeStruct]:
    tokens = jax.ShapeDtypeStruct((2, 1, 2, 64), jnp.bfloat16)
    gates = jax.ShapeDtypeStruct((2, 1, 2), jnp.float32)
    state = jax.ShapeDtypeStruct((2, 2, 64, 64), jnp.float32)
    return [state, tokens, tokens, tokens, gates, gates]


def _decoding() -> str:
    with jfla.pallas.compiling_for("9.0"):
        traced = jax.jit(lambda *x: _decode(*x)).trace(*_decoding_arrays())
        return traced.lower(lowering_platforms=("cuda",)).as_text()


def test_a_kernel_is_lowered_once_for_all_programs(lowered: Lowered):
    first = _program(1.0)
    once = len(lowered)
    assert once >= 1
    other = _program(2.0)
    assert len(lowered) == once
    assert first != other
    jax.clear_caches()
    assert _program(1.0) == first
    assert len(lowered) == once


def test_a_block_of_a_kernel_has_each_constant_once(lowered: Lowered):
    _program()
    assert lowered
    for module in _known_modules():
        blocks = list(_constants(module.operation))
        assert max(len(block) for block in blocks) > 10
        assert all(len(block) == len(set(block)) for block in blocks)


def test_tma_descriptors_are_passed_by_words(lowered: Lowered):
    """By bytes, LLVM takes seconds to schedule the loads and stores of two dozen of them."""
    _program()
    assert lowered
    for module in _known_modules():
        text = str(module)
        descriptors = text.count("callee = @mosaic_gpu_init_tma_desc")
        words = re.findall(r"llvm.load.* -> !llvm\.array<(.*)>", text)
        assert descriptors > 0
        assert words == [f"{128 * descriptors // 8} x i64"]


def test_gradients_read_what_scans_beside_them_left_for_the_last_time(
    lowered: Lowered,
):
    """The second-level cache may drop it first."""
    beside = BackwardOverlap(3, 2, 0, 0, 0)
    call = scheduled("gdn", interpret=False, overlap_ctas=0, backward_overlap=beside)
    loss = lambda *main: jnp.sum(call(*main).output.astype(jnp.float32))
    _lower(jax.grad(loss, range(5)), "gdn")
    of_qk = 6  # q, k, factors and scalars
    of_v = 7  # of 64 columns of V: do, dv, v_new, and two tiles of S and dS each
    assert len(lowered) == 3
    assert sorted(_hints()) == [0, 0, of_qk + 2 * of_v]


@pytest.mark.parametrize(
    ("v_block", "copies"),
    [
        (128, 2 * 8),  # of the first chunks, and of those behind them
        (64, 0),  # another CTA reads all but v
    ],
)
def test_a_scan_reads_its_ring_for_the_last_time(
    lowered: Lowered, v_block: int, copies: int
):
    call = scheduled(
        "kda",
        interpret=False,
        overlap_v_block=v_block,
        overlap_ctas=2,
        ring_chunks=4,
    )
    _lower(call, "kda")
    assert len(lowered) == 1
    assert _hints() == [copies]


def _lower(function: Callable, op: str) -> None:
    """A call of one head with K = V = 128, for an H100."""
    tokens = jax.ShapeDtypeStruct((1, 1024, 1, 128), jnp.bfloat16)
    beta = jax.ShapeDtypeStruct((1, 1024, 1), jnp.float32)
    g = jax.ShapeDtypeStruct(tokens.shape, jnp.float32) if op == "kda" else beta
    with jfla.pallas.compiling_for("9.0"):
        traced = jax.jit(function).trace(tokens, tokens, tokens, g, beta)
        traced.lower(lowering_platforms=("cuda",))


def _hints() -> list[int]:
    """Of every known kernel how many copies have the hint to evict first."""
    return [str(module).count("L2::evict_first") for module in _known_modules()]


def _known_modules() -> Iterator[ir.Module]:
    """Of every kernel whose code is known what Mosaic compiles."""
    for code in kernel_code._KNOWN.values():
        bytecode = code.config["module"]
        assert isinstance(bytecode, bytes)
        assert code.config["kernel_hash"] == hashlib.sha256(bytecode).digest()
        with ir.Context() as context:
            context.allow_unregistered_dialects = True
            yield ir.Module.parse(bytecode)


def _constants(operation: ir.Operation) -> Iterator[list[tuple[str, str]]]:
    """Value and type of the constants of every block inside of an operation."""
    for region in operation.regions:
        for block in region:
            inside = [inner.operation for inner in block]
            yield [
                (str(x.attributes["value"]), str(x.result.type))
                for x in inside
                if x.name.endswith("arith.constant")
            ]
            for inner in inside:
                yield from _constants(inner)


def test_other_shapes_and_gpus_are_other_kernels(lowered: Lowered):
    _program()
    once = len(lowered)
    _program(time=128)
    twice = len(lowered)
    assert twice > once
    _program(capability="8.0")
    assert len(lowered) > twice


@pytest.mark.parametrize("program", [_program, _decoding])
def test_another_process_finds_it_on_disk(
    lowered: Lowered, cache: pathlib.Path, program
):
    first = program()
    once = len(lowered)
    assert len(list(cache.iterdir())) == once >= 1
    kernel_code._KNOWN.clear()
    jax.clear_caches()
    assert program() == first
    assert len(lowered) == once


def test_a_file_that_is_not_whole_is_made_again(lowered: Lowered, cache: pathlib.Path):
    first = _program()
    once = len(lowered)
    for file in cache.iterdir():
        file.write_bytes(file.read_bytes()[:-1])
    kernel_code._KNOWN.clear()
    jax.clear_caches()
    assert _program() == first
    assert len(lowered) == 2 * once
    kernel_code._KNOWN.clear()
    jax.clear_caches()
    assert _program() == first
    assert len(lowered) == 2 * once


def test_files_that_were_not_read_for_longest_are_removed(
    lowered: Lowered, cache: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    first = _program()
    ours = sorted(cache.iterdir())
    monkeypatch.setattr(kernel_code, "_MOST_FILES", len(ours) + 2)
    old = [cache / f"old{i}" for i in range(2)]
    for number, file in enumerate(old):
        file.write_bytes(b"")
        os.utime(file, (number, number))
    for file in ours:
        os.utime(file, (0, 0))
    kernel_code._KNOWN.clear()
    jax.clear_caches()
    assert _program() == first  # reads its own files, so that they are the newest
    _program(time=128)
    left = sorted(cache.iterdir())
    assert len(left) == len(ours) + 2
    assert set(ours) <= set(left)
    assert not set(old) & set(left)


def test_a_folder_that_may_only_be_read_serves(
    lowered: Lowered, cache: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    def refuse(self: pathlib.Path) -> None:
        raise PermissionError(self)

    first = _program()
    once = len(lowered)
    monkeypatch.setattr(pathlib.Path, "touch", refuse)
    kernel_code._KNOWN.clear()
    jax.clear_caches()
    assert _program() == first
    assert len(lowered) == once


def test_a_folder_that_cannot_be_written_is_no_failure(
    lowered: Lowered, tmp_path: pathlib.Path
):
    before = jax.config.jax_compilation_cache_dir
    (tmp_path / "file").write_text("")
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "file"))
    try:
        assert "mosaic_gpu_v2" in _program()
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
    assert lowered


def test_an_exported_program_has_mosaics_own_call(lowered: Lowered):
    """Which later versions can read; of a kernel that writes in place, too."""
    check = export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")

    with jfla.pallas.compiling_for("9.0"):
        make = export.export(
            jax.jit(_decode), platforms=["cuda"], disabled_checks=[check]
        )
        text = make(*_decoding_arrays()).mlir_module()
    assert text.count("mosaic_gpu_v2") == 1
    assert "output_operand_alias" in text
    assert lowered == []


def test_a_kernel_of_no_known_identity_is_lowered_each_time(
    lowered: Lowered, monkeypatch: pytest.MonkeyPatch, cache: pathlib.Path
):
    first = _program()
    once = len(lowered)
    kept = sorted(cache.iterdir())
    monkeypatch.setattr("jfla.pallas.mgpu.launch.fingerprint", lambda *_: None)
    jax.clear_caches()
    assert _program() == first
    assert len(lowered) == 2 * once
    assert sorted(cache.iterdir()) == kept


class _Colour(enum.Enum):
    RED = 1
    BLUE = 2


@dataclasses.dataclass
class _Size:
    rows: int
    columns: int


def _adder(amount: object):
    def add(x: int) -> object:
        return x, amount

    return add


def _recursive(limit: int):
    def count(n: int) -> int:
        return n if n == limit else count(n + 1)

    return count


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x,
        lambda x: (x, "a"),
        lambda x: {"a": x},
        lambda x: _Size(x, 4),
        lambda x: _adder(x),
        lambda x: _adder(_Size(4, x)),
        lambda x: _adder(_adder(x)),
        lambda x: _recursive(x),
        lambda x: functools.partial(_adder, x),
        lambda x: functools.partial(max, key=x),
        lambda x: jax.ShapeDtypeStruct((x, 3), "float32"),
        lambda x: jnp.zeros(x),
        lambda x: jnp.dtype("float32" if x == 1 else "int8"),
        lambda x: jnp.float32 if x == 1 else jnp.int8,
        lambda x: _Colour(x),
        lambda x: (lambda y: y + 1) if x == 1 else (lambda y: y + 2),
    ],
)
def test_values_are_told_apart(make):
    assert fingerprint(make(1)) == fingerprint(make(1)) is not None
    assert fingerprint(make(1)) != fingerprint(make(2))


def test_settings_and_code_are_told_apart(monkeypatch: pytest.MonkeyPatch):
    found = {fingerprint()}
    with jax.enable_x64(not jax.config.jax_enable_x64):
        found.add(fingerprint())
    with jax.default_matmul_precision("highest"):
        found.add(fingerprint())
    with jfla.pallas.compiling_for("8.0"):
        found.add(fingerprint())
    with jfla.pallas.compiling_for("8.9"):
        found.add(fingerprint())
    with monkeypatch.context() as patch:
        patch.setenv("MOSAIC_GPU_LINE_INFO", "1")
        found.add(fingerprint())
    monkeypatch.setattr(fingerprints, "_CODE", "other")
    found.add(fingerprint())
    assert len(found) == 7
    assert None not in found


def test_an_object_of_another_kind_has_no_identity():
    assert fingerprint(object()) is None
    assert fingerprint(_adder(object())) is None
