"""The ops under vmap, jit, grad, remat and shard_map, and what a backward keeps."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from support.cases import Config, Style, call, compiled, draw, error

import jfla

CONFIG = Config(
    batch=2,
    time=70,
    heads=4,
    group=2,
    gate="softplus",
    qk_norm=True,
    state=True,
    final=True,
    dtype="float32",
)
OPS = pytest.mark.parametrize("op", ["kda", "gdn"])
NAMED = jax.checkpoint_policies.save_only_these_names("jfla_a_qk", "jfla_inverse")
COLLECTIVES = re.compile(
    r"all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter|collective-broadcast"
)


def make(config: Config, seed: int = 0):
    """(inputs, ids, cotangents) in float32 on the device."""
    x, ids, cotangents = draw(config, Style(seed))
    as_float32 = functools.partial(jax.tree.map, jnp.float32)
    return (
        as_float32(x),
        None if ids is None else jnp.asarray(ids),
        as_float32(cotangents),
    )


def assert_close(got, want, tolerance=2e-6):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
        assert error(a, b) <= tolerance


@pytest.mark.parametrize(("op", "segments"), [("kda", None), ("gdn", 3)])
def test_vmap_is_a_loop(op, segments):
    """Over every argument at once, segment ids and the gate's parameters too; values and gradients."""
    config = Config(
        op,
        batch=1,
        time=66,
        gate="softplus",
        state=True,
        final=True,
        segments=segments,
        dtype="float32",
    )
    calls = [make(config, seed) for seed in range(3)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *calls)
    got = jax.jit(jax.vmap(compiled(config, "chunk")))(*stacked)
    want = [compiled(config, "recurrent")(*c) for c in calls]
    assert_close(got, jax.tree.map(lambda *leaves: np.stack(leaves), *want), 5e-6)


@pytest.mark.parametrize(("op", "form"), [("gdn", "chunk"), ("kda", "recurrent")])
def test_vmap_over_one_argument_alone(op, form):
    config = Config(op, batch=1, time=5, state=True, final=True, dtype="float32")
    x, _, _ = make(config)

    def final(state):
        return call(config, form, x | {"initial_state": state}, None).final_state

    states = jnp.stack(
        [x["initial_state"], 0 * x["initial_state"], 2 * x["initial_state"]]
    )
    assert_close(jax.vmap(final)(states), jnp.stack([final(s) for s in states]))


@OPS
def test_remat_keeps_what_the_policy_names_and_changes_no_number(op, capsys):
    config = dataclasses.replace(CONFIG, op=op)
    x, _, _ = make(config)

    def loss(x, form="chunk"):
        out = call(config, form, x, None)
        return jnp.sum(jnp.sin(out.output)) + jnp.sum(out.final_state)

    def matmuls(f) -> int:
        return str(jax.make_jaxpr(jax.grad(f))(x)).count("dot_general")

    kept, nothing = (
        jax.checkpoint(loss, policy=p)
        for p in (NAMED, jax.checkpoint_policies.nothing_saveable)
    )
    jax.ad_checkpoint.print_saved_residuals(kept, x)
    computed = [
        line
        for line in capsys.readouterr().out.splitlines()
        if "from the argument" not in line
    ]
    # [N, B, HV, C, C]
    assert [line.split()[0] for line in computed] == ["f32[2,2,8,64,64]"] * 2
    # A_qk and the inverse are not made a second time
    assert matmuls(kept) < matmuls(nothing)
    if op == "gdn":
        assert_close(
            jax.jit(jax.grad(kept))(x),
            jax.jit(jax.grad(lambda x: loss(x, "recurrent")))(x),
            5e-6,
        )


@OPS
@pytest.mark.parametrize("segments", [None, 3])
def test_the_backward_keeps_the_inputs_and_two_matrices_per_chunk(op, segments):
    config = dataclasses.replace(CONFIG, op=op, segments=segments)
    x, ids, _ = make(config)
    adjoint = jax.eval_shape(
        lambda x: jax.vjp(lambda x: call(config, "chunk", x, ids), x)[1], x
    )
    chunks = 2 + (segments or 0)
    pairs = config.batch * config.value_heads * chunks * 64 * 64 * 4
    inputs = sum(a.nbytes for a in x.values()) + (0 if ids is None else ids.nbytes)
    assert (
        sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(adjoint))
        <= inputs + 2 * pairs
    )


# Several devices.


