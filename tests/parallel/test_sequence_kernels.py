"""Sequences over several devices by the kernels: what surrounds them on simulated devices, themselves interpreted.

For four H200s they are compiled.
"""

import dataclasses
import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from support.kernel_cases import (
    MAIN,
    TOLERANCE,
    Call,
    error,
    inputs,
    main_and_rest,
    results,
    validated,
)
from support.standin import op_of

import jfla
from benchmarks.h200 import H200
from jfla import chunk_op
from jfla.pallas.dims import dims_of
from jfla.pallas.heuristics import schedule
from jfla.parallel import stretch
from jfla.parallel.stretch import Stretch
from jfla.types import DeltaRuleOutput, Inputs

SPECS = {"initial_state": P(), "a_log": P(), "dt_bias": P()}


def over_time(op: Any, mesh: Any, rest: dict[str, Any]) -> Any:
    """The op in shard_map over `t`: arrays -> DeltaRuleOutput."""
    ids = rest.get("segment_ids")
    static = {name: x for name, x in rest.items() if name != "segment_ids"}
    final = P() if rest.get("return_final_state") else None

    def local(arrays: dict[str, jax.Array], ids: Any) -> DeltaRuleOutput:
        main, more = main_and_rest(arrays)
        return op(*main, **more, **static, segment_ids=ids, sequence_axis="t")

    def whole(*main: jax.Array, **more: Any) -> DeltaRuleOutput:
        arrays = dict(zip(MAIN, main, strict=True))
        gate = more.pop("gate", None)
        if gate is not None:
            arrays |= {"a_log": gate.a_log, "dt_bias": gate.dt_bias}
        if "initial_state" in more:
            arrays["initial_state"] = more["initial_state"]
        specs = {name: SPECS.get(name, P(None, "t")) for name in arrays}
        return jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(specs, None if ids is None else P(None, "t")),
            out_specs=DeltaRuleOutput(P(None, "t"), final),
        )(arrays, ids)

    return whole


@pytest.mark.parametrize(
    ("op", "segments", "by_platform"),
    [
        ("kda", 3, False),
        pytest.param("kda", 3, True, marks=pytest.mark.slow),
        pytest.param("gdn", 0, False, marks=pytest.mark.slow),
        ("gdn", 0, True),
    ],
)
def test_what_surrounds_the_kernels(standin, op, segments, by_platform):
    """The state goes through shard_map, the derivative rule and the choice by platform."""
    call = Call(op, "raw", heads=1, time=96, segments=segments, dtype="float32")
    arrays, rest = inputs(call)
    mesh = jax.make_mesh(
        (4,), ("t",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4]
    )
    chunk = op_of(op, by_platform)
    got = jax.jit(lambda x: results(over_time(chunk, mesh, rest), x, rest))(arrays)
    recurrent = getattr(jfla.reference, f"recurrent_{op}")
    want = jax.jit(lambda x: results(recurrent, x, rest))(arrays)
    found = {name: error(got[name], want[name]) for name in want}
    assert max(found.values()) < 1e-5, found


class Border:
    """The network between two devices that run one after the other, in the place of `handed_over`."""

    def __init__(self, before: jax.Array) -> None:
        self.before = before
        self.left = before

    def __call__(
        self, r: jax.Array, c: jax.Array, axis: str, *, reverse: bool = False
    ) -> Any:
        self.left = r @ self.before + c
        return self.before


def part(whole: Inputs, start: int, length: int) -> Inputs:
    """A device's tokens."""
    names = (*MAIN, "segment_ids")
    tokens = {
        name: getattr(whole, name) for name in names if getattr(whole, name) is not None
    }
    return whole._replace(
        **{name: x[:, start : start + length] for name, x in tokens.items()}
    )


