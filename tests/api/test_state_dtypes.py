"""States of bfloat16: what comes back in which dtype, that only the ends are rounded, derivatives, and the drift."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.kernel_cases import Call, error, inputs, main_and_rest

import jfla
from jfla.pallas.heuristics import HOPPER_SMS

BF16 = jnp.bfloat16
FORMS = ["chunk_kda", "chunk_gdn", "recurrent_kda", "recurrent_gdn"]


def make(form: str, **sizes):
    """The five arrays, the initial state in bfloat16, and the other keyword arguments."""
    sizes = {"time": 70 if form.startswith("chunk") else 3, "dtype": "float32"} | sizes
    arrays, rest = inputs(Call(form[-3:], "raw", batch=2, **sizes))
    main, more = main_and_rest(arrays)
    return main, more.pop("initial_state").astype(BF16), more | rest


def same(a, b):
    np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


@pytest.mark.parametrize(
    ("home", "form"),
    [(home, form) for home, form in zip([jfla, jfla.reference] * 2, FORMS)],
)
def test_only_the_ends_are_rounded(home, form):
    main, state, rest = make(form)
    op = getattr(home, form)
    wide = op(*main, initial_state=state.astype(jnp.float32), **rest)
    narrow = op(*main, initial_state=state, **rest)
    assert (wide.final_state.dtype, narrow.final_state.dtype) == (jnp.float32, BF16)
    same(narrow.output, wide.output)
    same(narrow.final_state, wide.final_state.astype(BF16))


@pytest.mark.parametrize("form", FORMS)
def test_state_dtype_says_what_comes_back(form):
    main, state, rest = make(form)
    op = getattr(jfla, form)
    wide = op(*main, initial_state=state, **rest, state_dtype=jnp.float32)
    narrow = op(
        *main, initial_state=state.astype(jnp.float32), **rest, state_dtype="bfloat16"
    )
    fresh = op(*main, **rest, state_dtype=BF16)
    assert wide.final_state.dtype == jnp.float32
    assert narrow.final_state.dtype == fresh.final_state.dtype == BF16
    same(narrow.final_state, wide.final_state.astype(BF16))
    if form.startswith("recurrent"):
        every = op(*main, initial_state=state, **rest, return_states=True)
        assert every.final_state.dtype == BF16
        same(every.final_state[:, -1], narrow.final_state)


@pytest.mark.parametrize("form", FORMS[1:3])
def test_gradients_have_the_dtype_of_the_state(form):
    main, state, rest = make(form)
    op = getattr(jfla, form)

    def loss(state):
        out = op(*main, initial_state=state, **rest)
        return jnp.sum(out.output) + jnp.sum(
            jnp.cos(out.final_state.astype(jnp.float32))
        )

    got = jax.grad(loss)(state)
    want = jax.grad(loss)(state.astype(jnp.float32))
    assert got.dtype == BF16
    assert error(got, want) < 1e-2


def test_a_state_per_segment():
    main, _, rest = make("chunk_kda")
    states = jax.random.normal(jax.random.key(0), (2, 3, 2, 64, 64)).astype(BF16)
    ids = jnp.asarray(np.repeat([1, 2, 3, 0], [30, 20, 10, 10])[None].repeat(2, 0))
    run = lambda states: jfla.chunk_kda(
        *main, initial_state=states, segment_ids=ids, **rest
    )
    same(
        run(states).final_state,
        run(states.astype(jnp.float32)).final_state.astype(BF16),
    )


def test_float64_stays():
    main, state, rest = make("recurrent_gdn")
    with jax.enable_x64(True):
        main = [x.astype(jnp.float64) for x in main]
        out = jfla.recurrent_gdn(*main, initial_state=state.astype(jnp.float32), **rest)
        assert out.final_state.dtype == jnp.float64
        narrow = jfla.recurrent_gdn(*main, initial_state=state, **rest)
        assert narrow.final_state.dtype == BF16


@pytest.mark.parametrize(
    ("form", "state_dtype"),
    [
        *((form, "bfloat16") for form in FORMS),
        ("recurrent_gdn", "float32"),
        pytest.param("chunk_kda", "float32", marks=pytest.mark.slow),
        pytest.param("chunk_gdn", "float32", marks=pytest.mark.slow),
    ],
)
def test_kernels(form, state_dtype):
    """They read the narrow state, and round the wide one once: at most to the neighbour of what "xla" rounds to."""
    time = {"time": 64 if form.startswith("chunk") else 2, "dtype": "bfloat16"}
    main, state, rest = make(form, **time)
    op = getattr(jfla, form)
    rest["state_dtype"] = state_dtype
    with jfla.pallas.interpret():
        got = op(*main, initial_state=state, **rest, implementation="pallas")
        wide = op(
            *main, initial_state=state.astype(jnp.float32), **rest | {"state_dtype": "float32"},
            implementation="pallas",
        )  # fmt: skip
    assert got.final_state.dtype == state_dtype
    same(got.output, wide.output)
    same(got.final_state, wide.final_state.astype(state_dtype))


def test_the_decode_kernel_writes_every_state_in_bfloat16():
    main, state, rest = make("recurrent_kda", time=2)
    rest |= {"initial_state": state, "implementation": "pallas"}
    with jfla.pallas.interpret():
        last = jfla.recurrent_kda(*main, **rest)
        every = jfla.recurrent_kda(*main, **rest | {"return_states": True})
    assert every.final_state.dtype == BF16
    same(every.final_state[:, -1], last.final_state)
    same(every.output, last.output)


@pytest.mark.slow
def test_the_backward_kernels_take_a_bfloat16_state():
    main, state, rest = make("chunk_gdn", time=64, dtype="bfloat16")

    def grad(implementation):
        def loss(state):
            out = jfla.chunk_gdn(
                *main, initial_state=state, **rest, implementation=implementation
            )
            return jnp.sum(out.output.astype(jnp.float32)) + jnp.sum(out.final_state)

        return jax.grad(loss)(state)

    with jfla.pallas.interpret():
        got = grad("pallas")
    assert got.dtype == BF16
    assert error(got, grad("xla")) < 1e-2


def test_explain_takes_bfloat16_states():
    x = jax.ShapeDtypeStruct((1, 4, 2, 64), BF16)
    beta = jax.ShapeDtypeStruct((1, 4, 2), jnp.float32)
    state = jax.ShapeDtypeStruct((1, 2, 64, 64), BF16)
    with jfla.pallas.compiling_for("9.0", HOPPER_SMS):
        for op in (jfla.chunk_gdn, jfla.recurrent_gdn):
            choice = jfla.explain(op, x, x, x, beta, beta, initial_state=state)
            assert choice.implementation == "pallas"
