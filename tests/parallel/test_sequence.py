"""Sequences that lie over several devices: outputs, states and gradients are those of one device, in both modes."""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from support.cases import Config, Style, call, draw, dtype, error, evaluate

import jfla
from jfla import affine
from jfla.parallel import hand_over

COLLECTIVES = re.compile(
    r"\b(all-gather|all-to-all|collective-permute|all-reduce|reduce-scatter)(?:-start)?\("
)
STRETCHES = ("q", "k", "v", "g", "beta")
TOLERANCE = {"float32": 1e-5, "float64": 1e-12}
STYLES = {  # gates of every strength, and a case in which every token empties the state
    "usual": Style(1),
    "any": Style(2, gates=("none", "weak", "wide", "empty"), betas=(None, 0.0, 2.0)),
}

# 32 tokens a device on four
KDA = Config(
    "kda", batch=1, time=128, group=2, key_dim=8, value_dim=4, state=True, final=True
)
GDN = dataclasses.replace(
    KDA, op="gdn", batch=2, gate="softplus", beta_max=1.0, qk_norm=True
)


def lengths(*rows: list[int], time: int = 128) -> np.ndarray:
    """Ids of rows of packed sequences of these lengths, then padding."""
    ids = [np.repeat(np.arange(1, len(row) + 1), row) for row in rows]
    return np.stack([np.pad(row, (0, time - len(row))) for row in ids]).astype(np.int32)


PACKINGS = {
    "a document across two borders": lengths([37, 51, 40]),
    "a sequence over three devices": lengths([20, 0, 85]),
    "borders of sequences on borders of devices": lengths([32, 64, 32]),
    "devices with padding alone": lengths([10, 30, 2]),
    "padding alone": lengths([0, 0, 0]),
    "many on one device": lengths([100, 3, 2]),
}


def mesh_of(devices: int, kind: AxisType = AxisType.Auto) -> Mesh:
    if jax.device_count() < devices:
        pytest.skip(f"needs {devices} devices")
    return jax.make_mesh(
        (devices,), ("t",), axis_types=(kind,), devices=jax.devices()[:devices]
    )


def spec_of(name: str) -> P:
    return P(None, "t") if name in (*STRETCHES, "output") else P()


def over_devices(config: Config, devices: int, check_vma: bool = True) -> Any:
    """The op in shard_map, each device with a stretch of time: {"output", "final_state"}."""

    def local(x: dict[str, jax.Array], ids: Any) -> dict[str, Any]:
        out = call(config, "chunk", x, ids, sequence_axis="t")._asdict()
        return {name: a for name, a in out.items() if a is not None}

    inputs = draw(config, Style())[0]
    names = ["output", *(["final_state"] if config.final else [])]
    return jax.shard_map(
        local,
        mesh=mesh_of(devices),
        in_specs=(
            {name: spec_of(name) for name in inputs},
            P(None, "t") if config.segments else None,
        ),
        out_specs={name: spec_of(name) for name in names},
        check_vma=check_vma,
    )


@functools.cache
def compiled(config: Config, devices: int, check_vma: bool = True) -> Any:
    """Values and gradients, as `support.cases.compiled` has those of one device."""
    forward = over_devices(config, devices, check_vma)

    def run(x: Any, ids: Any, cotangents: Any) -> dict[str, jax.Array]:
        out, adjoint = jax.vjp(lambda x: forward(x, ids), x)
        return out | {f"d{name}": a for name, a in adjoint(cotangents)[0].items()}

    return jax.jit(run)


def assert_as_on_one_device(
    config: Config,
    devices: int,
    style: Style = STYLES["usual"],
    ids: np.ndarray | None = None,
    check_vma: bool = True,
) -> None:
    x, _, cotangents = draw(config, style)
    want = evaluate(config, "recurrent", x, ids, cotangents)
    with jax.enable_x64(config.dtype == "float64"):
        arrays, weights = (
            {name: jnp.asarray(a, dtype(config, name)) for name, a in arrays.items()}
            for arrays in (x, cotangents)
        )
        got = compiled(config, devices, check_vma)(arrays, ids, weights)
    found = {name: error(got[name], want[name], tiny=1e-14) for name in want}
    assert max(found.values()) < TOLERANCE[config.dtype], found


