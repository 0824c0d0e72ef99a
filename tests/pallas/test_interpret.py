"""The kernels on the CPU, in interpret mode with race detection: values and gradients against the recurrence."""

import functools
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

import jfla
from jfla.pallas import _config, _jobs, _patterns
from jfla.pallas._launch import launch
from jfla.pallas._walk import WalkConfig
from pallas.kernels import TOLERANCE, Call, check, inputs, results

CALLS = [
    Call("kda", "strong", key_dim=128),
    Call("kda", "raw", time=64, key_dim=128),
    Call("kda", "mixed", segments=4, betas="edge"),
    Call("gdn", "strong", key_dim=128, dtype="float16"),
    Call("gdn", "raw", segments=4, value_dim=128),
    Call("gdn", "mixed", time=65, betas="edge", repeated_keys=True),
    Call("gdn", "raw", time=70, key_dim=256, value_dim=256),  # in parts of K and of V
    pytest.param(Call("kda", "raw", time=64, value_dim=256), marks=pytest.mark.slow),
]


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_values_and_gradients(call, monkeypatch):
    if call.op == "kda" or call.value_dim == 64:
        monkeypatch.setattr(_config, "MULTIPROCESSORS", 1)  # one program takes several chunks, and all of V
    with jfla.pallas.interpret():
        check(call, implementation="pallas")


def test_an_array_that_a_kernel_is_given_twice_goes_in_once():
    def kernel(a: Any, b: Any, c: Any, out: Any, _: Any) -> None:
        out[...] = a[...] + 2 * b[...] + 4 * c[...]

    x, y = (jax.random.normal(jax.random.key(seed), (64,)) for seed in range(2))
    shape, once = jax.ShapeDtypeStruct(x.shape, x.dtype), {"n": 1}
    run = lambda x, y: launch(kernel, (x, y, x), out_type=shape, grid=once, warpgroups=1, name="sum_of_three")
    with jfla.pallas.interpret():
        (call,) = jax.make_jaxpr(run)(x, y).eqns
        assert len(call.invars) == 2
        np.testing.assert_allclose(run(x, y), 5 * x + 2 * y, rtol=1e-6)


@pytest.mark.parametrize("op", ["kda", "gdn"])
def test_preparing_beside_the_scan_gives_the_same_bits(op, monkeypatch):
    """Without races, which interpret mode sees between programs; and what waits for stores before it tells of them."""
    told, waited = [], []

    def tell(self: _jobs.Handover, _: Any) -> None:
        told.append(self.made)
        plgpu.wait_smem_to_gmem(0)

    monkeypatch.setattr(_jobs, "_semaphores", lambda chunks: chunks)
    monkeypatch.setattr(_jobs.Handover, "tell", tell)
    monkeypatch.setattr(_jobs.Handover, "wait", lambda self, _: waited.append(self.made))
    arrays, _ = inputs(Call(op, time=300, key_dim=128, value_dim=128))

    def run(programs: int) -> jfla.DeltaRuleOutput:
        monkeypatch.setattr(_config, "beside_config", lambda *_: (WalkConfig(v_block=64), programs))
        call = functools.partial(getattr(jfla, f"chunk_{op}"), return_final_state=True, implementation="pallas")
        with jfla.pallas.interpret():
            return call(*(arrays[name] for name in ("q", "k", "v", "g", "beta")))

    alone = run(0)
    assert (1, 2, 5) not in told
    jax.clear_caches()
    beside = run(2)
    assert (1, 2, 5) in told
    assert (1, 2, 5) in waited
    np.testing.assert_array_equal(alone.output.astype("float32"), beside.output.astype("float32"))
    np.testing.assert_array_equal(alone.final_state, beside.final_state)


@pytest.mark.parametrize("segments", [0, pytest.param(1, marks=pytest.mark.slow)])  # with segments no state is given
def test_parts_of_time_walked_side_by_side_give_the_same(segments, monkeypatch):
    monkeypatch.setattr(_config, "scan_parts", lambda *_: 3)
    with jfla.pallas.interpret():
        check(Call("gdn", "weak", time=300, segments=segments), implementation="pallas")