@pytest.mark.parametrize(
    ("call", "splits"),
    [
        (Call("gdn", "strong", time=140), {"stretch_splits": 2}),
        pytest.param(
            Call("gdn", "strong", time=256),
            {"stretch_splits": 2, "num_spans": 2},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            Call("kda", "strong", time=150, segments=3), {}, marks=pytest.mark.slow
        ),
        pytest.param(
            Call("kda", "strong", time=512),
            {"time_splits": 2, "stretch_splits": 3},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            Call("gdn", "raw", time=140, key_dim=128), {}, marks=pytest.mark.slow
        ),
        pytest.param(
            Call("gdn", "strong", time=256, value_dim=128),
            {"stretch_splits": 2},
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_interpreted_kernels_hand_the_state_on(monkeypatch, call, splits):
    """Two halves of time against the recurrence in float64, K and V alike or not."""
    arrays, rest = inputs(call)
    main, more = main_and_rest(arrays)
    whole, options = validated(call.op, *main, **more, **rest)
    options = dataclasses.replace(options, sequence_axis="t")
    half = call.time // 2
    parts = [part(whole, start, half) for start in (0, half)]
    usual = schedule(options.op, dims_of(parts[0]), 1)
    plan = chunk_op.Plan(dataclasses.replace(usual, **splits), interpret=True)
    rule = chunk_op._Rule(options, plan)

    slot = jnp.zeros(call.batch, jnp.int32)
    ids = rest.get("segment_ids")
    same = True if ids is None else ids[:, half - 1] == ids[:, half]
    row = lambda x: jnp.broadcast_to(jnp.asarray(x), (call.batch,))
    stretches = [
        Stretch(slot, slot, row(enters), row(owned)[:, None], "t")
        for enters, owned in ((False, False), (same, True))
    ]

    def bordered(function: Any) -> Any:
        """`function` of a stretch, and what it hands on."""

        def call(
            before: jax.Array, of_part: Stretch, *args: Any
        ) -> tuple[Any, jax.Array]:
            border = Border(before)
            monkeypatch.setattr(stretch, "handed_over", border)
            monkeypatch.setattr(chunk_op, "stretch_of", lambda *_: of_part)
            return function(*args), border.left

        return jax.jit(call)

    nothing = jnp.zeros((call.batch, call.value_heads, call.key_dim, call.value_dim))
    weight = lambda shape, seed: jax.random.normal(jax.random.key(seed), shape).astype(
        "bfloat16"
    )
    do = weight(whole.v.shape, 1).astype(whole.v.dtype)
    d_final = None
    if options.return_final_state:
        d_final = weight(nothing.shape, 2).astype(jnp.float32)
    forward = bordered(rule._kernels)
    first, left = forward(nothing, stretches[0], parts[0])
    kept = [first, forward(left, stretches[1], parts[1])[0]]
    backward = bordered(rule.backward)
    cotangents = [DeltaRuleOutput(x, d_final) for x in (do[:, :half], do[:, half:])]
    last, left = backward(nothing, stretches[1], parts[1], kept[1][1], cotangents[1])
    grads = [backward(left, stretches[0], parts[0], kept[0][1], cotangents[0])[0], last]

    got = {"output": jnp.concatenate([out.output for out, _ in kept], axis=1)}
    for name in MAIN:
        x = jnp.concatenate([getattr(d, name) for d in grads], axis=1)
        got[name] = x[..., 0] if name == "g" and call.op == "gdn" else x
    if d_final is not None:
        got["final_state"] = kept[0][0].final_state + kept[1][0].final_state
        got["initial_state"] = grads[0].initial_state + grads[1].initial_state
    with jax.enable_x64(True):
        exact = jax.tree.map(lambda x: x.astype(jnp.float64), arrays)
        want = results(getattr(jfla.reference, f"recurrent_{call.op}"), exact, rest)
        found = {name: error(got[name], want[name]) for name in got if name in want}
    over = {name: e for name, e in found.items() if not e <= TOLERANCE[name]}
    assert not over, over


@pytest.mark.aot
@pytest.mark.parametrize(
    ("op", "dtype"),
    [
        ("kda", "bfloat16"),
        ("gdn", "bfloat16"),
        pytest.param("kda", "float16", marks=pytest.mark.slow),
        pytest.param("gdn", "float16", marks=pytest.mark.slow),
    ],
)
def test_kernels_compiled_for_four_gpus_send_maps_alone(op, dtype):
    """Values and gradients of one sequence: maps, and gradients of what all devices share."""
    from jax.experimental import topologies

    topology = topologies.get_topology_desc(
        platform="cuda", topology_name="1x1x4", target_config=H200, topology="1x1x4"
    )
    mesh = jax.sharding.Mesh(
        np.array(topology.devices), ("t",), axis_types=(AxisType.Auto,)
    )
    arrays = jax.eval_shape(
        lambda: inputs(Call(op, gates="raw", group=1, time=1024, dtype=dtype))[0]
    )
    arrays = {
        name: jax.ShapeDtypeStruct(
            x.shape,
            x.dtype,
            sharding=jax.NamedSharding(mesh, SPECS.get(name, P(None, "t"))),
        )
        for name, x in arrays.items()
    }
    static = {"qk_norm": True, "beta_max": 1.0, "return_final_state": True}
    chunk = functools.partial(getattr(jfla, f"chunk_{op}"), implementation="pallas")
    program = jax.jit(
        lambda arrays: results(over_time(chunk, mesh, static), arrays, {})
    )
    with jfla.pallas.compiling_for("9.0"):
        text = program.trace(arrays).lower().compile().as_text()
    moving = re.compile(
        r"= (.*) (all-gather|all-to-all|collective-permute)(?:-start)?\("
    )
    found = moving.findall(text)
    assert {kind for _, kind in found} == {"all-gather"}
    shapes = [
        shape for result, _ in found for shape in re.findall(r"f32\[([\d,]+)\]", result)
    ]
    sizes = [math.prod(map(int, shape.split(","))) for shape in shapes]
    assert sizes == [4 * 64 * 128] * 2  # of each device R and C, then R^T and D
    element = {"bfloat16": "bf16", "float16": "f16"}[dtype]
    assert re.search(rf"\b{element}\[1,256,1,64\]", text)  # a device's part of v
    assert not re.search(r"\[1,1024,1,64\]", text)
