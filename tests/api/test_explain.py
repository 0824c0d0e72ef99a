"""Which implementation a call takes, why, and that it is the one that runs; nothing of Mosaic before it is needed."""

import logging
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jfla
from jfla.pallas import compiling_for

OPS = [jfla.chunk_kda, jfla.chunk_gdn, jfla.recurrent_kda, jfla.recurrent_gdn]
CHUNKED = OPS[:2]


def described(function, time=4, dim=64, dtype="bfloat16", heads=2):
    """The five arrays of a call that the kernels take, as shapes."""
    shape = jax.ShapeDtypeStruct
    x = shape((1, time, heads, dim), dtype)
    per_head = shape((1, time, heads), "float32")
    g = (
        shape((1, time, heads, dim), "float32")
        if function.__name__.endswith("kda")
        else per_head
    )
    return [x, x, x, g, per_head]


def arrays(function, time=4, dim=64):
    """The same with numbers."""
    x = jax.random.normal(jax.random.key(0), (3, 1, time, 2, dim))
    q, k, v = x / jnp.linalg.norm(x, axis=-1, keepdims=True)
    g = -jax.nn.softplus(k)
    beta = jax.nn.sigmoid(v[..., 0])
    g = g if function.__name__.endswith("kda") else g[..., 0]
    return [*(a.astype("bfloat16") for a in (q, k, v)), g, beta]


@pytest.mark.parametrize("function", OPS, ids=lambda f: f.__name__)
def test_a_call_on_a_cpu(function):
    choice = jfla.explain(function, *described(function))
    assert choice.implementation == "xla"
    assert choice.reasons.keys() == {"pallas"}
    assert "the device is a CPU" in choice.reasons["pallas"]
    assert choice.name == function.__name__
    first, second = str(choice).splitlines()
    assert first == f'{function.__name__} takes "xla": plain JAX, on every device'
    assert second == f'  not "pallas": {choice.reasons["pallas"]}'


@pytest.mark.parametrize("function", OPS, ids=lambda f: f.__name__)
def test_a_call_that_the_kernels_take(function):
    with compiling_for("9.0"):
        there = jfla.explain(function, *described(function))
    assert there.implementation == "pallas"
    assert there.by_platform
    assert there.reasons == {"xla": "the kernels take this call"}
    assert "Hopper kernels where it is lowered for CUDA, elsewhere plain JAX" in str(
        there
    )
    with jfla.pallas.interpret():
        here = jfla.explain(function, *described(function))
    assert (here.implementation, here.by_platform) == ("pallas", False)
    assert "interpret mode" in str(here)


@pytest.mark.parametrize("function", OPS, ids=lambda f: f.__name__)
def test_what_is_asked_for_by_name_is_taken_or_refused(function):
    with compiling_for("9.0"):
        asked = jfla.explain(function, *described(function), implementation="pallas")
        other = jfla.explain(function, *described(function), implementation="xla")
    assert asked.reasons == {"xla": 'implementation="pallas" was asked for'}
    assert not asked.by_platform
    assert other.reasons == {"pallas": 'implementation="xla" was asked for'}
    with pytest.raises(NotImplementedError, match="the device is a CPU"):
        jfla.explain(function, *described(function), implementation="pallas")


def test_a_padded_call_is_told():
    with compiling_for("9.0"):
        for dim, padded in ((96, 128), (192, 256)):
            choice = jfla.explain(jfla.chunk_kda, *described(jfla.chunk_kda, dim=dim))
            assert choice.implementation == "pallas"
            assert f"K = {dim} padded to {padded}" in str(choice)
        assert "padded" not in str(
            jfla.explain(jfla.chunk_kda, *described(jfla.chunk_kda))
        )


