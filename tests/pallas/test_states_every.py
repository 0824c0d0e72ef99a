"""The scan kernels with states along time: the bits of calls on the prefixes, and gradients through every state."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.kernel_cases import (
    TOLERANCE,
    Call,
    by_kernels,
    error,
    inputs,
    main_and_rest,
    scheduled,
)

import jfla

SLOW = pytest.mark.slow


def check_bits(call: Call, op, every: int) -> None:
    """States, and the output behind each of them, to the bit."""
    arrays, rest = inputs(call)
    main, more = main_and_rest(arrays)
    whole = op(*main, **more, return_states_every=every)
    plain = op(*main, **more, **rest)
    same = lambda a, b: np.testing.assert_array_equal(
        *(np.asarray(x, np.float32) for x in (a, b))
    )
    same(whole.output, plain.output)
    same(whole.final_state[:, -1], plain.final_state)
    number = -(-call.time // every)
    assert whole.final_state.shape == (call.batch, number, *plain.final_state.shape[1:])
    for i in range(number - 1):
        end = (i + 1) * every
        prefix = op(*(x[:, :end] for x in main), **more, **rest)
        same(whole.final_state[:, i], prefix.final_state)
        begun = more | {"initial_state": whole.final_state[:, i]}
        behind = op(*(x[:, end:] for x in main), **begun, **rest)
        same(behind.output, whole.output[:, end:])


def check_gradients(call: Call, op, every: int) -> None:
    """Against the definition in float64, of a functional of the output and all states."""
    arrays, rest = inputs(call)
    rest.pop("return_final_state")
    number = -(-call.time // every)
    states = (call.batch, number, call.value_heads, call.key_dim, call.value_dim)
    weight = jax.random.normal(jax.random.key(5), states)

    def by_states(arrays):
        main, more = main_and_rest(arrays)
        out = op(*main, **more, **rest, return_states_every=every)
        return jnp.sum(out.output.astype(jnp.float32)) + jnp.sum(
            weight * out.final_state
        )

    def by_prefixes(arrays):
        main, more = main_and_rest(arrays)
        recurrent = getattr(jfla.reference, f"recurrent_{call.op}")
        _, states = recurrent(*main, **more, **rest, return_states=True)
        ends = np.minimum(np.arange(1, number + 1) * every, call.time) - 1
        return jnp.sum(recurrent(*main, **more, **rest).output) + jnp.sum(
            weight * states[:, ends]
        )

    got = jax.grad(by_states)(arrays)
    with jax.enable_x64(True):
        exact = jax.tree.map(lambda x: x.astype(jnp.float64), arrays)
        want = jax.grad(by_prefixes)(exact)
        over = {
            name: found
            for name in want
            if not (found := error(got[name], want[name])) <= TOLERANCE[name]
        }
    assert not over


@pytest.mark.parametrize(
    ("call", "every"),
    [
        (Call("gdn", "strong", time=100, group=1), 64),
        pytest.param(Call("kda", "strong", time=150, group=1), 64, marks=SLOW),
        pytest.param(Call("gdn", "weak", time=330, batch=2), 128, marks=SLOW),
    ],
    ids=str,
)
def test_bits(call, every):
    with jfla.pallas.interpret():
        check_bits(call, by_kernels(call.op), every)


@pytest.mark.parametrize(
    "call",
    [
        Call("gdn", "weak", time=100, group=1),
        pytest.param(Call("kda", "weak", time=150, group=1), marks=SLOW),
        pytest.param(Call("gdn", "weak", time=150, group=1, key_dim=256), marks=SLOW),
    ],
    ids=str,
)
def test_gradients(call):
    check_gradients(call, scheduled(call.op, time_splits=1), 64)


@pytest.mark.gpu
@pytest.mark.parametrize("op", ["kda", "gdn"])
def test_on_a_gpu(op):
    for batch, time in ((1, 1000), (8, 500), (1, 4096)):
        call = Call(
            op, "weak", batch=batch, time=time, heads=4, key_dim=128, value_dim=128
        )
        check_gradients(call, by_kernels(op), 128)
        if time < 4096:  # there time is split where only the last state is wanted
            check_bits(call, by_kernels(op), 128)


@pytest.mark.gpu
def test_a_large_call_on_a_gpu():
    """Where the chunks are prepared beside the scan."""
    call = Call(
        "gdn", "strong", batch=2, time=4096, heads=8, key_dim=128, value_dim=128
    )
    check_bits(call, by_kernels("gdn"), 2048)
