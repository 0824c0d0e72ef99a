"""The decode kernel: values, derivatives, what it refuses, in interpret mode; values and memory on a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.kernel_cases import Call, error, inputs, main_and_rest

import jfla

# The state is float32 throughout, on a GPU with its approximate exponential; the output is rounded to the dtype of v.
STATE, STATE_ON_GPU, OUTPUT = 1e-6, 1e-5, 3e-3

CALLS = [
    Call("kda", "raw", batch=2, time=1, heads=2, key_dim=128, value_dim=128),
    Call("kda", "mixed", time=8, key_dim=64, value_dim=128, betas="edge"),
    Call("gdn", "raw", batch=2, time=3, key_dim=128, value_dim=64, dtype="float16"),
    Call("gdn", "strong", time=1, key_dim=64, value_dim=64),
    Call("gdn", "weak", time=2, group=1, key_dim=128, value_dim=128, dtype="float32"),
    pytest.param(
        Call("kda", "raw", time=2, group=1, key_dim=256, value_dim=256),
        marks=pytest.mark.slow,
    ),
]


def exact(call, arrays, rest):
    with jax.enable_x64(True):
        main, more = main_and_rest(
            jax.tree.map(lambda x: x.astype(jnp.float64), arrays)
        )
        return jax.tree.map(
            np.asarray,
            getattr(jfla.reference, f"recurrent_{call.op}")(*main, **more, **rest),
        )


def check(call, tolerance):
    arrays, rest = inputs(call)
    main, more = main_and_rest(arrays)
    got = getattr(jfla, f"recurrent_{call.op}")(
        *main, **more, **rest, implementation="pallas"
    )
    want = exact(call, arrays, rest)
    assert got.output.dtype == call.dtype
    assert error(got.output, want.output) < (
        tolerance if call.dtype == "float32" else OUTPUT
    )
    assert error(got.final_state, want.final_state) < tolerance


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_values(call):
    with jfla.pallas.interpret():
        check(call, STATE)


def check_states(call, tolerance):
    """The result that was checked."""
    arrays, rest = inputs(call)
    rest["return_states"] = True
    main, more = main_and_rest(arrays)
    got = getattr(jfla, f"recurrent_{call.op}")(
        *main, **more, **rest, implementation="pallas"
    )
    want = exact(call, arrays, rest)
    assert error(got.output, want.output) < (
        tolerance if call.dtype == "float32" else OUTPUT
    )
    assert got.final_state.shape == want.final_state.shape
    assert got.final_state.shape[:2] == (call.batch, call.time)
    assert (
        max(
            error(got.final_state[:, t], want.final_state[:, t])
            for t in range(call.time)
        )
        < tolerance
    )
    return got


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_the_state_after_every_token(call):
    """The output and the last state are the bits of a call without."""
    arrays, rest = inputs(call)
    main, more = main_and_rest(arrays)
    with jfla.pallas.interpret():
        got = check_states(call, STATE)
        last = getattr(jfla, f"recurrent_{call.op}")(
            *main, **more, **rest, implementation="pallas"
        )
    np.testing.assert_array_equal(np.asarray(got.output), np.asarray(last.output))
    np.testing.assert_array_equal(
        np.asarray(got.final_state[:, -1]), np.asarray(last.final_state)
    )


@pytest.mark.gpu
@pytest.mark.parametrize(
    "dims", [(64, 64), (128, 128), (128, 64), (64, 128), (256, 256)], ids=str
)
@pytest.mark.parametrize("op", ["kda", "gdn"])
def test_values_on_a_gpu(op, dims):
    """Few states and many, which programs share differently; every way in which warps share the tokens."""
    for gates, batch, time in (
        ("raw", 1, 1),
        ("raw", 64, 8),
        ("mixed", 3, 4),
        ("strong", 2, 6),
        ("weak", 64, 1),
    ):
        call = Call(
            op,
            gates,
            batch=batch,
            time=time,
            heads=8,
            key_dim=dims[0],
            value_dim=dims[1],
        )
        check(call, STATE_ON_GPU)
        check_states(call, STATE_ON_GPU)


@pytest.mark.gpu
def test_a_donated_state_is_written_in_place():
    arrays, rest = inputs(Call("kda", batch=8, time=1, heads=8))
    main, more = main_and_rest(arrays)
    state = more["initial_state"]
    where = state.unsafe_buffer_pointer()
    run = jax.jit(
        lambda main, state: jfla.recurrent_kda(*main, **rest, initial_state=state),
        donate_argnums=1,
    )
    assert run(main, state).final_state.unsafe_buffer_pointer() == where


def test_a_bounded_gate_without_a_state_and_without_parameters():
    call = Call("kda", "raw", time=2)
    arrays, _ = inputs(call)
    main, _ = main_and_rest(arrays)
    rest = {
        "gate": jfla.SigmoidGate(lower_bound=-4.0),
        "beta_max": 2.0,
        "return_final_state": True,
        "scale": 0.3,
    }
    with jfla.pallas.interpret():
        got = jfla.recurrent_kda(*main, **rest, implementation="pallas")
        alone = jfla.recurrent_kda(
            *main, **rest | {"return_final_state": False}, implementation="pallas"
        )
    want = exact(
        call, {name: arrays[name] for name in ("q", "k", "v", "g", "beta")}, rest
    )
    assert error(got.output, want.output) < OUTPUT
    assert error(got.final_state, want.final_state) < STATE
    assert alone.final_state is None
    np.testing.assert_array_equal(np.asarray(alone.output), np.asarray(got.output))


def test_a_gate_that_hardly_decays_keeps_its_digits():
    x = jnp.linspace(-20.0, 5.0, 64).reshape(1, 1, 1, 64)
    q, v, state = (
        jnp.zeros((1, 1, 1, 64)),
        jnp.zeros((1, 1, 1, 64)),
        jnp.ones((1, 1, 64, 64)),
    )
    gate = jfla.SoftplusGate(jnp.full((1,), 2.5))
    with jfla.pallas.interpret():
        got = jfla.recurrent_kda(
            q,
            q,
            v,
            x,
            q[..., 0],
            gate=gate,
            initial_state=state,
            return_final_state=True,
            implementation="pallas",
        )
    with jax.enable_x64(True):
        decay = np.exp(-np.exp(2.5) * np.logaddexp(0.0, np.asarray(x, np.float64)))[
            0, 0, 0
        ]
    np.testing.assert_allclose(
        np.asarray(got.final_state)[0, 0, :, 0], decay, rtol=1e-5
    )


@pytest.mark.parametrize("op", ["kda", "gdn"])
def test_a_state_handed_on_token_by_token_gives_the_same_bits_as_one_call(op):
    arrays, _ = inputs(Call(op, "raw", time=3))
    main, more = main_and_rest(arrays)
    state = more.pop("initial_state")
    more |= {
        "beta_max": 1.0,
        "qk_norm": True,
        "return_final_state": True,
        "implementation": "pallas",
    }

    @jax.jit
    def run(main, state):
        return getattr(jfla, f"recurrent_{op}")(*main, **more, initial_state=state)

    with jfla.pallas.interpret():
        whole, outputs = run(main, state), []
        for t in range(3):
            output, state = run([x[:, t : t + 1] for x in main], state)
            outputs.append(np.asarray(output))
    np.testing.assert_array_equal(
        np.concatenate(outputs, axis=1), np.asarray(whole.output)
    )
    np.testing.assert_array_equal(np.asarray(state), np.asarray(whole.final_state))


@pytest.mark.parametrize("op", ["kda", "gdn"])
def test_going_on_from_an_accepted_prefix_gives_the_bits_of_the_loop(op):
    """Rows that accept 1, 2 and 3 of 3 drafted tokens get another token each."""
    arrays, _ = inputs(Call(op, "raw", batch=3, time=4, heads=1, group=1))
    main, more = main_and_rest(arrays)
    before = np.array(more["initial_state"])
    state = more.pop("initial_state")
    more |= {"beta_max": 1.0, "qk_norm": True, "implementation": "pallas"}
    run = functools.partial(getattr(jfla, f"recurrent_{op}"), **more)
    rows, accepted = np.arange(3), np.array([1, 2, 3])
    tokens = lambda at: [x[:, at] for x in main]
    with jfla.pallas.interpret():
        _, states = run(*tokens(slice(0, 3)), initial_state=state, return_states=True)
        np.testing.assert_array_equal(np.asarray(state), before)
        followed = run(
            *tokens(slice(3, 4)),
            initial_state=states[rows, accepted - 1],
            return_final_state=True,
        )
        loop = [state]
        for t in range(3):
            loop.append(
                run(
                    *tokens(slice(t, t + 1)),
                    initial_state=loop[-1],
                    return_final_state=True,
                ).final_state
            )
        for row, n in enumerate(accepted):
            alone = run(
                *tokens(slice(3, 4)), initial_state=loop[n], return_final_state=True
            )
            jax.tree.map(
                lambda a, b, row=row: np.testing.assert_array_equal(a[row], b[row]),
                followed,
                alone,
            )


def test_the_caller_keeps_its_state_unless_it_gives_it_away():
    arrays, rest = inputs(Call("gdn", time=1))
    main, more = main_and_rest(arrays)
    before = np.array(more["initial_state"])
    with jfla.pallas.interpret():
        jfla.recurrent_gdn(*main, **more, **rest, implementation="pallas")
    np.testing.assert_array_equal(np.asarray(more["initial_state"]), before)


@pytest.mark.parametrize("more", [{}, {"return_states": True}], ids=["last", "every"])
@pytest.mark.parametrize("check_vma", [True, False])
def test_under_shard_map(check_vma, more):
    arrays, rest = inputs(Call("gdn", batch=2, time=1))
    rest |= more
    mesh = jax.make_mesh((1,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))

    def run(arrays):
        main, more = main_and_rest(arrays)
        return tuple(jfla.recurrent_gdn(*main, **more, **rest, implementation="pallas"))

    spec = jax.sharding.PartitionSpec("batch")
    with jfla.pallas.interpret():
        want = run(arrays)
        got = jax.jit(
            jax.shard_map(
                run, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma
            )
        )(arrays)
    jax.tree.map(
        lambda x, y: np.testing.assert_array_equal(
            *(np.asarray(z, np.float32) for z in (x, y))
        ),
        got,
        want,
    )


@pytest.mark.parametrize("every", [False, True])
def test_derivatives_and_batches(every):
    call = Call("kda", "raw", batch=2, time=2)
    arrays, rest = inputs(call)
    rest["return_states"] = every

    def run(arrays, implementation):
        main, more = main_and_rest(arrays)
        out = jfla.recurrent_kda(*main, **more, **rest, implementation=implementation)
        return out.output.astype(jnp.float32).sum() + (out.final_state**2).sum()

    names = ("pallas", "xla")
    per_row = {name: None if name in ("a_log", "dt_bias") else 0 for name in arrays}
    one = jax.tree.map(
        lambda x, axis: x if axis is None else x[:, None],
        arrays,
        per_row,
        is_leaf=lambda x: x is None,
    )
    with jfla.pallas.interpret():
        grads = [jax.grad(run)(arrays, name) for name in names]
        rows = [
            jax.vmap(functools.partial(run, implementation=name), in_axes=(per_row,))(
                one
            )
            for name in names
        ]
    for name in arrays:
        np.testing.assert_array_equal(*(np.asarray(x[name], np.float32) for x in grads))
    np.testing.assert_allclose(*rows, rtol=1e-2)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"key_dim": 96}, "K = 96"),
        ({"value_dim": 96}, "V = 96"),
        ({"segments": 2}, "segment_ids"),
    ],
)
def test_what_the_kernel_refuses_goes_to_xla_unless_named(change, reason):
    arrays, rest = inputs(Call("gdn", **{"time": 4} | change))
    main, more = main_and_rest(arrays)
    with jfla.pallas.interpret():
        with pytest.raises(NotImplementedError, match=reason):
            jfla.recurrent_gdn(*main, **more, **rest, implementation="pallas")
        out = jfla.recurrent_gdn(*main, **more, **rest)
    assert out.output.shape == arrays["v"].shape