@pytest.mark.parametrize(
    ("function", "call", "options", "reason"),
    [
        (jfla.chunk_gdn, {"dim": 264}, {}, "K = 264"),
        (
            jfla.chunk_gdn,
            {"dtype": "float32"},
            {},
            "q is float32; the kernels take bfloat16 and",
        ),
        (
            jfla.recurrent_kda,
            {},
            {"segment_ids": jnp.ones((1, 4), jnp.int32)},
            "segment_ids; the decode kernel takes one sequence per row",
        ),
        (
            jfla.recurrent_kda,
            {},
            {"initial_state": jax.ShapeDtypeStruct((1, 2, 64, 64), "float64")},
            "initial_state is float64",
        ),
    ],
)
def test_the_reason_of_a_call_that_the_kernels_cannot_take(
    function, call, options, reason
):
    with compiling_for("9.0"):
        choice = jfla.explain(function, *described(function, **call), **options)
        assert choice.implementation == "xla"
        assert (
            choice.reasons["pallas"].startswith(reason)
            or reason in choice.reasons["pallas"]
        )
        with pytest.raises(NotImplementedError, match=reason.split(";")[0]):
            jfla.explain(
                function,
                *described(function, **call),
                **options,
                implementation="pallas",
            )


@pytest.mark.parametrize("function", OPS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("capability", ["8.0", "8.6", "8.9", "10.0", "10.3", "12.0"])
def test_another_gpu_takes_kernels_that_were_not_measured_there(function, capability):
    with compiling_for(capability):
        choice = jfla.explain(function, *described(function))
    assert choice.implementation == "pallas"
    assert choice.detail.startswith("mma.sync kernels")
    assert choice.detail.endswith("; compiled, not measured on this GPU")


@pytest.mark.parametrize(
    ("capability", "reason"),
    [
        ("7.5", "compute capability 7.5, which has no mma.sync of bfloat16"),
        (
            "9.9",
            "9.9; the kernels are compiled for 8.0, 8.6, 8.9, 9.0, 10.0, 10.3, 12.0 and 12.1",
        ),
    ],
)
def test_a_gpu_without_kernels(capability, reason):
    with compiling_for(capability):
        choice = jfla.explain(jfla.chunk_kda, *described(jfla.chunk_kda))
    assert reason in choice.reasons["pallas"]


def test_larger_heads_are_for_hopper():
    with compiling_for("8.0"):
        chunk = jfla.explain(jfla.chunk_gdn, *described(jfla.chunk_gdn, dim=192))
        decode = jfla.explain(
            jfla.recurrent_gdn, *described(jfla.recurrent_gdn, dim=256)
        )
    assert chunk.reasons == {"pallas": "K = 192; the mma.sync kernels take K up to 128"}
    assert decode.implementation == "pallas"


@pytest.mark.parametrize("bad", ["9", "sm_90", "9.0.0", ""])
def test_compiling_for_takes_a_compute_capability(bad):
    with (
        pytest.raises(
            ValueError, match=r'compute_capability must be a string such as "9\.0"'
        ),
        compiling_for(bad),
    ):
        pass
    with (
        pytest.raises(ValueError, match="num_sms must be an int"),
        compiling_for("9.0", num_sms=0),
    ):
        pass


@pytest.mark.parametrize(
    "function",
    [jfla.reference.chunk_kda, jfla.segment_ids_from_cu_seqlens, jnp.exp, "chunk_kda"],
)
def test_other_functions_are_refused(function):
    with pytest.raises(
        ValueError, match=r"function must be jfla\.chunk_kda, chunk_gdn"
    ):
        jfla.explain(function, *described(jfla.chunk_kda))


def test_bad_arguments_meet_the_errors_of_the_call():
    q, k, v, g, beta = described(jfla.chunk_kda)
    with pytest.raises(ValueError, match="beta must be"):
        jfla.explain(jfla.chunk_kda, q, k, v, g, g)
    with pytest.raises(TypeError, match="chunk_size"):
        jfla.explain(jfla.chunk_kda, q, k, v, g, beta, chunk_size=32)
    with pytest.raises(TypeError, match="return_states"):
        jfla.explain(jfla.chunk_kda, q, k, v, g, beta, return_states=True)


def test_every_call_logs_its_choice(caplog):
    x = arrays(jfla.chunk_gdn)
    with caplog.at_level(logging.DEBUG, logger="jfla"):
        jfla.chunk_gdn(*x)
    (record,) = [r for r in caplog.records if r.name == "jfla"]
    assert record.levelno == logging.DEBUG
    assert record.getMessage() == str(jfla.explain(jfla.chunk_gdn, *x))


def loss(function, x):
    return jnp.sum(function(*x).output.astype("float32") ** 2)


@pytest.mark.parametrize(
    "function",
    [pytest.param(f, marks=[pytest.mark.slow] * (f is jfla.chunk_kda)) for f in OPS],
    ids=lambda f: f.__name__,
)
def test_what_is_compiled_for_another_gpu_still_runs_on_this_cpu(function):
    """Values and gradients are those of "xla", by platform, inside jit and out."""
    x = arrays(function)
    value_and_grad = lambda x: jax.value_and_grad(lambda x: loss(function, x))(x)
    want = value_and_grad(x)
    with compiling_for("9.0"):
        assert jfla.explain(function, *x).implementation == "pallas"
        jitted = jax.jit(lambda x: value_and_grad(x))(x)
        eager = value_and_grad(x)
    for got in (jitted, eager):
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
            a, b = (np.asarray(y, np.float32) for y in (a, b))
            np.testing.assert_allclose(a, b, rtol=1e-2, atol=1e-5)


@pytest.mark.parametrize("function", OPS, ids=lambda f: f.__name__)
def test_a_call_exported_for_a_cpu_has_no_kernel_in_it(function):
    gradient = jax.jit(jax.grad(lambda x: loss(function, x)))
    with compiling_for("9.0"):
        exported = jax.export.export(gradient, platforms=["cpu"])(described(function))
    assert "mosaic" not in exported.mlir_module()


@pytest.mark.parametrize("function", CHUNKED, ids=lambda f: f.__name__)
def test_a_call_exported_for_cuda_has_kernels_in_it(function):
    gradient = jax.jit(jax.grad(lambda x: loss(function, x)))
    unchecked = [jax.export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")]
    with compiling_for("9.0"):
        exported = jax.export.export(
            gradient, platforms=["cuda"], disabled_checks=unchecked
        )(described(function))
    assert "mosaic_gpu" in exported.mlir_module()


def test_importing_the_library_imports_no_kernel():
    program = """
import sys
import jfla
import jax
x = jax.ShapeDtypeStruct((1, 64, 2, 64), "bfloat16")
beta = jax.ShapeDtypeStruct((1, 64, 2), "float32")
jfla.explain(jfla.chunk_kda, x, x, x, x, beta)
kernels = (
    "jax._src.pallas",
    "jax.experimental.pallas",
    "jax.experimental.mosaic",
    "jfla.pallas.mgpu",
    "jfla.pallas.sm90",
    "jfla.chunk_op",
)
loaded = [name for name in sys.modules if name.startswith(kernels)]
print(loaded)
"""
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == "[]"


SPLIT = {
    "rows": ({"q": ("x",), "v": ("x",)}, None),
    "heads": (
        {"q": (None, None, "x"), "v": (None, None, "x"), "beta": (None, None, "x")},
        None,
    ),
    "channels": ({"v": (None, None, None, "x")}, "V is split over 2 devices"),
    "time": ({"g": (None, "x")}, "T is split over 2 devices"),
    "heads that are too few": (
        {"v": (None, None, ("x", "y"))},
        "HV is split over 4 devices, which do not divide H = 2",
    ),
    "rows in two ways": (
        {"q": ("x",), "v": ("y",)},
        "the rows are not split alike",
    ),
}


@pytest.mark.parametrize("case", SPLIT)
def test_what_is_gathered_is_told(case):
    layouts, reason = SPLIT[case]
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    shapes = {
        "q": (4, 64, 2, 64),
        "k": (4, 64, 2, 64),
        "v": (4, 64, 4, 64),
        "g": (4, 64, 4, 64),
        "beta": (4, 64, 4),
    }
    arrays = []
    for name, shape in shapes.items():
        sharding = NamedSharding(mesh, PartitionSpec(*layouts.get(name, ())))
        arrays.append(jax.ShapeDtypeStruct(shape, "bfloat16", sharding=sharding))
    with compiling_for("9.0"):
        said = str(jfla.explain(jfla.chunk_kda, *arrays))
    assert 'takes "pallas"' in said
    if reason is None:
        assert "gathered" not in said
    else:
        assert f"gathered, every device runs the whole call: {reason}" in said
