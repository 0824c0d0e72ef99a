"""Every rule about arguments has a ValueError that names the argument, the rule and what came, in all four ops."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jfla
from jfla.xla.triangular import unit_lower_inverse

OPS = [jfla.chunk_kda, jfla.chunk_gdn, jfla.recurrent_kda, jfla.recurrent_gdn]
B, T, H, HV, K, V, S = 2, 6, 2, 4, 3, 5, 3
IDS = [[1, 1, 2, 2, 3, 0], [1, 2, 2, 3, 3, 3]]
FLOATS = ["q", "k", "v", "g", "beta"]


def ones(*shape, dtype=jnp.float32):
    return jnp.ones(shape, dtype)


def is_kda(op) -> bool:
    return op in (jfla.chunk_kda, jfla.recurrent_kda)


def good(op) -> dict:
    """The array arguments of a call that works."""
    g = -ones(B, T, HV, K) if is_kda(op) else -ones(B, T, HV)
    return {
        "q": ones(B, T, H, K),
        "k": ones(B, T, H, K),
        "v": ones(B, T, HV, V),
        "g": g,
        "beta": ones(B, T, HV),
    }


def call(op, **changes):
    return op(**(good(op) | changes))


softplus, sigmoid = jfla.SoftplusGate, jfla.SigmoidGate
STATE, STATES = ones(B, HV, K, V), ones(B, S, HV, K, V)

# (changes to a good call, the error)
RULES = [
    # Types and dtypes.
    *[({name: None}, f"{name} must be an array, got NoneType") for name in FLOATS],
    *[({name: "x"}, f"{name} must be an array, got str") for name in FLOATS],
    *[({name: object()}, f"{name} must be an array, got object") for name in FLOATS],
    ({"q": [[1.0], [1.0, 2.0]]}, "q must be an array, got list"),
    *[({name: ones(1, dtype=jnp.int32)}, f"{name} must be float32, bfloat16, float16 or float64, got int32")
      for name in FLOATS],
    ({"q": ones(B, T, H, K, dtype=bool)}, "q must be float32, bfloat16, float16 or float64, got bool"),
    ({"v": ones(B, T, HV, V, dtype=jnp.complex64)}, "v must be float32, bfloat16, float16 or float64, got complex64"),
    ({"k": jax.random.split(jax.random.key(0), 2)}, "k must be float32, bfloat16, float16 or float64, got key"),
    ({"initial_state": "x"}, "initial_state must be an array, got str"),
    ({"segment_ids": "x"}, "segment_ids must be an array, got str"),
    ({"segment_ids": ones(B, T)}, "segment_ids must be integer, got float32"),
    ({"segment_ids": ones(B, T, dtype=bool)}, "segment_ids must be integer, got bool"),
    *[({"initial_state": STATE.astype(x)}, f"initial_state must be float32 or bfloat16 (or float64), got {x}")
      for x in ("float16", "int32")],
    # Shapes.
    ({"q": ones(B, T, K)}, "q must be [B, T, H, K] with no axis of length 0, got [2, 6, 3]"),
    ({"q": ones(B, T, 1, H, K)}, "q must be [B, T, H, K] with no axis of length 0, got [2, 6, 1, 2, 3]"),
    ({"q": 1.0}, "q must be [B, T, H, K] with no axis of length 0, got []"),
    ({"q": ones(B, 0, H, K)}, "q must be [B, T, H, K] with no axis of length 0, got [2, 0, 2, 3]"),
    ({"q": ones(0, T, H, K)}, "q must be [B, T, H, K] with no axis of length 0, got [0, 6, 2, 3]"),
    ({"v": ones(B, T, HV)}, "v must be [B, T, HV, V] with no axis of length 0, got [2, 6, 4]"),
    ({"v": ones(B, T, 0, V)}, "v must be [B, T, HV, V] with no axis of length 0, got [2, 6, 0, 5]"),
    ({"k": ones(B, T, K)}, "k must be [B, T, H, K] = [2, 6, 2, 3], got [2, 6, 3]"),
    ({"k": ones(B, T, H, K + 1)}, "k must be [B, T, H, K] = [2, 6, 2, 3], got [2, 6, 2, 4]"),
    ({"k": ones(B, T, HV, K)}, "k must be [B, T, H, K] = [2, 6, 2, 3], got [2, 6, 4, 3]"),
    ({"v": ones(B, T + 1, HV, V)}, "v must be [B, T, HV, V] = [2, 6, 4, 5], got [2, 7, 4, 5]"),
    ({"v": ones(1, T, HV, V)}, "v must be [B, T, HV, V] = [2, 6, 4, 5], got [1, 6, 4, 5]"),
    ({"v": ones(B, T, 1, V)}, "v must have a multiple of q's 2 heads (HV = r H, r >= 1), got HV = 1"),
    ({"v": ones(B, T, 3, V)}, "v must have a multiple of q's 2 heads (HV = r H, r >= 1), got HV = 3"),
    ({"beta": ones(B, T, H)}, "beta must be [B, T, HV] = [2, 6, 4], got [2, 6, 2]"),
    ({"beta": ones(B, T, HV, 1)}, "beta must be [B, T, HV] = [2, 6, 4], got [2, 6, 4, 1]"),
    ({"initial_state": ones(B, HV, V, K)}, "initial_state must be [B, HV, K, V] = [2, 4, 3, 5], got [2, 4, 5, 3]"),
    ({"initial_state": ones(B, H, K, V)}, "initial_state must be [B, HV, K, V] = [2, 4, 3, 5], got [2, 2, 3, 5]"),
    ({"initial_state": STATES}, "initial_state must be [B, HV, K, V] = [2, 4, 3, 5], got [2, 3, 4, 3, 5]"),
    # The gate.
    ({"gate": "softplus"}, "gate must be None, a SoftplusGate or a SigmoidGate, got str"),
    ({"gate": jfla.SoftplusGate}, "gate must be None, a SoftplusGate or a SigmoidGate, got type"),
    ({"gate": softplus(None)}, "gate.a_log must be an array [HV] for a SoftplusGate, got None"),
    ({"gate": softplus(a_log="x")}, "gate.a_log must be an array, got str"),
    ({"gate": softplus(a_log=ones(HV, dtype=jnp.int32))}, "gate.a_log must be float32, bfloat16, float16 or float64"),
    ({"gate": softplus(a_log=ones(H))}, "gate.a_log must be [HV] = [4], got [2]"),
    ({"gate": softplus(a_log=0.5)}, "gate.a_log must be [HV] = [4], got []"),
    ({"gate": sigmoid(a_log=ones(1, HV))}, "gate.a_log must be [HV] = [4], got [1, 4]"),
    *[({"gate": sigmoid(lower_bound=bound)}, f"gate.lower_bound must be a static number below 0, got {bound!r}")
      for bound in (0.0, 5.0, None, "x", float("nan"), -float("inf"), True)],
    # Static arguments.
    *[({"beta_max": x}, f"above 0 (1.0, or 2.0 for negative eigenvalues), got {x!r}")
      for x in (0, -1.0, "1", float("nan"), float("inf"), True)],
    *[({"scale": x}, f"scale must be None or a static finite number, got {x!r}")
      for x in ("x", float("nan"), float("inf"), False, 1j, jnp.ones(()))],
    *[({"qk_norm": x}, f"qk_norm must be True or False, got {x!r}") for x in (None, 1, "l2")],
    *[({"return_final_state": x}, f"return_final_state must be True or False, got {x!r}") for x in (None, 1)],
    *[({"state_dtype": x}, f"state_dtype must be None, float32 or bfloat16, got {x!r}")
      for x in ("float16", float, "x", 32, jnp.float64)],
    *[({"num_segments": x, "segment_ids": IDS}, f"num_segments must be None or a static int of at least 1, got {x!r}")
      for x in (0, -1, 2.0, "3", True)],
    *[({"implementation": x}, f"implementation must be one of (None, 'pallas', 'xla'), got {x!r}")
      for x in ("triton", "XLA", "", 0, ["xla"])],
    # Segments.
    ({"segment_ids": IDS[0]}, "segment_ids must be [B, T] = [2, 6], got [6]"),
    ({"segment_ids": IDS[:1]}, "segment_ids must be [B, T] = [2, 6], got [1, 6]"),
    ({"segment_ids": [IDS[0], [1, 1, 3, 2, 3, 3]]},
     "segment_ids must not decrease along T, with padding (0) only at the end, got 3 before 2 at segment_ids[1, 2:4]"),
    ({"segment_ids": [[1, 1, 0, 2, 2, 2], IDS[1]]},
     "segment_ids must not decrease along T, with padding (0) only at the end, got 0 before 2 at segment_ids[0, 2:4]"),
    ({"segment_ids": [[0, 1, 1, 2, 2, 2], IDS[1]]}, "with padding (0) only at the end, got 0 before 1"),
    ({"segment_ids": [IDS[0], [-1, 1, 1, 1, 1, 1]]}, "segment_ids must be 1 .. S, or 0 for padding, got -1"),
    ({"segment_ids": IDS, "num_segments": 2}, "segment_ids must be at most num_segments = 2, got 3"),
    ({"segment_ids": IDS, "initial_state": STATES[:, :2]}, "segment_ids must be at most num_segments = 2, got 3"),
    ({"segment_ids": IDS, "return_final_state": True}, "num_segments must be a static int for return_final_state"),
    ({"segment_ids": IDS, "initial_state": STATE},
     "initial_state must be [B, S, HV, K, V] with segment_ids, got [2, 4, 3, 5]"),
    ({"segment_ids": IDS, "initial_state": STATES[:, :0]},
     "initial_state must be [B, S, HV, K, V] with segment_ids, got [2, 0, 4, 3, 5]"),
    ({"segment_ids": IDS, "initial_state": STATES[:, :, :2]},
     "initial_state must be [B, S, HV, K, V] = [2, 3, 4, 3, 5], got [2, 3, 2, 3, 5]"),
    ({"segment_ids": IDS, "initial_state": STATES, "num_segments": 4},
     "num_segments must be the S = 3 of initial_state, got 4"),
    ({"num_segments": 2}, "num_segments must be None without segment_ids, got 2"),
]  # fmt: skip


@pytest.mark.parametrize("op", OPS)
def test_every_rule_has_its_error(op):
    wrong = []
    for changes, message in RULES:
        try:
            call(op, **changes)
            wrong.append(f"{changes} passed, expected: {message}")
        except ValueError as error:
            if message not in str(error):
                wrong.append(f"{changes} says: {error}\n  expected: {message}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("op", OPS)
def test_the_gate_has_the_shape_of_its_op(op):
    per_token, letters = ((HV, K), "HV, K") if is_kda(op) else ((HV,), "HV")
    shape = f"= [{', '.join(map(str, (B, T, *per_token)))}]"
    for g in (
        ones(B, T, HV, K),
        ones(B, T, HV),
        ones(B, T, HV, 1),
        ones(B, T, H, K),
        ones(B, T, HV, V),
    ):
        if g.shape != (B, T, *per_token):
            with pytest.raises(
                ValueError, match=re.escape(f"g must be [B, T, {letters}] {shape}, got")
            ):
                call(op, g=g)
    for bias in (ones(HV), ones(HV, K), ones(HV * K), ones(1)):
        if bias.shape != per_token:
            with pytest.raises(
                ValueError, match=re.escape(f"gate.dt_bias must be [{letters}] =")
            ):
                call(op, gate=softplus(a_log=ones(HV), dt_bias=bias))


@pytest.mark.parametrize("op", OPS)
def test_arrays_on_different_devices(op):
    first, second = jax.devices()[:2]
    x = good(op)
    for name, rest in (
        ("k", {}),
        ("initial_state", {"initial_state": STATE}),
        ("gate.a_log", {}),
    ):
        moved = {"q": jax.device_put(x["q"], first)} | rest
        if name == "gate.a_log":
            moved["gate"] = jfla.SoftplusGate(jax.device_put(ones(HV), second))
        else:
            moved[name] = jax.device_put((x | rest)[name], second)
        message = f"{name} must be on the devices of q, ['{first}'], got ['{second}']"
        with pytest.raises(ValueError, match=re.escape(message)):
            call(op, **moved)
    assert call(op, q=jax.device_put(x["q"], second)).output.devices() == {second}


@pytest.mark.parametrize("op", OPS)
def test_values_of_segment_ids_are_the_callers_word_under_transformations(op):
    bad = jnp.array([[2, 1, 1, 1, 1, 1]] * B)
    run = functools.partial(call, op, num_segments=S, implementation="xla")
    jax.eval_shape(lambda ids: run(segment_ids=ids), bad)
    # Constants of a traced function are looked at all the same.
    with pytest.raises(ValueError, match="segment_ids must not decrease"):
        jax.eval_shape(lambda q: run(q=q, segment_ids=bad), good(op)["q"])


@pytest.mark.parametrize("op", OPS)
def test_pallas_by_name_says_why_it_cannot_and_none_chooses_xla(op):
    if jax.default_backend() != "cpu":
        pytest.skip("about machines without a GPU")
    with pytest.raises(
        NotImplementedError, match=r'implementation="pallas" cannot take this call: \w+'
    ):
        call(op, implementation="pallas")
    assert isinstance(jfla.pallas.supported(*good(op).values()), str)
    chosen, named = call(op), call(op, implementation="xla")
    np.testing.assert_array_equal(chosen.output, named.output)
    assert chosen.final_state is None


@pytest.mark.parametrize("op", OPS)
def test_what_numpy_and_python_hold_is_taken(op):
    x = {name: np.asarray(a, np.float64) for name, a in good(op).items()}
    gate = softplus(a_log=[0.0] * HV)
    out = op(**x, gate=gate, segment_ids=np.array(IDS, np.uint8), initial_state=np.asarray(STATES), beta_max=1,
             scale=np.float32(0.5), num_segments=np.int64(S), return_final_state=np.True_,
             implementation="xla")  # fmt: skip
    want = call(op, gate=jfla.SoftplusGate(jnp.zeros(HV)), segment_ids=jnp.array(IDS), initial_state=STATES, scale=0.5,
                beta_max=1.0, return_final_state=True, implementation="xla")  # fmt: skip
    # float64 without x64 is float32, as all over JAX
    assert out.output.dtype == out.final_state.dtype == jnp.float32
    for a, b in zip(out, want):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("op", [jfla.reference.recurrent_kda, jfla.reference.chunk_kda])
def test_the_reference_checks_its_arguments_too(op):
    with pytest.raises(ValueError, match="k must be"):
        op(
            ones(B, T, H, K),
            ones(B, T, H, V),
            ones(B, T, HV, V),
            ones(B, T, HV, K),
            ones(B, T, HV),
        )
    with pytest.raises(
        ValueError,
        match=r'implementation must be None or "xla" in jfla\.reference, got "pallas"',
    ):
        op(**good(jfla.chunk_kda), implementation="pallas")
    with pytest.raises(TypeError, match="chunk_size"):
        op(
            ones(B, T, H, K),
            ones(B, T, H, K),
            ones(B, T, HV, V),
            ones(B, T, HV, K),
            ones(B, T, HV),
            chunk_size=32,
        )


def test_chunks_of_xla_are_powers_of_two():
    """They go by halves."""
    with pytest.raises(ValueError, match="chunk=40 must be a power of two"):
        unit_lower_inverse(jnp.zeros((40, 40)))


@pytest.mark.parametrize("op", OPS)
def test_numpy_arrays_of_the_other_byte_order_have_their_values(op):
    rng = np.random.default_rng(0)
    arrays = {
        name: rng.uniform(-1, 0, x.shape).astype("float32")
        for name, x in good(op).items()
    }
    arrays |= {"initial_state": rng.uniform(-1, 1, STATES.shape).astype("float32")}
    arrays |= {"segment_ids": np.array(IDS, "int32"), "a_log": np.ones(HV, "float32")}

    def run(arrays):
        gate = softplus(arrays["a_log"], None)
        rest = {name: x for name, x in arrays.items() if name != "a_log"}
        return op(**rest, gate=gate, return_final_state=True)

    swapped = {name: x.astype(x.dtype.newbyteorder()) for name, x in arrays.items()}
    assert not any(x.dtype.isnative for x in swapped.values())
    for got, want in zip(run(swapped), run(arrays)):
        np.testing.assert_array_equal(got, want)
