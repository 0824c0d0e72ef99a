"""Calls on sharded arrays: every device runs the kernels on its own rows and heads.

On simulated devices plain JAX stands in for the kernels, with their operands and results: interpret mode takes one
device. For four H200s the kernels themselves are compiled.
"""

import contextlib
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from support.kernel_cases import (
    Call,
    error,
    inputs,
    main_and_rest,
    results,
)
from support.standin import op_of

import jfla
from benchmarks.h200 import H200
from jfla.pallas import heuristics
from jfla.pallas.dims import Dims
from jfla.parallel.split import split_by
from jfla.types import CHUNK, GDN, KDA, DeltaRuleOutput

COLLECTIVES = re.compile(
    r"\b(all-gather|all-to-all|collective-permute|all-reduce)(?:-start)?\("
)
MOVES = {"all-gather", "all-to-all", "collective-permute"}


def case(op: str, **changes: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    return inputs(
        Call(op, batch=2, heads=2, group=2, time=64, dtype="float32", **changes)
    )


def spec_of(name: str, x: jax.Array, rows: str | None, heads: str | None) -> P:
    """By rows and heads, whatever the array."""
    if name in ("a_log", "dt_bias"):
        return P(heads)
    one_state = name.endswith("state") and x.ndim == 4
    return P(rows, heads) if one_state else P(rows, None, heads)


def evaluated(
    op: str, arrays: dict[str, Any], rest: dict[str, Any]
) -> tuple[Any, list[str]]:
    """Values and gradients, and the collectives of the compiled program."""
    program = jax.jit(lambda arrays, rest: results(op_of(op), arrays, rest | static))
    static = {
        name: rest[name] for name in rest if not isinstance(rest[name], jax.Array)
    }
    placed = {name: x for name, x in rest.items() if isinstance(x, jax.Array)}
    compiled = program.lower(arrays, placed).compile()
    return compiled(arrays, placed), COLLECTIVES.findall(compiled.as_text())


def assert_equal(got: dict[str, Any], want: dict[str, Any]) -> None:
    found = {name: error(got[name], want[name]) for name in want}
    assert max(found.values()) < 1e-5, found


@pytest.mark.parametrize(
    ("op", "gates", "segments", "rows", "heads", "kind"),
    [
        ("gdn", "raw", 3, "x", None, AxisType.Explicit),
        pytest.param("gdn", "raw", 3, "x", None, AxisType.Auto, marks=pytest.mark.slow),
        pytest.param("gdn", "raw", 0, None, "y", AxisType.Auto, marks=pytest.mark.slow),
        pytest.param(
            "gdn", "raw", 0, None, "y", AxisType.Explicit, marks=pytest.mark.slow
        ),
        ("kda", "raw", 0, "x", "y", AxisType.Auto),
        pytest.param(
            "kda", "raw", 0, "x", "y", AxisType.Explicit, marks=pytest.mark.slow
        ),
        pytest.param(
            "kda", "strong", 3, "x", "y", AxisType.Auto, marks=pytest.mark.slow
        ),
        pytest.param(
            "kda", "strong", 3, "x", "y", AxisType.Explicit, marks=pytest.mark.slow
        ),
    ],
)
def test_each_device_has_its_rows_and_heads(
    standin, op, gates, segments, rows, heads, kind
):
    """Two value heads of a query head go together. Gradients of the gate's parameters are summed over rows.

    Packed rows have a state for each segment.
    """
    arrays, rest = case(op, gates=gates, segments=segments, segment_states=segments > 0)
    want, _ = evaluated(op, arrays, rest)
    (whole,) = set(standin.parts)
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(kind, kind))
    lay = lambda name, x: jax.device_put(
        x, NamedSharding(mesh, spec_of(name, x, rows, heads))
    )
    arrays = {name: lay(name, x) for name, x in arrays.items()}
    if segments:
        rest["segment_ids"] = jax.device_put(
            rest["segment_ids"], NamedSharding(mesh, P(rows))
        )
    standin.parts.clear()
    got, collectives = evaluated(op, arrays, rest)
    part = (
        whole[0] // (2 if rows else 1),
        whole[1],
        whole[2] // (2 if heads else 1),
        whole[3],
    )
    assert set(standin.parts) == {whole, part}
    assert not MOVES & {*collectives}, collectives
    summed = rows is not None and gates == "raw"
    assert ("all-reduce" in collectives) == summed
    for name, x in arrays.items():
        assert got[name].sharding.is_equivalent_to(x.sharding, x.ndim), name
    assert_equal(got, want)


