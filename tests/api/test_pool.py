"""Pools of states: rows read and write the slots that they name, and nothing else, whatever the order of calls."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jfla

B, T, P, K, V = 3, 4, 6, 4, 3
OPTIONS = {"beta_max": 2.0, "qk_norm": True, "implementation": "xla"}
OPS = pytest.mark.parametrize("op", ["kda", "gdn"])


def draw(op: str, seed: int = 0, batch: int = B, time: int = T):
    """q, k, v, g, beta of one head."""
    rng = np.random.default_rng(seed)
    shape = (batch, time, 1)
    q, k = rng.standard_normal((2, *shape, K), np.float32)
    v = rng.standard_normal((*shape, V), np.float32)
    g = -rng.random((*shape, K) if op == "kda" else shape, np.float32)
    return [q, k, v, g, rng.standard_normal(shape, np.float32)]


def make_pool(seed: int = 1, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), (P, 1, K, V)).astype(dtype)


def recurrent(op: str):
    return functools.partial(getattr(jfla, f"recurrent_{op}"), **OPTIONS)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@OPS
def test_rows_read_and_write_their_slots(op, dtype):
    main, pool, slots = draw(op), make_pool(dtype=dtype), np.array([4, -1, 0])
    run = recurrent(op)
    got = run(*main, initial_state=pool, state_slots=slots, return_final_state=True)
    alone = run(*main, initial_state=pool[np.array([4, 1, 0])], return_final_state=True)
    assert got.final_state.dtype == dtype
    for row in (0, 2):
        np.testing.assert_array_equal(got.output[row], alone.output[row])
        np.testing.assert_array_equal(
            got.final_state[slots[row]], alone.final_state[row]
        )
    assert not np.asarray(got.output[1]).any()
    others = np.array([1, 2, 3, 5])
    np.testing.assert_array_equal(got.final_state[others], pool[others])
    assert run(*main, initial_state=pool, state_slots=slots).final_state is None


@OPS
def test_rows_of_different_lengths(op):
    """Padding may hold NaN, and so may a state that nobody names."""
    main, slots = draw(op), np.array([3, 5, 2])
    pool = make_pool().at[np.array([0, 1, 4])].set(jnp.nan)
    lengths = np.array([2, 0, 4])
    ids = (np.arange(T) < lengths[:, None]).astype(np.int32)
    dirty = [
        np.where(ids.reshape(B, T, *[1] * (x.ndim - 2)) > 0, x, np.nan) for x in main
    ]
    run = recurrent(op)
    rest = {"initial_state": pool, "state_slots": slots, "segment_ids": ids}
    got = run(*dirty, **rest, return_final_state=True)
    every = run(*dirty, **rest, return_states=True)
    np.testing.assert_array_equal(
        got.final_state[np.array([0, 1, 4])], pool[np.array([0, 1, 4])]
    )
    for row, n in enumerate(lengths):
        assert not np.asarray(got.output[row, n:]).any()
        assert every.final_state.shape == (B, T, 1, K, V)
        np.testing.assert_array_equal(
            every.final_state[row, -1], got.final_state[slots[row]]
        )
        if n:
            one = [x[row : row + 1, :n] for x in main]
            alone = run(
                *one, initial_state=pool[slots[row]][None], return_final_state=True
            )
            np.testing.assert_allclose(
                got.output[row, :n], alone.output[0], rtol=1e-6, atol=1e-7
            )
            np.testing.assert_allclose(
                got.final_state[slots[row]], alone.final_state[0], rtol=1e-6, atol=1e-7
            )
        else:
            np.testing.assert_array_equal(got.final_state[slots[row]], pool[slots[row]])


@pytest.mark.parametrize(
    "slots",
    [
        np.array([250, 5, 6], np.uint8),
        np.array([-100, 5, 127], np.int8),
        np.array([2**32 - 1, 5, 2**31], np.uint32),
        np.array([2**33 + 1, 5, -(2**40)], np.int64),
    ],
    ids=lambda x: str(x.dtype),
)
def test_slots_that_there_are_not_are_idle_where_nobody_can_look(slots):
    main, pool = draw("gdn"), make_pool()

    @jax.jit
    def run(slots):
        out = recurrent("gdn")(
            *main, initial_state=pool, state_slots=slots, return_final_state=True
        )
        accepted = jfla.accept(pool, jnp.ones((B, T, 1, K, V)), slots, jnp.full(B, 2))
        return *out, accepted

    with jax.enable_x64(slots.dtype == np.int64):
        output, final, accepted = run(jnp.asarray(slots))
    assert not np.asarray(output[np.array([0, 2])]).any()
    assert np.asarray(output[1]).any()
    for got in (final, accepted):
        np.testing.assert_array_equal(got[:5], pool[:5])
        assert not np.array_equal(got[5], pool[5])


@OPS
def test_derivatives_reach_the_named_slots_alone(op):
    main, pool, slots = draw(op), make_pool(), np.array([4, -1, 0])

    def loss(main, pool):
        out = recurrent(op)(
            *main, initial_state=pool, state_slots=slots, return_final_state=True
        )
        return jnp.sum(jnp.sin(out.output)) + jnp.sum(jnp.cos(out.final_state))

    def by_rows(main, pool):
        rows = np.array([0, 2])
        out = recurrent(op)(
            *(x[rows] for x in main),
            initial_state=pool[slots[rows]],
            return_final_state=True,
        )
        idle = jnp.sum(jnp.cos(pool[np.array([1, 2, 3, 5])]))
        return jnp.sum(jnp.sin(out.output)) + jnp.sum(jnp.cos(out.final_state)) + idle

    got, want = (jax.grad(f, argnums=(0, 1))(main, pool) for f in (loss, by_rows))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, want
    )


def test_accept_puts_back_the_state_behind_the_accepted_tokens():
    pool, slots = make_pool(), np.array([4, -1, 0])
    _, states = recurrent("kda")(
        *draw("kda"), initial_state=pool, state_slots=slots, return_states=True
    )
    got = jfla.accept(pool, states, slots, np.array([3, 2, 0]))
    want = pool.at[4].set(states[0, 2])
    np.testing.assert_array_equal(got, want)
    assert (
        jfla.accept(pool.astype(jnp.bfloat16), states, slots, [1, 1, 1]).dtype
        == jnp.bfloat16
    )


def test_a_donated_pool_is_given_away():
    """On every backend; what it becomes lies where it lay."""
    main, pool = draw("gdn"), make_pool()
    pool = jnp.array(pool)
    where = pool.unsafe_buffer_pointer()
    run = jax.jit(
        lambda pool, slots: (
            recurrent("gdn")(
                *main, initial_state=pool, state_slots=slots, return_final_state=True
            ).final_state
        ),
        donate_argnums=0,
    )
    pool = run(pool, np.array([1, 2, 3]))
    assert pool.unsafe_buffer_pointer() == where


RULES = [
    ({"state_slots": [0, 1, 2]}, "initial_state must be a pool [P, HV, K, V] with state_slots, got None"),
    ({"pool": (P, 1, V, K)}, "initial_state must be [P, HV, K, V] = [6, 1, 4, 3], got [6, 1, 3, 4]"),
    ({"pool": (0, 1, K, V)}, "initial_state must be [P, HV, K, V] = [1, 1, 4, 3], got [0, 1, 4, 3]"),
    ({"pool": ()}, "initial_state must be [P, HV, K, V] = [1, 1, 4, 3], got []"),
    ({"state_slots": [0, 1]}, "state_slots must be [B] = [3], got [2]"),
    ({"state_slots": [0.0, 1.0, 2.0]}, "state_slots must be integer, got float32"),
    ({"state_slots": [0, 1, P]}, "state_slots must be in 0 .. P - 1 = 5, or -1, got 6"),
    ({"state_slots": [0, -2, 3]}, "state_slots must be in 0 .. P - 1 = 5, or -1, got -2"),
    ({"state_slots": [-1, 2, 2]}, "state_slots must name a slot at most once, got 2 twice"),
    ({"num_segments": 2}, "num_segments must be None with state_slots, got 2"),
    ({"segment_ids": [[1, 1, 2, 2]] * 3}, "segment_ids must be at most num_segments = 1, got 2"),
    ({"segment_ids": [[0, 1, 1, 1]] * 3}, "with padding (0) only at the end, got 0 before 1"),
    ({"state_dtype": jnp.bfloat16}, "state_dtype must be None or the pool's float32 with state_slots, got bfloat16"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), RULES, ids=[m[:60] for _, m in RULES])
def test_what_does_not_fit_is_refused(change, message):
    arguments = {"state_slots": [0, 1, 2], "initial_state": make_pool()} | change
    if "pool" in change:
        arguments["initial_state"] = jnp.zeros(arguments.pop("pool"))
    if change == RULES[0][0]:
        del arguments["initial_state"]
    for home in (jfla, jfla.reference):
        with pytest.raises(ValueError, match=re.escape(message)):
            home.recurrent_gdn(*map(jnp.asarray, draw("gdn")), **arguments)


def test_chunked_ops_take_no_pool():
    for op in (jfla.chunk_kda, jfla.chunk_gdn):
        with pytest.raises(TypeError, match="state_slots"):
            op(
                *draw(op.__name__[-3:]),
                state_slots=[0, 1, 2],
                initial_state=make_pool(),
            )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"states": (B, T, 1, V, K)}, "states must be [B, T, ...] with the pool's [1, 4, 3], got [3, 4, 1, 3, 4]"),
        ({"states": (B, 1, K, V)}, "states must be [B, T, ...] with the pool's [1, 4, 3], got [3, 1, 4, 3]"),
        ({"state_slots": [0, 1]}, "state_slots must be integers [B] = [3], got int32[2]"),
        ({"num_accepted": [1.0, 1.0, 1.0]}, "num_accepted must be integers [B] = [3], got float32[3]"),
        ({"state_slots": [0, 1, P]}, "state_slots must be in 0 .. P - 1 = 5, or -1, got 6"),
        ({"state_slots": [1, 1, -1]}, "state_slots must name a slot at most once, got 1 twice"),
        ({"num_accepted": [0, T + 1, 1]}, "num_accepted must be in 0 .. T = 4, got 5"),
        ({"num_accepted": [-1, 0, 1]}, "num_accepted must be in 0 .. T = 4, got -1"),
    ],
)  # fmt: skip
def test_accept_refuses_what_does_not_fit(change, message):
    arguments = {
        "states": (B, T, 1, K, V),
        "state_slots": [0, 1, 2],
        "num_accepted": [1, 1, 1],
    }
    arguments |= change
    arguments["states"] = jnp.zeros(arguments["states"])
    with pytest.raises(ValueError, match=re.escape(message)):
        jfla.accept(make_pool(), **arguments)


class Model:
    """Slots as a dictionary of NumPy states, one token after the other; what is not occupied is not there."""

    def __init__(self) -> None:
        self.states: dict[int, np.ndarray] = {}

    def token(self, state, q, k, v, g, beta):
        """(state, output) after one token of one head."""
        q, k = (x / np.sqrt(np.sum(x * x) + 1e-6) for x in (q, k))
        state = state * np.exp(g)[..., None]
        error = 2.0 / (1 + np.exp(-beta)) * (v - state.T @ k)
        state = state + np.outer(k, error)
        return state, state.T @ q * K**-0.5

    def run(self, state, main, row, length):
        """(states after every token, outputs)."""
        states, outputs = [], []
        for t in range(length):
            token = [x[row, t, 0].astype(np.float64) for x in main]
            state, output = self.token(state, *token)
            states.append(state)
            outputs.append(output)
        return states, outputs


STEPS = 10_000


def test_ten_thousand_random_steps_against_a_plain_model():
    """Admit, decode, verify, evict. Free slots and padding hold NaN, and idle rows name slots that there are not.

    After every step the slots that it named are those of the model, and all others have the bits that they had.
    """
    rng = np.random.default_rng(0)
    op = recurrent("gdn")
    step = jax.jit(
        lambda main, pool, slots, ids: op(
            *main,
            initial_state=pool,
            state_slots=slots,
            segment_ids=ids,
            return_final_state=True,
        ),
        donate_argnums=1,
    )
    verify = jax.jit(
        lambda main, pool, slots, ids: op(
            *main,
            initial_state=pool,
            state_slots=slots,
            segment_ids=ids,
            return_states=True,
        )
    )
    prefill = jax.jit(lambda main: op(*main, return_states=True).final_state)
    accept = jax.jit(jfla.accept, donate_argnums=0)
    batches = [draw("gdn", seed) for seed in range(64)]
    model, pool = Model(), jnp.full((P, 1, K, V), jnp.nan)
    before = np.array(pool)
    done = dict.fromkeys(("admit", "decode", "verify", "evict"), 0)

    while sum(done.values()) < STEPS:
        main = batches[rng.integers(len(batches))]
        free = [slot for slot in range(P) if slot not in model.states]
        kind = rng.choice(
            ["admit", "decode", "decode", "decode", "verify", "verify", "evict"]
        )
        if (kind == "admit" and not free) or (kind != "admit" and not model.states):
            continue
        done[kind] += 1
        if kind == "evict":
            del model.states[int(rng.choice(list(model.states)))]
            continue
        candidates = free if kind == "admit" else list(model.states)
        rows = [int(x) for x in rng.permutation(candidates)[: rng.integers(1, B + 1)]]
        idle = [int(x) for x in rng.choice([-1, -7, P, 2 * P + 1], B - len(rows))]
        slots = np.array(rows + idle, np.int32)
        order = rng.permutation(B)
        slots = slots[order]
        lengths = rng.integers(1 if kind == "admit" else 0, T + 1, B)
        ids = (np.arange(T) < lengths[:, None]).astype(np.int32)
        real = ids.astype(bool) & ((slots >= 0) & (slots < P))[:, None]
        dirty = [
            np.where(real.reshape(B, T, *[1] * (x.ndim - 2)), x, np.nan) for x in main
        ]
        if kind == "admit":
            pool = accept(pool, prefill(main), slots, lengths)
        elif kind == "decode":
            output, pool = step(dirty, pool, slots, ids)
        else:
            output, states = verify(dirty, pool, slots, ids)
            np.testing.assert_array_equal(np.array(pool), before)
            taken = rng.integers(0, lengths + 1)
            pool = accept(pool, states, slots, taken)
        after = np.array(pool)
        for row, slot in enumerate(slots):
            if not 0 <= slot < P:
                assert kind == "admit" or not np.asarray(output[row]).any()
                continue
            first = np.zeros((K, V)) if kind == "admit" else model.states[slot]
            states_of_row, outputs = model.run(first, main, row, lengths[row])
            if kind != "admit":
                assert not np.asarray(output[row, lengths[row] :]).any()
                if outputs:
                    np.testing.assert_allclose(
                        output[row, : lengths[row], 0], outputs, atol=2e-5
                    )
            kept = taken[row] if kind == "verify" else lengths[row]
            model.states[slot] = states_of_row[kept - 1] if kept else first
            np.testing.assert_allclose(after[slot, 0], model.states[slot], atol=2e-5)
            # The model goes on from the same numbers, so that errors do not add up over 10,000 steps.
            model.states[slot] = after[slot, 0].astype(np.float64)
        untouched = [slot for slot in range(P) if slot not in slots]
        np.testing.assert_array_equal(after[untouched], before[untouched])
        before = after
    assert min(done.values()) > STEPS / 20
