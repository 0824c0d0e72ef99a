"""States at boundaries of blocks of tokens: those of the prefixes to the bit, going on from them, gradients.

Bits are compared for given decays. XLA's vectorised gates and norms differ in the last one with the length of a call.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.cases import TOKENS, Config, Style, draw

import jfla

OPS = pytest.mark.parametrize("op", ["kda", "gdn"])
SIZES = [(300, 128), (256, 128), (130, 64), (100, 192), (577, 64)]


def make(op: str, time: int, state: bool = True, gate: str | None = None):
    """The five arrays, and the keyword arguments of a call, in float32."""
    config = Config(op, time=time, batch=2, heads=1, group=2, state=state, gate=gate)
    x, _, _ = draw(config, Style(3))
    rest = {}
    if gate is not None:
        rest["gate"] = jfla.SoftplusGate(x["a_log"], x["dt_bias"])
    if state:
        rest["initial_state"] = x["initial_state"]
    main = [x[name] for name in TOKENS]
    return jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), (main, rest))


def chunked(op: str, main, rest, **options):
    return getattr(jfla, f"chunk_{op}")(*main, **rest, **options, implementation="xla")


@pytest.mark.parametrize(
    ("op", "time", "every"),
    [
        ("kda", *SIZES[0]),
        *(("gdn", *x) for x in SIZES[:4]),
        pytest.param("gdn", *SIZES[4], marks=pytest.mark.slow),
    ],
)
def test_states_are_the_final_states_of_the_prefixes(op, time, every):
    main, rest = make(op, time, state=time != 100)
    got = chunked(op, main, rest, return_states_every=every)
    plain = chunked(op, main, rest, return_final_state=True)
    assert got.final_state.shape == (2, -(-time // every), 2, 8, 4)
    assert got.final_state.dtype == jnp.float32
    np.testing.assert_array_equal(got.output, plain.output)
    np.testing.assert_array_equal(got.final_state[:, -1], plain.final_state)
    for i in range(got.final_state.shape[1]):
        prefix = [x[:, : (i + 1) * every] for x in main]
        want = chunked(op, prefix, rest, return_final_state=True).final_state
        np.testing.assert_array_equal(got.final_state[:, i], want)


@OPS
def test_another_prefill_goes_on_from_any_of_them(op):
    """A cached prefix: the tokens behind it give the bits that they gave."""
    main, rest = make(op, 300)
    whole = chunked(op, main, rest, return_states_every=64)
    for i in (0, 3):
        behind = [x[:, (i + 1) * 64 :] for x in main]
        begun = rest | {"initial_state": whole.final_state[:, i]}
        got = chunked(op, behind, begun, return_final_state=True)
        np.testing.assert_array_equal(got.output, whole.output[:, (i + 1) * 64 :])
        np.testing.assert_array_equal(got.final_state, whole.final_state[:, -1])


@pytest.mark.parametrize(
    ("op", "home"),
    [
        ("kda", jfla),
        pytest.param("gdn", jfla, marks=pytest.mark.slow),
        pytest.param("gdn", jfla.reference, marks=pytest.mark.slow),
    ],
)
def test_derivatives_go_through_every_state(op, home):
    with jax.enable_x64(True):
        main, rest = jax.tree.map(
            lambda x: jnp.asarray(x, jnp.float64), make(op, 200, gate="softplus")
        )
        options = {"beta_max": 1.0, "qk_norm": True}
        weight = jax.random.normal(jax.random.key(0), (2, 4, 2, 8, 4))
        run = functools.partial(getattr(home, f"chunk_{op}"), **options)

        def arguments(x):
            main, gate, state = x
            return main, {"gate": gate, "initial_state": state}

        def every(x):
            main, rest = arguments(x)
            out = run(*main, **rest, return_states_every=64)
            return jnp.sum(weight * out.final_state) + jnp.sum(jnp.sin(out.output))

        def prefixes(x):
            main, rest = arguments(x)
            recurrent = functools.partial(
                getattr(jfla.reference, f"recurrent_{op}"), **options
            )
            total = jnp.sum(jnp.sin(recurrent(*main, **rest).output))
            for i, end in enumerate((64, 128, 192, 200)):
                out = recurrent(
                    *(x[:, :end] for x in main), **rest, return_final_state=True
                )
                total += jnp.sum(weight[:, i] * out.final_state)
            return total

        x = (main, rest["gate"], rest["initial_state"])
        got, want = (jax.jit(jax.grad(f))(x) for f in (every, prefixes))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-10), got, want
    )


def test_states_come_in_the_dtype_that_is_asked_for():
    main, rest = make("gdn", 130)
    wide = chunked("gdn", main, rest, return_states_every=64)
    narrow = chunked(
        "gdn", main, rest, return_states_every=64, state_dtype=jnp.bfloat16
    )
    np.testing.assert_array_equal(
        narrow.final_state, wide.final_state.astype(jnp.bfloat16)
    )


@pytest.mark.parametrize("every", [0, 32, 63, 96, -64, 64.0, True, "64"])
@OPS
def test_what_is_no_multiple_of_64_is_refused(op, every):
    main, rest = make(op, 70)
    message = (
        f"return_states_every must be None or a static multiple of 64, got {every!r}"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        chunked(op, main, rest, return_states_every=every)


@OPS
def test_what_it_cannot_go_with(op):
    main, rest = make(op, 70, state=False)
    ids = np.ones((2, 70), np.int32)
    message = r"return_states_every must be None with segment_ids \(it takes one sequence per row\), got 64"
    with pytest.raises(ValueError, match=message):
        chunked(op, main, rest, return_states_every=64, segment_ids=ids)
    for home in (jfla, jfla.reference):
        with pytest.raises(TypeError, match="return_states_every"):
            getattr(home, f"recurrent_{op}")(*main, return_states_every=64)
    with pytest.raises(TypeError, match="state_slots"):
        getattr(jfla.reference, f"chunk_{op}")(*main, state_slots=ids[:, 0])