def sharded(config: Config, ids, check_vma: bool):
    """The call under shard_map, batch over "b" and heads over "h"."""
    mesh = jax.make_mesh((2, 4), ("b", "h"), axis_types=(AxisType.Auto,) * 2)
    tokens, state = PartitionSpec("b", None, "h"), PartitionSpec("b", "h")
    per_segment = tokens if config.segments else state
    specs = {name: tokens for name in ("q", "k", "v", "g", "beta")}
    specs |= {
        "a_log": PartitionSpec("h"),
        "dt_bias": PartitionSpec("h"),
        "initial_state": per_segment,
    }
    x_specs = {name: specs[name] for name in draw(config, Style())[0]}
    out_specs = jfla.DeltaRuleOutput(tokens, per_segment if config.final else None)

    def local(x, ids):
        here = dataclasses.replace(
            config, batch=config.batch // 2, heads=config.heads // 4
        )
        return call(here, "chunk", x, ids)

    in_specs = (x_specs, None if ids is None else PartitionSpec("b"))
    f = jax.shard_map(
        local, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma
    )
    return lambda x: {
        name: a for name, a in f(x, ids)._asdict().items() if a is not None
    }


SHARDED = [
    (dataclasses.replace(CONFIG, gate=None, segments=3), True, set()),
    # The gate's parameters are the same for every batch: their gradients are summed over it.
    (dataclasses.replace(CONFIG, op="gdn", state=False), True, {"all-reduce"}),
]


@pytest.mark.parametrize(("config", "check_vma", "collectives"), SHARDED, ids=str)
def test_shard_map_gives_the_numbers_of_one_device_without_a_collective(
    config, check_vma, collectives
):
    if jax.device_count() < 8:
        pytest.skip("needs 8 devices")
    x, ids, cotangents = make(config)
    f = sharded(config, ids, check_vma)

    @jax.jit
    def run(x, cotangents):
        out, adjoint = jax.vjp(f, x)
        return out | {f"d{name}": a for name, a in adjoint(cotangents)[0].items()}

    executable = run.lower(x, cotangents).compile()
    assert_close(
        executable(x, cotangents),
        compiled(config, "recurrent")(x, ids, cotangents),
        5e-6,
    )
    assert set(COLLECTIVES.findall(executable.as_text())) == collectives


@pytest.mark.parametrize("form", ["recurrent", "plain"])
def test_shard_map_of_the_reference_from_a_state_of_zeros(form):
    if jax.device_count() < 8:
        pytest.skip("needs 8 devices")
    mesh = jax.make_mesh((2, 4), ("b", "h"), axis_types=(AxisType.Auto,) * 2)
    config = dataclasses.replace(CONFIG, op="gdn", gate=None, state=False, final=False)
    x, _, _ = make(config)
    tokens = PartitionSpec("b", None, "h")
    f = jax.shard_map(
        lambda x: call(config, form, x, None).output,
        mesh=mesh,
        in_specs=(tokens,),
        out_specs=tokens,
    )
    assert_close(jax.jit(f)(x), call(config, form, x, None).output)


def test_shard_map_over_value_heads_that_share_a_query():
    """q and k are whole on every device: their gradients are summed over the devices."""
    if jax.device_count() < 8:
        pytest.skip("needs 8 devices")
    mesh = jax.make_mesh((8,), ("h",), axis_types=(AxisType.Auto,))
    config = Config("gdn", time=70, group=8, final=True, dtype="float32")
    x, ids, cotangents = make(config)
    heads = PartitionSpec(None, None, "h")
    specs = {
        "q": PartitionSpec(),
        "k": PartitionSpec(),
        "v": heads,
        "g": heads,
        "beta": heads,
    }
    out_specs = {"output": heads, "final_state": PartitionSpec(None, "h")}
    local = dataclasses.replace(config, group=1)
    f = jax.shard_map(
        lambda x: call(local, "chunk", x, None)._asdict(),
        mesh=mesh,
        in_specs=(specs,),
        out_specs=out_specs,
    )

    @jax.jit
    def run(x, cotangents):
        out, adjoint = jax.vjp(f, x)
        return out | {f"d{name}": a for name, a in adjoint(cotangents)[0].items()}

    assert_close(
        run(x, cotangents), compiled(config, "recurrent")(x, ids, cotangents), 5e-6
    )