@pytest.mark.parametrize(
    ("spec", "shape"),
    [
        pytest.param(P(None, None, None, "x"), (2,), marks=pytest.mark.slow),  # K and V
        pytest.param(P(None, "x"), (2,), marks=pytest.mark.slow),  # time
        (P(None, None, ("x", "y")), (2, 2)),  # four value heads of two query heads
    ],
    ids=["K and V", "time", "value heads alone"],
)
def test_what_cannot_be_split_is_gathered(standin, spec, shape):
    arrays, rest = case("kda")
    want, _ = evaluated("kda", arrays, rest)
    mesh = jax.make_mesh(
        shape, ("x", "y")[: len(shape)], axis_types=(AxisType.Auto,) * len(shape)
    )
    for name in ("v", "g"):
        arrays[name] = jax.device_put(arrays[name], NamedSharding(mesh, spec))
    got, collectives = evaluated("kda", arrays, rest)
    assert_equal(got, want)
    assert MOVES & {*collectives}


def test_vmap_checkpoint_and_shard_map_on_sharded_rows(standin):
    arrays, rest = case("gdn")
    want, _ = evaluated("gdn", arrays, rest)
    op = op_of("gdn")
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    rows = NamedSharding(mesh, P("x"))
    arrays = {name: jax.device_put(x, rows) for name, x in arrays.items()}

    def one_row(arrays: Any) -> Any:
        with_row = jax.tree.map(lambda x: x[None], arrays)
        return jax.tree.map(lambda x: x[0], run(with_row))

    def run(arrays: Any) -> Any:
        main = [arrays[name] for name in ("q", "k", "v", "g", "beta")]
        return op(*main, initial_state=arrays["initial_state"], **rest)

    transformed = {
        "vmap": jax.vmap(one_row),
        "checkpoint": jax.checkpoint(run),
        "shard_map": jax.shard_map(run, mesh=mesh, in_specs=P("x"), out_specs=P("x")),
    }
    for name, function in transformed.items():
        out = jax.jit(function)(arrays)
        assert_equal(out._asdict(), {field: want[field] for field in out._fields}), name

        def loss(arrays: Any, function: Any = function) -> jax.Array:
            return jnp.sum(function(arrays).output ** 2)

        got = jax.jit(jax.grad(loss))(arrays)
        assert_equal(
            got, jax.jit(jax.grad(lambda x: jnp.sum(run(x).output ** 2)))(arrays)
        )


def test_on_one_device_the_function_is_lowered_as_if_it_were_called():
    def function(x: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return {"b": jnp.sin(x["a"]) * 2.0}

    split = split_by(({"a": "B H"},), {"b": "B H"})(function)
    x = {"a": jnp.ones((4, 3))}
    plain, wrapped = (
        jax.jit(f).lower(x).compile().as_text() for f in (function, split)
    )
    strip = lambda text: re.sub(
        r"HloModule.*|metadata=\{[^}]*\}|stack_frame_id=\d+", "", text
    )
    instructions = lambda text: sorted(re.findall(r"= \S+ (\w+)\(", strip(text)))
    assert instructions(plain) == instructions(wrapped)
    np.testing.assert_array_equal(split(x)["b"], function(x)["b"])


def described_on_four_h200s(op: str, time: int) -> dict[str, Any]:
    """A call with rows over two GPUs and heads over two, K = V = 64, with a gate and an initial state."""
    from jax.experimental import topologies

    topology = topologies.get_topology_desc(
        platform="cuda", topology_name="1x1x4", target_config=H200, topology="1x1x4"
    )
    kinds = (AxisType.Auto,) * 2
    mesh = jax.sharding.Mesh(
        np.array(topology.devices).reshape(2, 2), ("x", "y"), axis_types=kinds
    )
    call = Call(op, gates="raw", batch=2, heads=2, group=2, time=time)
    arrays = jax.eval_shape(lambda: inputs(call)[0])
    lay = lambda name, x: NamedSharding(mesh, spec_of(name, x, "x", "y"))
    return {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=lay(name, x))
        for name, x in arrays.items()
    }


@pytest.mark.aot
@pytest.mark.parametrize("context", [False, True], ids=["plain jit", "in set_mesh"])
@pytest.mark.parametrize(("op", "implementation"), [("kda", "pallas"), ("gdn", None)])
def test_kernels_compiled_for_four_gpus_move_no_activation(op, implementation, context):
    """Values and gradients: what goes over the network is the gradients of the gate's parameters."""
    arrays = described_on_four_h200s(op, time=256)
    mesh = arrays["q"].sharding.mesh
    static = {"qk_norm": True, "beta_max": 1.0, "return_final_state": True}
    chunk = functools.partial(
        getattr(jfla, f"chunk_{op}"), implementation=implementation
    )
    program = jax.jit(lambda arrays: results(chunk, arrays, static))
    within = jax.set_mesh(mesh) if context else contextlib.nullcontext()
    with jfla.pallas.compiling_for("9.0"), within:
        text = program.trace(arrays).lower().compile().as_text()
    assert set(COLLECTIVES.findall(text)) == {"all-reduce"}
    assert re.search(r"bf16\[1,256,2,64\]", text)  # a device's part of v
    assert not re.search(r"\[2,256,[24],64\]", text)


