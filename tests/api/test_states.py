"""The state after every token, on request: against calls on each prefix, derivatives, and what it cannot go with."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from support.cases import TOKENS, Config, Style, draw

import jfla

OPS = pytest.mark.parametrize("op", ["kda", "gdn"])
OPTIONS = {"beta_max": 2.0, "qk_norm": True}


def make(op: str, state: bool = True, **sizes):
    """q, k, v, g, beta, and the keyword arguments of a call, in float64 numpy."""
    config = Config(
        op,
        **{"time": 3, "heads": 2, "group": 2, "gate": "softplus", "beta_max": 2.0}
        | sizes,
        state=state,
    )
    x, _, _ = draw(config, Style(3))
    gate = jfla.SoftplusGate(x["a_log"], x["dt_bias"])
    return [x[name] for name in TOKENS], {"gate": gate} | (
        {"initial_state": x["initial_state"]} if state else {}
    )


def recurrent(op: str, main, rest, **options):
    return getattr(jfla, f"recurrent_{op}")(
        *main, **rest, **OPTIONS, **options, implementation="xla"
    )


def states_of_prefixes(op: str, main, rest):
    """[B, T, HV, K, V] from T calls, each from the first token on."""
    prefixes = [[x[:, : t + 1] for x in main] for t in range(main[0].shape[1])]
    return jnp.stack(
        [
            recurrent(op, prefix, rest, return_final_state=True).final_state
            for prefix in prefixes
        ],
        axis=1,
    )


@pytest.mark.parametrize(("op", "state"), [("kda", True), ("gdn", False)])
def test_states_are_the_final_states_of_the_prefixes(op, state):
    main, rest = make(op, state)
    with jax.enable_x64(True):
        got, want = (
            recurrent(op, main, rest, return_states=True),
            states_of_prefixes(op, main, rest),
        )
        plain = recurrent(op, main, rest)
        arrays = map(jnp.asarray, main)
        named = getattr(jfla.reference, f"recurrent_{op}")(
            *arrays, **rest, **OPTIONS, return_states=True
        )
    assert got.final_state.shape == (2, 3, 4, 8, 4)
    assert got.final_state.dtype == jnp.float64
    np.testing.assert_allclose(got.final_state, want, rtol=1e-13, atol=1e-14)
    for other in (plain, named):
        np.testing.assert_array_equal(got.output, other.output)
    np.testing.assert_array_equal(got.final_state, named.final_state)
    assert plain.final_state is None


def test_asking_for_the_final_state_too_changes_nothing():
    main, rest = make("gdn")
    one, both = (
        recurrent("gdn", main, rest, return_states=True, return_final_state=x)
        for x in (False, True)
    )
    jax.tree.map(np.testing.assert_array_equal, one, both)
    assert one.final_state.dtype == jnp.float32


def test_states_of_16_bit_inputs_are_float32():
    main, rest = make("kda")
    out = recurrent(
        "kda",
        [x.astype(jnp.bfloat16) for x in map(jnp.asarray, main)],
        rest,
        return_states=True,
    )
    assert (out.output.dtype, out.final_state.dtype) == (jnp.bfloat16, jnp.float32)


@OPS
def test_decoding_goes_on_from_an_accepted_prefix(op):
    """Of 5 drafted tokens a row accepts 1 to 5 and then gets others: the same as if those had never been drafted."""
    (draft, rest), (other, _) = make(op, batch=5, time=5), make(op, batch=5, time=7)
    accepted = np.array([1, 2, 3, 4, 5])
    rows = np.arange(5)
    _, states = recurrent(op, draft, rest, return_states=True)
    follow = [x[:, 5:] for x in other]
    got = recurrent(
        op,
        follow,
        rest | {"initial_state": states[rows, accepted - 1]},
        return_final_state=True,
    )
    for row, n in enumerate(accepted):
        here = rest | {"initial_state": rest["initial_state"][row : row + 1]}
        tokens = [
            np.concatenate([a[row : row + 1, :n], b[row : row + 1]], axis=1)
            for a, b in zip(draft, follow)
        ]
        for t in range(n + 2):
            output, state = recurrent(
                op, [x[:, t : t + 1] for x in tokens], here, return_final_state=True
            )
            here |= {"initial_state": state}
            if t >= n:
                np.testing.assert_array_equal(output[0, 0], got.output[row, t - n])
        np.testing.assert_array_equal(state[0], got.final_state[row])


@OPS
def test_derivatives_go_through_every_state(op):
    main, rest = make(op)
    with jax.enable_x64(True):
        weight = jax.random.normal(jax.random.key(0), (2, 3, 4, 8, 4))
        main, rest = jax.tree.map(jnp.asarray, (main, rest))
        every = lambda main, rest: jnp.sum(
            weight * recurrent(op, main, rest, return_states=True).final_state
        )
        prefixes = lambda main, rest: jnp.sum(
            weight * states_of_prefixes(op, main, rest)
        )
        got, want = (
            jax.jit(jax.grad(f, argnums=(0, 1)))(main, rest) for f in (every, prefixes)
        )
        tangent = jax.jvp(every, (main, rest), jax.tree.map(jnp.cos, (main, rest)))[1]
        inner = sum(
            jax.tree.leaves(
                jax.tree.map(lambda g, x: jnp.sum(g * jnp.cos(x)), got, (main, rest))
            )
        )
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-12), got, want
    )
    assert not np.asarray(got[0][0]).any()  # q reads the state, it does not write it
    assert all(np.asarray(g).any() for g in got[0][1:])
    np.testing.assert_allclose(tangent, inner, rtol=1e-11)


def test_vmap_is_a_loop():
    main, rest = make("gdn")
    state = jnp.stack([jnp.asarray(rest.pop("initial_state")), jnp.zeros((2, 4, 8, 4))])
    run = lambda state: (
        recurrent(
            "gdn", main, rest | {"initial_state": state}, return_states=True
        ).final_state
    )
    np.testing.assert_allclose(
        jax.vmap(run)(state), jnp.stack([run(x) for x in state]), rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("state", [True, False])
def test_explicit_mesh_axes(state):
    """The states are laid out as the initial one, or along the rows and heads of v, and whole along time."""
    if jax.device_count() < 8:
        pytest.skip("needs 8 devices")
    main, rest = make("gdn", state)
    want = recurrent("gdn", main, rest, return_states=True).final_state
    mesh = jax.make_mesh((2, 4), ("b", "h"), axis_types=(AxisType.Explicit,) * 2)
    place = lambda x, *spec: jax.device_put(
        jnp.asarray(x), NamedSharding(mesh, PartitionSpec(*spec))
    )
    # 4 heads of q and k
    per_head = [
        x[:, :, np.repeat(np.arange(2), 2)] if i < 2 else x for i, x in enumerate(main)
    ]
    placed = [place(x, "b", None, "h") for x in per_head]
    rest |= {"gate": jax.tree.map(lambda x: place(x, "h"), rest["gate"])}
    if state:
        rest |= {"initial_state": place(rest["initial_state"], "b", "h")}
    with jax.set_mesh(mesh):
        got = jax.jit(
            lambda main, rest: (
                recurrent("gdn", main, rest, return_states=True).final_state
            )
        )(placed, rest)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    assert got.sharding == NamedSharding(
        mesh, PartitionSpec("b", None, "h", None, None)
    )


@pytest.mark.parametrize("home", [jfla, jfla.reference])
@OPS
def test_what_it_cannot_go_with(home, op):
    main, rest = make(op, state=False)
    main, run = [jnp.asarray(x) for x in main], getattr(home, f"recurrent_{op}")
    ids = np.ones((2, 3), np.int32)
    message = r"return_states must be False with segment_ids \(it takes one sequence per row\), got True"
    for more in (
        {},
        {"num_segments": 1},
        {"num_segments": 1, "return_final_state": True},
    ):
        with pytest.raises(ValueError, match=message):
            run(*main, **rest, segment_ids=ids, return_states=True, **more)
    for wrong in (None, 1, "all"):
        with pytest.raises(
            ValueError, match=f"return_states must be True or False, got {wrong!r}"
        ):
            getattr(jfla, f"recurrent_{op}")(*main, **rest, return_states=wrong)
    with pytest.raises(TypeError, match="return_states"):
        getattr(home, f"chunk_{op}")(*main, **rest, return_states=True)