@pytest.mark.parametrize(
    ("config", "devices"),
    [
        (dataclasses.replace(GDN, time=80, dtype="float32"), 8),
        pytest.param(dataclasses.replace(KDA, time=256), 2, marks=pytest.mark.slow),
        pytest.param(dataclasses.replace(GDN, time=384), 3, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_one_sequence_is_as_on_one_device(config, devices):
    """Stretches of 10 tokens, of 128, of 128: whole chunks or not."""
    assert_as_on_one_device(config, devices)


@pytest.mark.parametrize("ids", PACKINGS.values(), ids=PACKINGS)
def test_packed_sequences_with_states_are_as_on_one_device(ids):
    config = dataclasses.replace(KDA, segments=3)
    assert_as_on_one_device(config, 4, STYLES["any"], ids)


@pytest.mark.parametrize("seed", range(3))
def test_random_packings_are_as_on_one_device(seed):
    """Without states per sequence, of two rows."""
    config = dataclasses.replace(GDN, segments=3, state=False, final=False)
    _, ids, _ = draw(config, Style(seed))
    assert_as_on_one_device(config, 4, Style(seed), ids)


@pytest.mark.slow
@pytest.mark.parametrize("ids", PACKINGS.values(), ids=PACKINGS)
@pytest.mark.parametrize("devices", [2, 8])
@pytest.mark.parametrize("op", ["kda", "gdn"])
def test_packings_on_more_devices(op, devices, ids):
    for state in (True, False):
        config = dataclasses.replace(KDA, op=op, segments=3, state=state, final=state)
        assert_as_on_one_device(config, devices, Style(3), ids)
    assert_as_on_one_device(
        dataclasses.replace(config, dtype="float32"), devices, Style(4), ids
    )


@pytest.mark.slow
def test_without_the_check_of_what_varies():
    config = dataclasses.replace(GDN, batch=1, segments=3)
    for ids in PACKINGS.values():
        assert_as_on_one_device(config, 4, Style(5), ids, check_vma=False)
    assert_as_on_one_device(dataclasses.replace(KDA, time=96), 2, check_vma=False)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("devices", [1, 3, 8])
@pytest.mark.parametrize("gathered", [8, 0], ids=["gathered", "by doubling"])
def test_states_are_handed_over(monkeypatch, gathered, devices, reverse):
    monkeypatch.setattr(hand_over, "MAX_GATHERED", gathered)
    rng = np.random.default_rng(0)
    r = jnp.asarray(rng.standard_normal((devices, 2, 4, 4)), jnp.float32)
    c = jnp.asarray(rng.standard_normal((devices, 2, 4, 3)), jnp.float32)
    local = lambda r, c: hand_over.handed_over(r[0], c[0], "t", reverse=reverse)[None]
    on_devices = jax.shard_map(
        local, mesh=mesh_of(devices), in_specs=P("t"), out_specs=P("t")
    )
    got = jax.jit(on_devices)(r, c)
    by_span = lambda x: jnp.moveaxis(x, 0, 1)
    want = by_span(affine.chain(None, by_span(r), by_span(c), reverse=reverse))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_maps_by_doubling_in_the_op(monkeypatch):
    monkeypatch.setattr(hand_over, "MAX_GATHERED", 0)
    config = dataclasses.replace(GDN, batch=1, time=40, segments=2, value_dim=6)
    assert_as_on_one_device(config, 4, Style(6), lengths([17, 20], time=40))


@pytest.mark.parametrize(
    ("config", "spec"),
    [
        (
            dataclasses.replace(
                KDA, op="gdn", batch=2, time=64, heads=2, state=False, final=False
            ),
            P("b", "t", "h"),
        ),
        pytest.param(
            dataclasses.replace(GDN, time=64, heads=2),
            P("b", "t", "h"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            dataclasses.replace(KDA, time=64, heads=2, segments=3),
            P(None, ("b", "t"), "h"),
            marks=pytest.mark.slow,
        ),
        pytest.param(  # four value heads of one query head
            dataclasses.replace(KDA, time=64, group=4),
            P(None, "t"),
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_time_that_is_split_by_type_needs_no_argument(config, spec):
    """Explicit axes: the output is laid out as v, and tokens stay where they are."""
    kinds = (AxisType.Explicit,) * 3
    mesh_of(8)
    mesh = jax.make_mesh((2, 2, 2), ("b", "t", "h"), axis_types=kinds)
    x, ids, cotangents = draw(config, Style(9))
    want = evaluate(config, "recurrent", x, ids, cotangents)
    rows, time, heads = (*spec, None)[:3]
    states = P(rows, None, heads) if config.segments else P(rows, heads)
    layouts = {"a_log": P(heads), "dt_bias": P(heads), "initial_state": states} | {
        "final_state": states
    }

    def place(arrays: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        return {
            name: jax.device_put(
                jnp.asarray(a, dtype(config, name)),
                jax.NamedSharding(mesh, layouts.get(name, spec)),
            )
            for name, a in arrays.items()
        }

    def run(x: Any, ids: Any, cotangents: Any) -> dict[str, jax.Array]:
        forward = lambda x: call(config, "chunk", x, ids)._asdict()
        out, adjoint = jax.vjp(forward, x)
        if not config.final:
            cotangents = cotangents | {"final_state": None}
        assert jax.typeof(out["output"]).sharding.spec[:3] == (rows, time, heads)
        grads = {f"d{name}": a for name, a in adjoint(cotangents)[0].items()}
        return {name: a for name, a in out.items() if a is not None} | grads

    with jax.enable_x64(True), jax.set_mesh(mesh):
        if ids is not None:
            ids = jax.device_put(ids, jax.NamedSharding(mesh, P(rows, time)))
        program = jax.jit(run).lower(place(x), ids, place(cotangents)).compile()
        got = program(place(x), ids, place(cotangents))
    found = {name: error(got[name], want[name], tiny=1e-14) for name in want}
    assert max(found.values()) < 1e-12, found
    moved = {*COLLECTIVES.findall(program.as_text())}
    assert moved <= {"all-gather", "all-reduce"}
    tokens = config.batch * config.time * config.value_heads * config.value_dim
    for shape in re.findall(r"\[([\d,]+)\]\S* all-gather", program.as_text()):
        assert np.prod([int(n) for n in shape.split(",")]) < tokens, shape


@pytest.mark.slow
def test_forward_mode_remat_and_vmap():
    config = dataclasses.replace(KDA, op="gdn", time=20)
    x = {
        name: jnp.asarray(a, jnp.float32)
        for name, a in draw(config, Style(7))[0].items()
    }
    dx = jax.tree.map(jnp.cos, x)
    split = over_devices(dataclasses.replace(config, dtype="float32"), 2)

    def of(forward: Any) -> Any:
        def loss(x: Any) -> jax.Array:
            twice = jax.tree.map(lambda a: jnp.stack([a, 0.5 * a]), x)
            out = jax.vmap(jax.checkpoint(forward))(twice)
            return jnp.sum(out["output"] ** 2) + jnp.sum(out["final_state"] ** 3)

        return jax.jit(lambda: jax.jvp(jax.grad(loss), (x,), (dx,)))()

    got = of(lambda x: split(x, None))
    want = of(lambda x: call(config, "plain", x, None)._asdict())
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert error(a, b) < 1e-5


def test_what_goes_over_the_network():
    """A forward sends the ids at the ends of stretches and a map for each state, a backward one with a cotangent."""
    config = dataclasses.replace(
        KDA, op="gdn", time=20, state=False, final=False, dtype="float32"
    )
    config = dataclasses.replace(config, segments=2)
    x, ids, cotangents = draw(config, Style(8))
    arrays, weights = jax.tree.map(jnp.float32, (x, cotangents))
    text = compiled(config, 2).lower(arrays, ids, weights).compile().as_text()
    assert COLLECTIVES.findall(text) == ["all-gather"] * 3
    # [devices | B, HV, K, K + V]
    assert len(re.findall(r"f32\[[\d,]*8,12\]\S* all-gather", text)) == 2


def test_errors():
    x = {name: jnp.asarray(a, jnp.float32) for name, a in draw(KDA, Style())[0].items()}
    config = dataclasses.replace(KDA, dtype="float32")
    with pytest.raises(
        ValueError, match=r"sequence_axis must be .*\(there is none\), got 't'"
    ):
        call(config, "chunk", x, None, sequence_axis="t")
    with pytest.raises(ValueError, match=r"sequence_axis must be .*\('t'\), got 'x'"):
        jax.shard_map(
            lambda x: call(config, "chunk", x, None, sequence_axis="x"),
            mesh=mesh_of(2),
            in_specs=P(),
            out_specs=P(),
        )(x)
    with pytest.raises(TypeError, match="sequence_axis"):
        jfla.recurrent_kda(*(x[name] for name in STRETCHES), sequence_axis="t")
