"""The decode kernel on pools of states, and on more tokens than a launch takes: in interpret mode, and on a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.kernel_cases import Call, error, inputs, main_and_rest

import jfla

STATE, STATE_ON_GPU, OUTPUT = 1e-6, 1e-5, 3e-3
SLOTS, LENGTHS = np.array([4, -1, 0], np.int32), np.array([2, 3, 1])
OTHERS = np.array([1, 2, 3, 5])


def make(op: str, dtype: str, time: int = 3, dim: int = 64):
    """q, k, v, g, beta, a pool of 6 states, and the gate."""
    call = Call(op, "raw", batch=3, time=time, group=1, key_dim=dim, value_dim=dim)
    arrays, _ = inputs(call)
    main, more = main_and_rest(arrays)
    pool = jax.random.normal(jax.random.key(7), (6, 1, dim, dim)).astype(dtype)
    return main, pool, {"gate": more["gate"], "beta_max": 1.0, "qk_norm": True}


def padded(main, lengths):
    """Segment ids of rows of these lengths, and the arrays with NaN on the padding."""
    ids = (np.arange(main[0].shape[1]) < lengths[:, None]).astype(np.int32)
    real = lambda x: ids.reshape(*ids.shape, *[1] * (x.ndim - 2)) > 0
    return ids, [jnp.where(real(x), x, jnp.nan) for x in main]


def run(op, main, implementation="pallas", **rest):
    return getattr(jfla, f"recurrent_{op}")(
        *main, **rest, implementation=implementation
    )


def check(op: str, dtype: str, tolerance: float, **sizes):
    """Values against "xla"; what is not named keeps its bits, and padding is 0."""
    main, pool, options = make(op, dtype, **sizes)
    # the last bit of one implementation
    rounding = 8e-3 if dtype == "bfloat16" else tolerance
    pool = pool.at[OTHERS].set(jnp.nan)
    ids, dirty = padded(main, np.minimum(LENGTHS, main[0].shape[1]))
    for segment_ids, x in ((None, main), (ids, dirty)):
        options |= {
            "initial_state": pool,
            "state_slots": SLOTS,
            "segment_ids": segment_ids,
        }
        got = run(op, x, **options, return_final_state=True)
        want = run(op, x, "xla", **options, return_final_state=True)
        assert error(got.output, want.output) < OUTPUT
        assert got.final_state.dtype == dtype
        bits = lambda x: np.asarray(x).view(
            np.uint16 if dtype == "bfloat16" else np.uint32
        )
        np.testing.assert_array_equal(bits(got.final_state)[OTHERS], bits(pool)[OTHERS])
        named = SLOTS[[0, 2]]
        assert error(got.final_state[named], want.final_state[named]) < rounding
        assert not np.asarray(got.output[1], np.float32).any()
        only = run(op, x, **options)
        assert only.final_state is None
        np.testing.assert_array_equal(
            *(np.asarray(y.output, np.float32) for y in (got, only))
        )
        every = run(op, x, **options, return_states=True)
        last = np.asarray(every.final_state[:, -1], np.float32)
        np.testing.assert_array_equal(
            last[[0, 2]], np.asarray(got.final_state, np.float32)[named]
        )
        assert not last[1].any()
        assert every.final_state.shape == (*main[0].shape[:2], *pool.shape[1:])
        wanted = run(op, x, "xla", **options, return_states=True)
        assert error(every.final_state, wanted.final_state) < rounding
    assert not np.asarray(got.output, np.float32)[ids == 0].any()


@pytest.mark.parametrize(("op", "dtype"), [("kda", "bfloat16"), ("gdn", "float32")])
def test_a_pool(op, dtype):
    with jfla.pallas.interpret():
        check(op, dtype, STATE)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("op", ["kda", "gdn"])
def test_a_pool_on_a_gpu(op, dtype):
    for time in (1, 3, 8, 20):
        for dim in (64, 128, 256):
            check(op, dtype, STATE_ON_GPU, time=time, dim=dim)


def test_slots_that_there_are_not_are_idle():
    main, pool, options = make("gdn", "float32", time=1)
    step = jax.jit(
        lambda slots: run(
            "gdn",
            main,
            **options,
            initial_state=pool,
            state_slots=slots,
            return_final_state=True,
        )
    )
    with jfla.pallas.interpret():
        output, final = step(jnp.array([6, 5, -3]))
    assert not np.asarray(output, np.float32)[[0, 2]].any()
    np.testing.assert_array_equal(final[:5], pool[:5])
    assert not np.array_equal(final[5], pool[5])


@pytest.mark.parametrize("check_vma", [True, False])
def test_under_shard_map(check_vma):
    """Where the kernel may not be handed a reference, the rows go through states of their own."""
    main, pool, options = make("gdn", "float32", time=2)
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))

    def step(main, pool, slots):
        gate = jax.tree.map(jnp.asarray, options["gate"])
        rest = {"initial_state": pool, "state_slots": slots, "return_final_state": True}
        return tuple(run("gdn", main, **options | {"gate": gate}, **rest))

    spec = jax.sharding.PartitionSpec("x")
    with jfla.pallas.interpret():
        want = step(main, pool, SLOTS)
        got = jax.jit(
            jax.shard_map(
                step, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma
            )
        )(main, pool, jnp.asarray(SLOTS))
    same = lambda a, b: np.testing.assert_array_equal(
        *(np.asarray(x, np.float32) for x in (a, b))
    )
    jax.tree.map(same, got, want)


@pytest.mark.interpreted
def test_derivatives_are_those_of_the_definition():
    main, pool, options = make("gdn", "float32", time=1)

    def loss(pool, implementation):
        out = run(
            "gdn", main, implementation, **options, initial_state=pool, state_slots=SLOTS,
            return_final_state=True,
        )  # fmt: skip
        return jnp.sum(out.output.astype(jnp.float32)) + jnp.sum(out.final_state**2)

    with jfla.pallas.interpret():
        got, want = (jax.grad(loss)(pool, name) for name in ("pallas", "xla"))
    np.testing.assert_array_equal(got, want)


@pytest.mark.gpu
def test_a_donated_pool_is_written_in_place():
    main, pool, options = make("kda", "bfloat16")
    where = pool.unsafe_buffer_pointer()
    step = jax.jit(
        lambda pool, slots: (
            run(
                "kda",
                main,
                **options,
                initial_state=pool,
                state_slots=slots,
                return_final_state=True,
            ).final_state
        ),
        donate_argnums=0,
    )
    assert step(pool, jnp.asarray(SLOTS)).unsafe_buffer_pointer() == where


# More tokens than one launch takes.


@pytest.mark.parametrize(
    ("op", "time", "state"),
    [("gdn", 19, True), pytest.param("kda", 16, False, marks=pytest.mark.slow)],
)
def test_long_calls_give_the_bits_of_short_ones(op, time, state):
    arrays, rest = inputs(Call(op, "raw", time=time, group=1))
    main, more = main_and_rest(arrays)
    if not state:
        more.pop("initial_state")
    call = functools.partial(run, op, **more | rest)
    with jfla.pallas.interpret():
        whole = call(main)
        every = call(main, return_states=True)
        outputs, carried = [], more.get("initial_state")
        for first in range(0, time, 8):
            part = [x[:, first : first + 8] for x in main]
            output, carried = call(part, initial_state=carried)
            outputs.append(np.asarray(output))
    np.testing.assert_array_equal(
        np.asarray(whole.output), np.concatenate(outputs, axis=1)
    )
    np.testing.assert_array_equal(np.asarray(whole.final_state), np.asarray(carried))
    np.testing.assert_array_equal(np.asarray(every.output), np.asarray(whole.output))
    assert every.final_state.shape[:2] == (1, time)
    np.testing.assert_array_equal(
        np.asarray(every.final_state[:, -1]), np.asarray(carried)
    )


def test_a_long_call_rounds_a_bfloat16_state_at_its_ends_alone():
    arrays, rest = inputs(Call("gdn", "raw", time=10, group=1))
    main, more = main_and_rest(arrays)
    narrow = more.pop("initial_state").astype(jnp.bfloat16)
    call = functools.partial(run, "gdn", main, **more | rest)
    with jfla.pallas.interpret():
        got = call(initial_state=narrow)
        wide = call(initial_state=narrow.astype(jnp.float32))
    assert got.final_state.dtype == jnp.bfloat16
    np.testing.assert_array_equal(
        np.asarray(got.final_state), np.asarray(wide.final_state.astype(jnp.bfloat16))
    )


@pytest.mark.slow
def test_a_long_call_on_a_pool():
    with jfla.pallas.interpret():
        check("gdn", "bfloat16", STATE, time=10)
