"""What holds to the bit and what holds between calls: causality, neighbours, padding, packing, halves, long inputs."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.cases import TOKENS, Config, Style, call, compiled, draw, errors, evaluate

# One compile each: packed on the fixed grid, packed with a state per segment, and one sequence per row.
FIXED = Config(
    "kda",
    batch=2,
    time=130,
    group=2,
    gate="softplus",
    beta_max=1.0,
    segments=4,
    dtype="float32",
)
ALIGNED = Config(
    "gdn",
    batch=2,
    time=130,
    group=2,
    gate="sigmoid",
    segments=4,
    state=True,
    final=True,
    dtype="float32",
)
WHOLE = Config("kda", batch=2, time=130, state=True, final=True, dtype="float32")
WHOLE_GDN = dataclasses.replace(WHOLE, op="gdn", group=2)
ALL = pytest.mark.parametrize("config", [FIXED, ALIGNED, WHOLE, WHOLE_GDN], ids=str)
FORMS = pytest.mark.parametrize("form", ["chunk", "recurrent"])


def make(config: Config, style: Style = Style()):  # noqa: B008
    x, ids, cotangents = draw(config, style)
    as_float32 = lambda arrays: {name: np.float32(a) for name, a in arrays.items()}
    return as_float32(x), ids, as_float32(cotangents)


def run(config: Config, form: str, x, ids, cotangents) -> dict[str, np.ndarray]:
    return {
        name: np.asarray(a)
        for name, a in compiled(config, form, form == "chunk")(
            x, ids, cotangents
        ).items()
    }


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


@ALL
@FORMS
def test_the_same_call_gives_the_same_bits(config, form):
    first, second = (run(config, form, *make(config)) for _ in range(2))
    assert all(same_bits(first[name], second[name]) for name in first)


@ALL
@FORMS
def test_a_batch_neighbour_changes_no_bit(config, form):
    x, ids, cotangents = make(config)
    alone = run(config, form, x, ids, cotangents)
    other, other_ids, _ = make(config, Style(1, gates=("wide", "none"), run=16))
    mixed_ids = None if ids is None else np.stack([ids[0], other_ids[1]])
    for size in (1, 1e4, np.nan):
        other |= {"v": size * other["v"]}
        mixed = {
            name: a
            if name in ("a_log", "dt_bias")
            else np.stack([a[0], other[name][1]])
            for name, a in x.items()
        }
        beside = run(config, form, mixed, mixed_ids, cotangents)
        assert not same_bits(alone["output"][1], beside["output"][1])
        for name in alone.keys() - {
            "da_log",
            "ddt_bias",
        }:  # those are sums over the batch
            assert same_bits(alone[name][0], beside[name][0]), name


@ALL
@FORMS
def test_the_past_does_not_see_the_future(config, form):
    """Whatever changes after t, segment ids too, o[:t+1] has the same bits: inside a chunk and across its boundary."""
    x, ids, cotangents = make(config)
    before = run(config, form, x, ids, cotangents)["output"]
    for t in (0, 1, 14, 15, 16, 31, 47, 62, 63, 64, 65, 95, 127, 128):
        gates = ("extreme",) if t % 2 else ("none", "strong")
        future, future_ids, _ = make(
            config, Style(t + 2, gates=gates, repeated_keys=True)
        )
        changed = dict(x)
        for name in TOKENS:
            size = 1e4 if name == "v" else 1
            changed[name] = np.concatenate(
                [x[name][:, : t + 1], size * future[name][:, t + 1 :]], axis=1
            )
        changed_ids = (
            None
            if ids is None
            else np.where(np.arange(config.time) <= t, ids, np.maximum(future_ids, ids))
        )
        after = run(config, form, changed, changed_ids, cotangents)["output"]
        assert same_bits(before[:, : t + 1], after[:, : t + 1]), t
        assert not same_bits(before[:, t + 1 :], after[:, t + 1 :])


PACKED = pytest.mark.parametrize("config", [FIXED, ALIGNED], ids=str)


@PACKED
@FORMS
def test_padding_is_nothing(config, form):
    """NaN in the inputs and in the cotangent there leaks into no bit; output and gradients there are exactly 0."""
    x, ids, cotangents = make(config)
    ends = np.array([[121], [70]])
    ids = np.where(
        np.arange(config.time) < ends,
        np.maximum.accumulate(np.maximum(ids, 1), axis=1),
        0,
    )
    padding = ids == 0
    clean = run(config, form, x, ids, cotangents)
    for poison in (np.nan, np.inf):
        dirty = {name: a.copy() for name, a in x.items()}
        for name in TOKENS:
            dirty[name][padding] = poison
        dirty_cotangents = cotangents | {"output": cotangents["output"].copy()}
        dirty_cotangents["output"][padding] = poison
        got = run(config, form, dirty, ids, dirty_cotangents)
        assert all(same_bits(clean[name], got[name]) for name in clean)
    for name in ("output", *(f"d{name}" for name in TOKENS)):
        assert (clean[name][padding] == 0).all()
        assert np.isfinite(clean[name]).all()
        assert np.abs(clean[name][~padding]).max() > 0


@FORMS
def test_a_row_of_nothing_but_padding(form):
    x, ids, cotangents = make(ALIGNED)
    ids = np.stack([ids[0], np.zeros_like(ids[1])])
    got = run(ALIGNED, form, x, ids, cotangents)
    assert same_bits(got["final_state"][1], x["initial_state"][1])
    assert same_bits(got["dinitial_state"][1], cotangents["final_state"][1])
    assert all(
        (got[name][1] == 0).all()
        for name in ("output", "dq", "dk", "dv", "dg", "dbeta")
    )


@pytest.mark.parametrize("op", ["kda", "gdn"])
def test_packed_equals_looped(op):
    """Outputs, states and gradients of packed sequences are those of each alone, of lengths 1, 0, 64 and 40."""
    lengths = [1, 0, 64, 40]
    packed = Config(op, batch=1, time=110, segments=4, state=True, final=True)
    x, _, cotangents = draw(packed, Style(4, gates=("usual", "empty")))
    ids = np.concatenate(
        [np.full(n, i + 1) for i, n in enumerate(lengths)] + [np.zeros(5, int)]
    )[None]
    got = evaluate(packed, "chunk", x, ids, cotangents)
    start = 0
    for segment, length in enumerate(lengths):
        here, end = slice(start, start + length), start + length
        states = {
            name: a[:, segment]
            for name, a in (x | cotangents).items()
            if name.endswith("state")
        }
        one = {name: x[name][:, here] for name in TOKENS} | {
            "initial_state": states["initial_state"]
        }
        alone = dataclasses.replace(packed, time=length, segments=None)
        if length == 0:
            assert same_bits(got["final_state"][:, segment], states["initial_state"])
            assert same_bits(got["dinitial_state"][:, segment], states["final_state"])
            continue
        d = {
            "output": cotangents["output"][:, here],
            "final_state": states["final_state"],
        }
        want = evaluate(alone, "recurrent", one, None, d)
        cut = {
            name: a[:, segment] if name.endswith("state") else a[:, here]
            for name, a in got.items()
        }
        wrong = {name: e for name, e in errors(cut, want).items() if not e <= 1e-12}
        assert not wrong, length
        start = end


@pytest.mark.parametrize("op", ["kda", "gdn"])
def test_two_halves_with_the_state_handed_over_equal_the_whole(op):
    """Also when the second goes token by token: prefill, then decode. Values, and gradients through the state."""
    config = Config(
        op,
        batch=1,
        time=130,
        group=2,
        gate="softplus",
        qk_norm=True,
        state=True,
        final=True,
    )
    half = dataclasses.replace(config, time=65)
    x, _, cotangents = draw(config, Style(6))
    whole = evaluate(config, "recurrent", x, None, cotangents)
    second_form = "chunk" if op == "gdn" else "recurrent"

    def halves(x):
        parts = [
            x | {name: x[name][:, cut] for name in TOKENS}
            for cut in (slice(0, 65), slice(65, None))
        ]
        first = call(half, "chunk", parts[0], None)
        second = call(
            half, second_form, parts[1] | {"initial_state": first.final_state}, None
        )
        return {
            "output": jnp.concatenate([first.output, second.output], 1),
            "final_state": second.final_state,
        }

    def both(x, cotangents):
        out, adjoint = jax.vjp(halves, x)
        return out | {f"d{name}": a for name, a in adjoint(cotangents)[0].items()}

    with jax.enable_x64(True):
        got = jax.jit(both)(*(jax.tree.map(jnp.asarray, a) for a in (x, cotangents)))
        got = {name: np.asarray(a) for name, a in got.items()}
    wrong = {name: e for name, e in errors(got, whole).items() if not e <= 1e-12}
    assert not wrong


def test_a_hundred_thousand_tokens():
    """Nothing builds up: with weak gates and none, float32 stays with float64."""
    config = Config(
        "kda",
        batch=1,
        time=100_000,
        key_dim=8,
        value_dim=4,
        final=True,
        dtype="float32",
    )
    x, ids, cotangents = draw(config, Style(8, gates=("weak", "none", "usual"), run=16))
    got = evaluate(config, "chunk", x, ids, cotangents)
    want = evaluate(
        dataclasses.replace(config, dtype="float64"), "recurrent", x, ids, cotangents
    )
    wrong = {
        name: e
        for name, e in errors(got, want).items()
        if not e <= (1e-4 if name.startswith("d") else 1e-5)
    }
    assert not wrong
