"""The chunked ops in forward mode, beside reverse mode and mixed with it, against the reference."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from support.derivatives import (
    CALLS,
    GATED,
    Call,
    assert_close,
    draw,
    jvp_of,
    loss_of,
    op_of,
    plain_of,
    segment_ids,
    tangents_of,
    wanted,
)

NAMED = jax.checkpoint_policies.save_only_these_names("jfla_a_qk", "jfla_inverse")
USUAL = (CALLS[1], CALLS[3])  # the others only with -m slow
EACH_CALL = pytest.mark.parametrize(
    "call",
    [
        pytest.param(call, marks=[] if call in USUAL else [pytest.mark.slow])
        for call in CALLS
    ],
    ids=str,
)


@pytest.fixture(autouse=True)
def _float64():
    with jax.enable_x64(True):
        yield


# Forward mode.


@EACH_CALL
def test_tangents_are_those_of_the_reference(call):
    """jvp of the jitted op and jit of the jvp, and what linearize gives."""
    op, x = op_of(call), draw(call)
    dx = tangents_of(x)

    def linearized(x: dict[str, jax.Array], dx: dict[str, jax.Array]) -> tuple:
        output, linear = jax.linearize(jax.jit(op), x)
        return output, linear(dx)

    forms = (jvp_of(op), jvp_of(jax.jit(op)), linearized)
    for got in jax.jit(lambda x, dx: [form(x, dx) for form in forms])(x, dx):
        assert_close(got, wanted(call)[0])


def test_tangents_of_one_argument_alone():
    x = draw(GATED)

    def along(op: Callable) -> Callable:
        def of(x: dict[str, jax.Array], name: str) -> tuple:
            return jvp_of(lambda a: op(x | {name: a}))(x[name], jnp.cos(x[name]))

        return jax.jit(
            lambda x: {name: of(x, name) for name in ("k", "a_log", "initial_state")}
        )

    assert_close(along(op_of(GATED))(x), along(plain_of(GATED))(x))


def test_forward_mode_outside_of_jit():
    call = Call("gdn")
    x = draw(call)
    assert_close(jvp_of(op_of(call))(x, x), jax.jit(jvp_of(plain_of(call)))(x, x))


@pytest.mark.parametrize(
    "call", [pytest.param(CALLS[1], marks=pytest.mark.slow), CALLS[3]], ids=str
)
def test_vmap_of_jvp_and_jvp_of_vmap(call):
    x = jax.tree.map(lambda *rows: jnp.stack(rows), draw(call, 1), draw(call, 2))
    dx = tangents_of(x)
    rows = [jax.tree.map(lambda a, i=i: a[i], (x, dx)) for i in range(2)]
    tangent = jax.jit(jvp_of(plain_of(call)))
    want = jax.tree.map(lambda *rows: jnp.stack(rows), *(tangent(*row) for row in rows))
    assert_close(jax.jit(jax.vmap(jvp_of(op_of(call))))(x, dx), want)
    assert_close(jax.jit(jvp_of(jax.vmap(op_of(call))))(x, dx), want)


def test_vmap_over_tangents_alone_and_over_one_argument_inside_another_axis():
    """What is not mapped stays so: residuals of the outer vmap, the gate's parameters in both."""
    x = draw(GATED)
    tangents = jax.tree.map(lambda a: jnp.stack([jnp.cos(a), jnp.sin(a)]), x)
    v = jnp.stack([x["v"], -x["v"], 2 * x["v"]], axis=1)

    def run(op: Callable) -> Callable:
        along = lambda x, dx: jvp_of(op)(x, dx)[1]
        both = lambda v, dx: jax.vmap(along, in_axes=(None, 0))(x | {"v": v}, dx)
        return jax.jit(jax.vmap(both, in_axes=(1, None), out_axes=1))

    assert_close(run(op_of(GATED))(v, tangents), run(plain_of(GATED))(v, tangents))


