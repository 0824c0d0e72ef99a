"""Walked threads: NumPy's form of each primitive, loops and branches give what JAX gives for the same inputs."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.experimental import pallas as pl
from support import walked_threads

# Without quotients below the smallest normal number, which XLA takes for zero.
FLOATS = [0.0, -0.0, 1.0, -1.5, 2.75, -7.0, 1e-3, 1e30, np.nan, np.inf, -np.inf]
INTS = [0, 1, -1, 7, -7, 31, 32, 33, 100, 2**31 - 1, -(2**31)]
FLOAT_TYPES = ("float32", "float16", "bfloat16")
INT_TYPES = ("int32", "uint32", "int16")
COMPARISONS = (lax.eq, lax.ne, lax.lt, lax.le, lax.gt, lax.ge)
ARITHMETIC = (lax.add, lax.sub, lax.mul, lax.div, lax.rem, lax.max, lax.min)
BITWISE = (lax.bitwise_and, lax.bitwise_or, lax.bitwise_xor)
SHIFTS = (lax.shift_left, lax.shift_right_arithmetic, lax.shift_right_logical)
ROUNDED = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 8e-3}  # a unit or two


def edges(dtype: str) -> np.ndarray:
    """Values at which forms go wrong, of any type."""
    if dtype == "bool":
        return np.array([False, True])
    with np.errstate(all="ignore"):
        if dtype in FLOAT_TYPES:
            return np.array(FLOATS).astype(jnp.dtype(dtype))
        return np.array(INTS).astype(dtype)


def normal(*shape: int, dtype: str = "float32") -> np.ndarray:
    generator = np.random.default_rng(sum(shape))
    return generator.normal(size=shape).astype(jnp.dtype(dtype))


def walk(function: Callable, *arrays: Any) -> list[Any]:
    """The outputs of a function, walked."""
    jaxpr = jax.make_jaxpr(function)(*arrays)
    with np.errstate(all="ignore"):
        plan = walked_threads.plan_of(jaxpr)
        return plan(*jaxpr.consts, *[x[()] for x in arrays])


def check(function: Callable, *arrays: Any, rtol: float = 0.0) -> None:
    """A function walks to what `jax.jit` of it gives, with no primitive left to JAX."""
    before = walked_threads.bound.copy()
    found = walk(function, *arrays)
    assert walked_threads.bound == before
    expected = jax.tree.leaves(jax.jit(function)(*arrays))
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        check_array(ours, theirs, rtol)


def check_array(ours: Any, theirs: Any, rtol: float = 0.0) -> None:
    assert ours.dtype == theirs.dtype
    assert ours.shape == theirs.shape
    if ours.dtype.kind not in "biu":
        ours = np.asarray(ours, np.float32)
        theirs = np.asarray(theirs, np.float32)
    np.testing.assert_allclose(ours, theirs, rtol=rtol, atol=0.0)


def check_pairs(function: Callable, dtype: str) -> None:
    """Arrays, and each pair of scalars."""
    values = edges(dtype)
    a, b = (x.ravel() for x in np.meshgrid(values, values))
    check(function, a, b)
    expected = jax.tree.leaves(jax.jit(function)(a, b))
    plan = walked_threads.plan_of(jax.make_jaxpr(function)(a[0], b[0]))
    with np.errstate(all="ignore"):
        by_pair = [plan(x, y) for x, y in zip(a, b, strict=True)]
    for scalars, theirs in zip(zip(*by_pair, strict=True), expected, strict=True):
        assert {(x.dtype, x.shape) for x in scalars} == {(theirs.dtype, ())}
        check_array(np.array(scalars, theirs.dtype), theirs)


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
@pytest.mark.parametrize("function", ARITHMETIC)
def test_pairs_of_floats(function, dtype):
    check_pairs(function, dtype)


@pytest.mark.parametrize("dtype", INT_TYPES)
@pytest.mark.parametrize("function", ARITHMETIC + BITWISE + SHIFTS)
def test_pairs_of_integers(function, dtype):
    check_pairs(function, dtype)


@pytest.mark.parametrize("function", BITWISE)
def test_pairs_of_booleans(function):
    check_pairs(function, "bool")


@pytest.mark.parametrize("dtype", [*FLOAT_TYPES, *INT_TYPES, "bool"])
def test_comparisons(dtype):
    check_pairs(lambda a, b: [compare(a, b) for compare in COMPARISONS], dtype)


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
def test_functions_of_a_float(dtype):
    def functions(a):
        exact = lax.abs(a), lax.neg(a), lax.sign(a), lax.square(a)
        powers = lax.exp(a), lax.exp2(a), lax.sqrt(a), lax.rsqrt(a)
        return *exact, *powers, lax.log(a), lax.log2(a)

    check(functions, edges(dtype), rtol=ROUNDED[dtype])
    for value in edges(dtype):
        check(functions, value, rtol=ROUNDED[dtype])


def test_zero_keeps_its_sign():
    zeros = np.array([-0.0, 0.0], np.float32)
    assert np.signbit(walk(lax.sign, zeros)[0]).tolist() == [True, False]


@pytest.mark.parametrize("dtype", ["int32", "uint32", "bool"])
def test_functions_of_an_integer(dtype):
    check(lax.bitwise_not, edges(dtype))
    check(lax.bitwise_not, edges(dtype)[1])
    if dtype == "int32":
        check(lambda a: (lax.abs(a), lax.neg(a), lax.sign(a)), edges(dtype))


@pytest.mark.parametrize("dtype", [*FLOAT_TYPES, "int32"])
def test_clamped_values(dtype):
    low, a, high = map(np.ravel, np.meshgrid(*[edges(dtype)] * 3))
    check(lambda *of: lax.clamp(*of), low, a, high)
    check(lambda *of: lax.clamp(*of), low[0], a, high[3])
    check(lambda *of: lax.clamp(*of), low[0], a[4], high[3])


@pytest.mark.parametrize("old", [*FLOAT_TYPES, *INT_TYPES, "bool"])
def test_conversions(old):
    new = (*FLOAT_TYPES, *INT_TYPES, "int8", "uint8", "uint16", "bool")

    def convert(a):
        return [lax.convert_element_type(a, jnp.dtype(name)) for name in new]

    check(convert, edges(old))
    for value in edges(old):
        check(convert, value)


SHAPES = {
    "reshape": lambda a: lax.reshape(a, (6, 4)),
    "squeeze": lambda a: lax.squeeze(a[:1], (0,)),
    "expand_dims": lambda a: lax.expand_dims(a, (1, 4)),
    "transpose": lambda a: lax.transpose(a, (2, 0, 1)),
    "broadcast": lambda a: lax.broadcast_in_dim(a[:, :1], (2, 5, 3, 4), (0, 2, 3)),
    "broadcast_scalar": lambda a: lax.broadcast_in_dim(a[0, 0, 0], (2, 3), ()),
    "concatenate": lambda a: lax.concatenate([a, a[:, 1:], -a], 1),
    "stack": lambda a: (jnp.stack([a, -a], 1), jnp.stack([a[0, 0, 0], a[1, 1, 1]])),
    "iota": lambda a: (a, lax.broadcasted_iota(jnp.bfloat16, (3, 20), 1)),
    "slice": lambda a: lax.slice(a, (0, 1, 0), (2, 3, 4), (1, 2, 3)),
    "pad": lambda a: lax.pad(a, jnp.float32(7), ((0, 1, 0), (2, 0, 3), (0, 0, 1))),
    "select": lambda a: lax.select(a > 0, a, 2 * a),
    "select_by_one": lambda a: lax.select(a[0, 0, 0] > 0, a, 2 * a),
    "of_scalars": lambda a: lax.select(a[0, 0, 0] > 0, a[1, 0, 0], a[1, 1, 0]),
    "same": lambda a: (jnp.copy(a), lax.stop_gradient(-a)),
    "barrier": lambda a: lax.optimization_barrier((a, 2 * a)),
    "literal": lambda a: (a * 3.0, pl.multiple_of(lax.stop_gradient(jnp.int32(2)), 2)),
}


@pytest.mark.parametrize("function", SHAPES.values(), ids=SHAPES)
def test_shapes(function):
    check(function, normal(2, 3, 4))


@pytest.mark.parametrize("start", [-100, -1, 0, 2, 3, 100])
@pytest.mark.parametrize("dtype", ["int32", "uint32"])
def test_windows_stay_inside_the_array(start, dtype):
    start = np.array(start).astype(dtype)
    other = np.array(1).astype(dtype)
    check(
        lambda a, i, j: lax.dynamic_slice(a, (i, j), (3, 2)), normal(5, 4), start, other
    )
    check(
        lambda a, b, i, j: lax.dynamic_update_slice(a, b, (i, j)),
        normal(5, 4), normal(3, 2), start, other,
    )  # fmt: skip


@pytest.mark.parametrize("mode", ["clip", "promise_in_bounds"])
def test_gathered_elements(mode):
    def elements(a, i):
        return (
            a.at[:, i, i].get(mode=mode),
            a.at[i, :, 1].get(mode=mode),
            a.at[i].get(mode=mode),
            a.at[..., i[:, None], i].get(mode=mode),
        )

    indices = np.array([0, 1, 1], np.int32)
    if mode == "clip":
        indices = np.array([-9, 1, 9], np.int32)
    check(elements, normal(2, 3, 4), indices)


@pytest.mark.parametrize("dtype", [*FLOAT_TYPES, "int32"])
def test_reductions(dtype):
    values = normal(3, 40, 5)
    if dtype == "int32":
        values = 5e8 * values  # the sums are too large for it
    values = values.astype(jnp.dtype(dtype))

    def reduce(a):
        extremes = [
            extreme(a, axes)
            for extreme in (lax.reduce_max, lax.reduce_min)
            for axes in ((1,), (0, 2), (0, 1, 2))
        ]
        wide = a if a.dtype.itemsize == 4 else a.astype(jnp.float32)
        return (
            *extremes,
            lax.reduce_sum(abs(wide), (0, 2)),
            lax.reduce_sum(abs(wide), (0, 1, 2)),
        )

    check(reduce, values, rtol=1e-5 if dtype in FLOAT_TYPES else 0.0)
    if dtype in FLOAT_TYPES:
        values[0, 3, 1] = np.nan
        check(lambda a: lax.reduce_max(a, (1,)), values)
        check(lambda a: lax.reduce_min(a, (1,)), values)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_numbers_are_added_in_float32(dtype):
    ones = np.ones((4099,), jnp.dtype(dtype))
    total = walk(lambda a: lax.reduce_sum(a, (0,)), ones)[0]
    assert total == np.float32(4099).astype(ones.dtype)


MATMULS = {
    "plain": ((5, 7), (7, 4), (((1,), (0,)), ((), ()))),
    "transposed": ((7, 5), (4, 7), (((0,), (1,)), ((), ()))),
    "batch": ((3, 2, 5, 7), (7, 2, 4, 3), (((3,), (0,)), ((0, 1), (3, 1)))),
    "two_sums": ((5, 7, 3), (3, 7, 4), (((1, 2), (1, 0)), ((), ()))),
    "vectors": ((7,), (7,), (((0,), (0,)), ((), ()))),
    "outer": ((5,), (4,), (((), ()), ((), ()))),
}


@pytest.mark.parametrize("case", MATMULS)
@pytest.mark.parametrize("dtype", FLOAT_TYPES)
def test_matrix_products(case, dtype):
    left, right, numbers = MATMULS[case]
    a = np.abs(normal(*left, dtype=dtype))
    b = np.abs(normal(*right, dtype=dtype))

    def multiply(a, b):
        return lax.dot_general(a, b, numbers, preferred_element_type=jnp.float32)

    check(multiply, a, b, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_matrices_are_multiplied_exactly(dtype):
    a = np.full((1, 4096), 1 + 2**-7, jnp.dtype(dtype))
    b = np.full((4096, 1), 33.0, a.dtype)
    numbers = (((1,), (0,)), ((), ()))
    exact = 4096 * 33.0 * (1 + 2**-7)  # above the largest of float16

    def multiply(a, b):
        wide = lax.dot_general(a, b, numbers, preferred_element_type=jnp.float32)
        return wide, lax.dot_general(a, b, numbers)

    wide, narrow = walk(multiply, a, b)
    assert wide[0, 0] == exact
    with np.errstate(all="ignore"):
        assert narrow[0, 0] == np.float32(exact).astype(a.dtype)


def test_loops_branches_and_calls():
    def count(a, n):
        return lax.fori_loop(0, n, lambda i, x: jax.jit(jnp.abs)(x) + i, a)

    check(count, normal(3), np.int32(5))
    check(count, normal(3), np.int32(0))

    def choose(index, a):
        return lax.switch(index, [lambda a: a, lambda a: -a, lambda a: 3 * a], a)

    for index in (-1, 0, 1, 2, 9):
        check(choose, np.int32(index), normal(3))
    check(lambda a: lax.cond(a[0] > 0, lambda: a + 1, lambda: a - 1), normal(3))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("length", [0, 1, 4])
def test_scans(reverse, length):
    def add(a, step):
        def body(carry, x):
            total, count = carry
            total = total + step * x
            return (total, count + 1), (2 * total, count, x > 0)

        return lax.scan(body, (jnp.zeros(2), 0), a, reverse=reverse)

    check(add, normal(length, 2), np.float32(0.5))


def test_what_numpy_has_no_form_of_is_left_to_jax():
    def function(a, b):
        return (
            jax.nn.relu(lax.sort(a)),
            lax.dot(b, b),
            a.at[jnp.array([9])].get(mode="fill"),
        )

    a = normal(5)
    b = np.arange(9, dtype=np.int32).reshape(3, 3)
    before = walked_threads.bound.copy()
    found = walk(function, a, b)
    assert {"sort", "dot_general", "gather"} <= set(walked_threads.bound - before)
    for ours, theirs in zip(found, jax.jit(function)(a, b), strict=True):
        check_array(ours, theirs)


def test_a_jaxpr_is_planned_once():
    jaxpr = jax.make_jaxpr(lambda a: a + 1)(1.0)
    assert walked_threads.plan_of(jaxpr) is walked_threads.plan_of(jaxpr)


def test_callbacks_and_threads_share_no_memory():
    kept = np.zeros(3, np.float32)

    def add_to_kept(a: np.ndarray) -> np.ndarray:
        kept[...] += a
        a[...] = -1  # its own
        return kept

    def twice(a):
        like = jax.ShapeDtypeStruct((3,), jnp.float32)
        first = io_callback(add_to_kept, like, a)
        return first, io_callback(add_to_kept, like, a), a

    first, second, a = walk(twice, np.ones(3, np.float32))
    np.testing.assert_array_equal(first, 1)
    np.testing.assert_array_equal(second, 2)
    np.testing.assert_array_equal(a, 1)


def test_a_callback_must_return_what_it_said():
    like = jax.ShapeDtypeStruct((3,), jnp.float32)
    with pytest.raises(RuntimeError, match="callback returned"):
        walk(lambda a: io_callback(lambda a: a[:2], like, a), normal(3))