@pytest.mark.aot
@pytest.mark.parametrize(
    ("op", "batch", "time", "rows", "heads"),
    [
        ("gdn", 8, 4096, "x", None),
        pytest.param("gdn", 1, 8192, None, "y", marks=pytest.mark.slow),
        pytest.param("kda", 8, 4096, "x", None, marks=pytest.mark.slow),
        ("kda", 2, 8192, "x", "y"),
    ],
)
def test_a_forward_alone_compiled_for_four_gpus_moves_nothing(
    op, batch, time, rows, heads
):
    """With what the kernels hand from one to the other in rings, which have no rows."""
    mesh = described_on_four_h200s(op, time=64)["q"].sharding.mesh
    lay = NamedSharding(mesh, P(rows, None, heads))
    shape = (batch, time, 32)
    described = lambda *channels, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(
        (*shape, *channels), dtype, sharding=lay
    )
    g = described(*([128] if op == "kda" else []), dtype=jnp.float32)
    arrays = [*[described(128)] * 3, g, described(dtype=jnp.float32)]
    chunk = functools.partial(getattr(jfla, f"chunk_{op}"), implementation="pallas")
    with jfla.pallas.compiling_for("9.0"):
        dims = Dims(batch, 32, time // CHUNK, 128, 128)
        usual = heuristics.schedule(KDA if op == "kda" else GDN, dims)
        assert usual.overlap_ctas
        assert usual.ring_chunks
        program = jax.jit(lambda arrays: chunk(*arrays).output)
        text = program.trace(arrays).lower().compile().as_text()
    assert not COLLECTIVES.findall(text)


@pytest.mark.aot
def test_rows_in_place_compiled_for_four_gpus_move_no_activation(monkeypatch):
    """The copies of the whole call would take 0.37 us here, those of a device 0.09: it reads rows as the whole does."""
    monkeypatch.setattr(heuristics, "MIN_COPY_US", 0.2)
    arrays = described_on_four_h200s("gdn", time=250)
    static = {"qk_norm": True, "beta_max": 1.0, "return_final_state": True}
    chunk = functools.partial(jfla.chunk_gdn, implementation="pallas")
    program = jax.jit(lambda arrays: results(chunk, arrays, static))
    with jfla.pallas.compiling_for("9.0"):
        text = program.trace(arrays).lower().compile().as_text()
    assert "jfla_copy_ends" in text
    assert set(COLLECTIVES.findall(text)) == {"all-reduce"}
    assert not re.search(r"\[2,250,[24],64\]", text)


@pytest.mark.aot
def test_decoding_compiled_for_four_gpus_moves_nothing():
    arrays = described_on_four_h200s("kda", time=2)

    def decode(arrays: dict[str, Any]) -> DeltaRuleOutput:
        main, rest = main_and_rest(arrays)
        options = {"return_final_state": True, "implementation": "pallas"}
        return jfla.recurrent_kda(*main, **rest, **options, qk_norm=True, beta_max=1.0)

    with jfla.pallas.compiling_for("9.0"):
        text = jax.jit(decode).trace(arrays).lower().compile().as_text()
    assert not COLLECTIVES.findall(text)
    assert "f32[1,2,64,64]" in text  # a device's part of the state
    assert "f32[2,4,64,64]" not in text


@pytest.mark.aot
def test_decoding_from_a_pool_compiled_for_four_gpus_splits_its_heads():
    """Every GPU has all rows and all slots of its own heads, and moves nothing."""
    arrays = described_on_four_h200s("kda", time=2)
    mesh = arrays["v"].sharding.mesh

    def by_head(name: str, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        axis = {"a_log": 0, "dt_bias": 0, "initial_state": 1}.get(name, 2)
        lay = NamedSharding(mesh, P(*[None] * axis, "y"))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=lay)

    arrays = {name: by_head(name, x.shape, x.dtype) for name, x in arrays.items()}
    pool_shape = (8, *arrays.pop("initial_state").shape[1:])
    pool = by_head("initial_state", pool_shape, jnp.bfloat16)
    slots = jax.ShapeDtypeStruct((2,), jnp.int32, sharding=NamedSharding(mesh, P()))

    def decode(
        arrays: dict[str, Any], pool: jax.Array, slots: jax.Array
    ) -> DeltaRuleOutput:
        main, rest = main_and_rest(arrays)
        rest |= {"return_final_state": True, "implementation": "pallas"}
        rest |= {"initial_state": pool, "state_slots": slots}
        return jfla.recurrent_kda(*main, **rest, qk_norm=True, beta_max=1.0)

    with jfla.pallas.compiling_for("9.0"):
        jitted = jax.jit(decode, donate_argnums=1)
        text = jitted.trace(arrays, pool, slots).lower().compile().as_text()
    assert "bf16[8,2,64,64]" in text  # a device's heads of the pool
    assert "bf16[8,4,64,64]" not in text
    assert not re.search(r"bf16\[8,2,64,64\]\S* copy\(", text)  # it is written in place
    assert not COLLECTIVES.findall(text)