@pytest.mark.parametrize(
    ("op", "form", "segments"), [("gdn", "chunk", None), ("kda", "recurrent", 3)]
)
def test_jit_of_sharded_arrays_needs_no_collective(op, form, segments):
    if jax.device_count() < 8:
        pytest.skip("needs 8 devices")
    mesh = jax.make_mesh((2, 4), ("b", "h"), axis_types=(AxisType.Auto,) * 2)
    config = dataclasses.replace(CONFIG, op=op, gate=None, segments=segments)
    x, ids, cotangents = make(config)
    state = ("b", None, "h") if segments else ("b", "h")

    def place(arrays):
        spec = {
            name: state if name.endswith("state") else ("b", None, "h")
            for name in arrays
        }
        return {
            name: jax.device_put(a, NamedSharding(mesh, PartitionSpec(*spec[name])))
            for name, a in arrays.items()
        }

    placed = (
        place(x),
        None
        if ids is None
        else jax.device_put(ids, NamedSharding(mesh, PartitionSpec("b"))),
    )
    executable = compiled(config, form).lower(*placed, place(cotangents)).compile()
    assert not COLLECTIVES.findall(executable.as_text())
    assert_close(
        executable(*placed, place(cotangents)),
        compiled(config, "recurrent")(x, ids, cotangents),
        5e-6,
    )


@pytest.mark.parametrize(
    "changes",
    [{"op": "kda", "segments": 3}, {"op": "gdn", "gate": None, "state": False}],
    ids=["kda-segments", "gdn"],
)
@pytest.mark.parametrize("form", ["chunk", "recurrent"])
def test_explicit_mesh_axes(form, changes):
    """Types say the layout of what goes in and comes out, gradients too; no other layout is asked for inside."""
    if jax.device_count() < 8:
        pytest.skip("needs 8 devices")
    mesh = jax.make_mesh((2, 4), ("b", "h"), axis_types=(AxisType.Explicit,) * 2)
    config = dataclasses.replace(CONFIG, time=66, **changes)
    x, ids, cotangents = make(config)
    state = ("b", None, "h") if config.segments else ("b", "h")
    axes = {
        "a_log": ("h",),
        "dt_bias": ("h",),
        "initial_state": state,
        "final_state": state,
    }

    def layout(name: str, a) -> NamedSharding:
        spec = axes.get(name.removeprefix("d"), axes.get(name, ("b", None, "h")))
        return NamedSharding(mesh, PartitionSpec(*spec, *[None] * (a.ndim - len(spec))))

    place = lambda arrays: {
        name: jax.device_put(a, layout(name, a)) for name, a in arrays.items()
    }
    placed_ids = (
        None
        if ids is None
        else jax.device_put(ids, NamedSharding(mesh, PartitionSpec("b")))
    )
    with jax.set_mesh(mesh):
        got = compiled(config, form)(place(x), placed_ids, place(cotangents))
    assert_close(got, compiled(config, "recurrent")(x, ids, cotangents), 5e-6)
    assert {name: a.sharding for name, a in got.items()} == {
        name: layout(name, a) for name, a in got.items()
    }


def test_explicit_mesh_axes_without_a_mesh_in_context_and_in_forward_mode():
    if jax.device_count() < 8:
        pytest.skip("needs 8 devices")
    config = dataclasses.replace(
        CONFIG, op="gdn", gate=None, state=False, final=False, time=5
    )
    x, _, _ = make(config)
    layout = NamedSharding(
        jax.make_mesh((2, 4), ("b", "h")), PartitionSpec("b", None, "h")
    )
    placed = {name: jax.device_put(a, layout) for name, a in x.items()}
    tangent = lambda form, x: jax.jvp(
        lambda x: call(config, form, x, None).output, (x,), (x,)
    )
    want = tangent("recurrent", x)
    for form in ("chunk", "recurrent"):
        assert_close(call(config, form, placed, None).output, want[0])
    assert_close(tangent("plain", placed), want)


# Compiles.


@pytest.mark.parametrize(("op", "form"), [("gdn", "chunk"), ("kda", "recurrent")])
def test_new_values_compile_nothing(op, form):
    config = Config(
        op,
        time=66,
        gate="sigmoid",
        state=True,
        final=True,
        segments=3,
        beta_max=1.0,
        dtype="float32",
    )
    calls = [make(config, seed) for seed in range(3)]
    compiles = []

    def listen(event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            compiles.append(duration)

    def run(x, ids):
        return jax.block_until_ready(call(config, form, x, ids))

    run(*calls[0][:2])
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for x, ids, _ in calls[1:]:
            run(x, ids)
        assert not compiles
        run(
            {
                name: a[:1] if name not in ("a_log", "dt_bias") else a
                for name, a in calls[0][0].items()
            },
            calls[0][1][:1],
        )
        assert compiles  # a new shape does compile: the listener hears it
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