@pytest.mark.parametrize(
    "policy",
    [pytest.param(None, marks=pytest.mark.slow), NAMED],
    ids=["nothing", "named"],
)
def test_through_scan_and_checkpoint(policy):
    """Forward, reverse, and reverse of forward mode: layers one after the other, each made again in the backward."""
    x = draw(GATED)

    def stacked(op: Callable) -> Callable:
        def layer(
            x: dict[str, jax.Array], scale: jax.Array
        ) -> tuple[dict[str, jax.Array], None]:
            return x | {"v": scale * op(x)["output"] + x["v"]}, None

        layers = jax.checkpoint(layer, policy=policy)
        run = lambda x: lax.scan(layers, x, jnp.asarray([0.5, 2.0]))[0]["v"]
        slope = lambda x: jax.jvp(loss_of(run), (x,), (tangents_of(x),))[1]
        return jax.jit(
            lambda x: (
                jvp_of(run)(x, tangents_of(x)),
                jax.grad(loss_of(run))(x),
                slope(x),
            )
        )

    assert_close(stacked(op_of(GATED))(x), stacked(plain_of(GATED))(x))


# Both modes.


def test_jacobians_by_columns_and_by_rows():
    x = draw(GATED, batch=1)
    moved = {"k": x["k"][:, 62:66], "a_log": x["a_log"]}

    def output(moved: dict[str, jax.Array]) -> jax.Array:
        k = x["k"].at[:, 62:66].set(moved["k"])
        return op_of(GATED)(x | {"k": k, "a_log": moved["a_log"]})["output"][
            :, 63:66, :, :2
        ]

    assert_close(jax.jit(jax.jacfwd(output))(moved), jax.jit(jax.jacrev(output))(moved))


@pytest.mark.slow
@pytest.mark.parametrize("call", [CALLS[0], CALLS[4]], ids=str)
def test_products_with_the_hessian(call):
    """Forward over reverse, and reverse over forward."""
    x = draw(call)
    dx = tangents_of(x)

    def forward_over_reverse(op: Callable) -> Callable:
        return jax.jit(lambda x, dx: jax.jvp(jax.grad(loss_of(op)), (x,), (dx,)))

    def reverse_over_forward(op: Callable) -> Callable:
        return jax.jit(jax.grad(lambda x, dx: jax.jvp(loss_of(op), (x,), (dx,))[1]))

    grads, product = forward_over_reverse(plain_of(call))(x, dx)
    assert_close(forward_over_reverse(op_of(call))(x, dx), (grads, product))
    assert_close(reverse_over_forward(op_of(call))(x, dx), product)


@pytest.mark.slow
def test_products_with_the_hessian_by_reverse_mode_alone():
    call = Call("gdn")
    x = draw(call)

    def twice(op: Callable) -> Callable:
        along = lambda x: sum(jnp.vdot(d, jnp.cos(a)) for a, d in both(x))
        both = lambda x: [(x[name], d) for name, d in jax.grad(loss_of(op))(x).items()]
        return jax.jit(jax.grad(along))

    assert_close(twice(op_of(call))(x), twice(plain_of(call))(x))


# Reverse mode is the closed form.


@EACH_CALL
def test_gradients_are_those_of_the_reference(call):
    got = jax.jit(jax.value_and_grad(loss_of(op_of(call))))(draw(call))
    assert_close(got, wanted(call)[1])


def test_reverse_mode_is_the_closed_form_and_forward_mode_is_not():
    x = draw(GATED)
    grad = jax.jit(jax.grad(loss_of(op_of(GATED)))).lower(x).as_text(debug_info=True)
    tangent = jax.jit(jvp_of(op_of(GATED))).lower(x, x).as_text(debug_info=True)
    assert "jfla_chunk_backward" in grad
    assert "jfla_chunk_backward" not in tangent


def test_one_of_two_outputs_alone():
    x = draw(GATED)
    final = lambda op: lambda x: jnp.sum(jnp.sin(op(x)["final_state"]))
    without_q = {name: a for name, a in x.items() if name != "q"}
    grad = lambda op: jax.jit(jax.grad(lambda rest: final(op)(rest | {"q": x["q"]})))(
        without_q
    )
    assert_close(grad(op_of(GATED)), grad(plain_of(GATED)))