@pytest.mark.parametrize(
    ("heads", "time", "parts"),
    [(32, 65536, 1), (8, 65536, 4), (1, 65536, 16), (8, 3072, 3), (8, 2048, 1), (22, 9999, 1)],
)
def test_time_is_split_where_most_of_the_gpu_would_be_idle(heads, time, parts):
    assert _config.scan_parts(128, 128, heads, time // 64) == parts


@pytest.mark.parametrize("segments", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_stretches_of_time_one_after_the_other_give_the_same(segments, monkeypatch):
    monkeypatch.setattr(_config, "stretches", lambda *_: 2)
    with jfla.pallas.interpret():
        check(Call("gdn", "weak", time=250, group=1, segments=segments), implementation="pallas")


@pytest.mark.parametrize(
    ("op", "key_dim", "heads", "time", "stretches"),
    [
        ("gdn", 128, 32, 8192, 4),
        ("gdn", 128, 32, 65536, 4),
        ("kda", 128, 32, 8192, 0),
        ("gdn", 256, 32, 8192, 0),
        ("gdn", 128, 16, 8192, 0),  # few states
        ("gdn", 128, 256, 4096, 0),  # short stretches
        ("gdn", 128, 32, 8256, 0),
    ],
)
def test_stretches_are_for_many_states(op, key_dim, heads, time, stretches):
    assert _config.stretches(op, key_dim, 128, heads, time // 64) == stretches


@pytest.mark.parametrize("factor", [0.5, 1e3])
def test_causal_to_the_bit(factor):
    """Also where a later token's gate is so strong that its rows, and only they, take the exact form."""
    arrays, _ = inputs(Call("kda", time=64))
    at = 21
    changed = {name: arrays[name].at[:, at:].set(arrays[name][:, :1] * 0.5) for name in ("q", "k", "v", "g", "beta")}
    changed["g"] = changed["g"].at[:, at:].multiply(factor)
    names = ("q", "k", "v", "g", "beta")
    with jfla.pallas.interpret():
        first, second = (
            jfla.chunk_kda(*(x[name] for name in names), implementation="pallas").output for x in (arrays, changed)
        )
    first, second = (np.asarray(x.astype("float32")) for x in (first, second))
    np.testing.assert_array_equal(first[:, :at], second[:, :at])
    assert (first[:, at:] != second[:, at:]).any()


@pytest.mark.parametrize("gates", ["strong", "weak"])
def test_chunks_with_usual_gates_take_the_fast_form(gates):
    arrays, _ = inputs(Call("kda", gates, batch=4, time=64 * 16, heads=2, key_dim=128))
    log2 = np.asarray(arrays["g"], np.float64) / np.log(2)
    decays = log2.reshape(4, 16, 64, -1).sum(axis=2).min(axis=-1)
    assert np.mean(decays > -_patterns.FAST_RANGE) > 0.99


def test_a_chunk_with_one_strong_gate_takes_the_exact_form_and_stays_right():
    call = Call("kda", "weak", time=64, group=1)
    arrays, rest = inputs(call)
    arrays["g"] = arrays["g"].at[:, 30, :, 5].set(-300.0)
    with jfla.pallas.interpret():
        got = results(lambda *a, **k: jfla.chunk_kda(*a, **k, implementation="pallas"), arrays, rest)
    want = results(lambda *a, **k: jfla.chunk_kda(*a, **k, implementation="xla"), arrays, rest)
    for name, x in want.items():
        x, y = (np.asarray(z, np.float64) for z in (x, got[name]))
        assert np.linalg.norm(x - y) <= TOLERANCE[name] * np.linalg.norm(x), name


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"key_dim": 96}, "K = 96"),
        ({"value_dim": 32}, "V = 32"),
        ({"dtype": "float32"}, "q is float32"),
    ],
)
def test_what_the_kernels_refuse_goes_to_xla_unless_named(change, reason):
    arrays, rest = inputs(Call("gdn", time=16, **change))
    initial_state = arrays.pop("initial_state")
    with jfla.pallas.interpret():
        said = jfla.pallas.supported(*arrays.values(), initial_state=initial_state, **rest)
        assert said is not None
        assert said.startswith(reason)
        with pytest.raises(NotImplementedError, match=reason):
            jfla.chunk_gdn(*arrays.values(), initial_state=initial_state, **rest, implementation="pallas")
        out = jfla.chunk_gdn(*arrays.values(), initial_state=initial_state, **rest)
    assert out.output.shape == arrays["v"].shape


def test_a_cpu_is_refused_outside_interpret_mode():
    x = jax.ShapeDtypeStruct((1, 64, 2, 64), "bfloat16")
    beta = jax.ShapeDtypeStruct((1, 64, 2), "float32")
    assert "CPU" in str(jfla.pallas.supported(x, x, x, x, beta))
    with jfla.pallas.interpret():
        assert jfla.pallas.supported(x, x, x, x, beta) is None


@pytest.mark.parametrize(
    ("op", "heads", "time", "v_block", "programs"),
    [("gdn", 32, 8192, 64, 68), ("kda", 32, 8192, 128, 100), ("gdn", 64, 8192, 64, 0), ("kda", 8, 8192, 64, 0)],
)
def test_preparing_beside_the_scan_is_for_calls_that_leave_much_of_the_gpu_idle(op, heads, time, v_block, programs):
    config, found = _config.beside_config(op, 128, 128, heads, time // 64)
    assert (config.v_block, found) == (v_block, programs)
    assert _config.beside_config("gdn", 64, 64, 64, 16)[1] == 0