@EACH_CALL
def test_the_backward_keeps_the_inputs_and_two_matrices_per_chunk(call):
    x = draw(call)
    op = op_of(call)
    adjoint = jax.eval_shape(lambda x: jax.vjp(op, x)[1], x)
    kept = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(adjoint))
    ids = segment_ids(call, 2)
    inputs = sum(a.nbytes for a in x.values()) + (0 if ids is None else ids.nbytes)
    chunks = 2 + (3 if call.segments else 0)
    assert kept <= inputs + 2 * (2 * 2 * chunks * 64 * 64 * 8)


def test_a_checkpoint_policy_finds_the_matrices(capsys):
    x = draw(GATED)
    saved = jax.checkpoint(loss_of(op_of(GATED)), policy=NAMED)
    jax.ad_checkpoint.print_saved_residuals(saved, x)
    lines = capsys.readouterr().out.splitlines()
    computed = [line for line in lines if "from the argument" not in line]
    assert [line.split()[0] for line in computed] == ["f64[2,2,2,64,64]"] * 2


# Several devices.


def by_rows(
    call: Call, run: Callable, check_vma: bool, **specs: PartitionSpec
) -> Callable:
    """`run` under shard_map over the batch; the gate's parameters are the same for all devices."""
    mesh = jax.make_mesh(
        (2,), ("b",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2]
    )
    everywhere = dict.fromkeys(("a_log", "dt_bias"), PartitionSpec())
    layout = {name: everywhere.get(name, PartitionSpec("b")) for name in draw(call)}
    return jax.shard_map(
        run,
        mesh=mesh,
        in_specs=(layout,),
        out_specs=PartitionSpec("b"),
        check_vma=check_vma,
    )


@pytest.mark.parametrize(
    "check_vma",
    [True, pytest.param(False, marks=pytest.mark.slow)],
    ids=["check_vma", "no_vma"],
)
@pytest.mark.parametrize(
    "call", [GATED, pytest.param(CALLS[1], marks=pytest.mark.slow)], ids=str
)
def test_shard_map(call, check_vma):
    """Tangents inside and outside of it, and gradients through it."""
    op = op_of(call)
    sharded = by_rows(call, op, check_vma)
    inside = by_rows(call, lambda x: jvp_of(op)(x, tangents_of(x)), check_vma)

    @jax.jit
    def run(x: dict[str, jax.Array]) -> tuple:
        return (
            jvp_of(sharded)(x, tangents_of(x)),
            inside(x),
            jax.grad(loss_of(sharded))(x),
        )

    outside, within, grads = run(draw(call))
    tangents, (_, want) = wanted(call)
    assert_close(outside, tangents)
    assert_close(within, tangents)
    assert_close(grads, want)


def test_gradients_inside_of_shard_map():
    """Those of the gate's parameters are summed over the devices."""
    call = GATED
    x = draw(call)
    mesh = jax.make_mesh(
        (2,), ("b",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2]
    )
    layout = {
        name: PartitionSpec() if name in ("a_log", "dt_bias") else PartitionSpec("b")
        for name in x
    }
    grad = jax.grad(loss_of(op_of(call)))
    sharded = jax.shard_map(grad, mesh=mesh, in_specs=(layout,), out_specs=layout)
    assert_close(jax.jit(sharded)(x), wanted(call)[1][1])


def test_explicit_mesh_axes():
    call = GATED
    mesh = jax.make_mesh((2, 2), ("b", "h"), axis_types=(AxisType.Explicit,) * 2)
    x = draw(call)
    tokens = {"v", "g", "beta"}
    spec = {
        name: PartitionSpec("b", None, "h") if name in tokens else PartitionSpec()
        for name in x
    }
    placed = {
        name: jax.device_put(a, NamedSharding(mesh, spec[name]))
        for name, a in x.items()
    }
    op = op_of(call)
    run = lambda x: (jvp_of(op)(x, tangents_of(x)), jax.grad(loss_of(op))(x))
    with jax.set_mesh(mesh):
        tangents, grads = jax.jit(run)(placed)
    want, (_, want_grads) = jax.device_get(wanted(call))
    assert_close(jax.device_get(tangents), want)
    for name, a in grads.items():
        assert a.sharding.is_equivalent_to(placed[name].sharding, a.ndim)
    assert_close(jax.device_get(grads), want_grads)
