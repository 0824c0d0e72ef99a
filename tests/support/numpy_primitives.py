"""NumPy's forms of the primitives that interpreted threads meet: `form_of` an equation.

A form is chosen when a jaxpr is planned, by the equation's types and parameters, and then runs many times. It takes
arrays, or NumPy's scalars in the place of arrays without axes, because Python adds those ten times sooner. What it
returns has the dtype and the shape that the equation says. It may be a view of an operand: nothing writes into one.

NumPy warns where XLA says nothing, of an overflow or a division by zero: call forms under `np.errstate(all="ignore")`.
NumPy keeps results below the smallest normal number, which XLA takes for zero on a CPU.
"""

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

Form = Callable[..., Any]
Maker = Callable[[Any], Form | None]  # of an equation

_MAKERS: dict[str, Maker] = {}
_OUT_OF_BOUNDS_IS_CLAMPED = (
    lax.GatherScatterMode.CLIP,
    lax.GatherScatterMode.PROMISE_IN_BOUNDS,
)


def form_of(equation: Any) -> Form | None:
    """What computes the one output of an equation, or None where NumPy has no form of it."""
    make = _MAKERS.get(equation.primitive.name)
    return None if make is None else make(equation)


def _makes(*names: str) -> Callable[[Maker], Maker]:
    """A decorator, which enters a maker under the names of its primitives."""

    def enter(make: Maker) -> Maker:
        _MAKERS.update(dict.fromkeys(names, make))
        return make

    return enter


def _always(form: Form) -> Maker:
    """A maker for primitives that need no look at the equation."""

    def make(equation: Any) -> Form:
        del equation
        return form

    return make


def _identity(a: Any) -> Any:
    return a


def _sign(a: Any) -> Any:
    return np.where(a == 0, a, np.sign(a))  # zero keeps its sign, as in XLA


def _clamp(low: Any, a: Any, high: Any) -> Any:
    return np.minimum(np.maximum(low, a), high)


_MAKERS |= {
    name: _always(form)
    for name, form in {
        "abs": operator.abs,
        "add": operator.add,
        "and": operator.and_,
        "clamp": _clamp,
        "copy": _identity,
        "eq": operator.eq,
        "exp": np.exp,
        "exp2": np.exp2,
        "ge": operator.ge,
        "gt": operator.gt,
        "le": operator.le,
        "log": np.log,
        "log2": np.log2,
        "lt": operator.lt,
        "max": np.maximum,
        "min": np.minimum,
        "mul": operator.mul,
        "multiple_of": _identity,
        "ne": operator.ne,
        "neg": operator.neg,
        "not": operator.invert,
        "or": operator.or_,
        "sign": _sign,
        "sqrt": np.sqrt,
        "square": np.square,
        "stop_gradient": _identity,
        "sub": operator.sub,
        "xor": operator.xor,
    }.items()
}


def _input(equation: Any, index: int = 0) -> jax.core.ShapedArray:
    return equation.invars[index].aval


def _output(equation: Any) -> jax.core.ShapedArray:
    return equation.outvars[0].aval


def _is_float(dtype: Any) -> bool:
    return bool(jax.numpy.issubdtype(dtype, np.floating))  # also bfloat16


def _in_float32(form: Form, dtype: Any) -> Form:
    """The same, rounded once from float32, for a dtype of 16 bits."""
    if dtype.itemsize > 2:
        return form
    return lambda *arrays: form(*[a.astype(np.float32) for a in arrays]).astype(dtype)


@_makes("rsqrt")
def _rsqrt(equation: Any) -> Form:
    dtype = _output(equation).dtype
    return _in_float32(lambda a: dtype.type(1) / np.sqrt(a), dtype)


# Integers. XLA defines what C and NumPy leave open: division by zero, and shifts by more bits than there are.


def _quotient(a: Any, b: Any) -> Any:
    """Rounded towards zero; all bits set for a division by zero."""
    whole = (a - np.fmod(a, b)) // b
    return np.where(b == 0, np.invert(a.dtype.type(0)), whole)


def _remainder(a: Any, b: Any) -> Any:
    """With the sign of the dividend, which is itself the remainder of a division by zero."""
    return np.where(b == 0, a, np.fmod(a, b))


@_makes("div")
def _div(equation: Any) -> Form:
    return operator.truediv if _is_float(_output(equation).dtype) else _quotient


@_makes("rem")
def _rem(equation: Any) -> Form:
    return np.fmod if _is_float(_output(equation).dtype) else _remainder


@_makes("shift_left", "shift_right_arithmetic", "shift_right_logical")
def _shift(equation: Any) -> Form:
    name = equation.primitive.name
    dtype = np.dtype(_output(equation).dtype)
    kind = "i" if name == "shift_right_arithmetic" else "u"
    seen_as = np.dtype(f"{kind}{dtype.itemsize}")
    shift = operator.lshift if name == "shift_left" else operator.rshift
    if seen_as == dtype:
        return shift
    return lambda a, bits: shift(a.view(seen_as), bits.view(seen_as)).view(dtype)


# Conversions.


@_makes("convert_element_type")
def _convert(equation: Any) -> Form | None:
    old = np.dtype(_input(equation).dtype)
    new = np.dtype(_output(equation).dtype)
    if old == new:
        return _identity
    if not _is_float(old) or new.kind not in "iu":
        return lambda a: a.astype(new)
    if new.itemsize > 4:
        return None  # float64 cannot tell the largest integers
    return lambda a: _saturated(a, new)


def _saturated(a: Any, dtype: np.dtype) -> Any:
    """Numbers rounded towards zero, or the nearest of that dtype, and 0 for NaN: C leaves those conversions open."""
    limits = np.iinfo(dtype)
    wide = np.nan_to_num(a.astype(np.float64), posinf=np.inf, neginf=-np.inf)
    return np.clip(wide, limits.min, limits.max).astype(dtype)


# Shapes.


@_makes("reshape", "squeeze")
def _reshape(equation: Any) -> Form | None:
    if len(equation.invars) > 1:
        return None  # of a shape known only at run time
    shape = _output(equation).shape
    return lambda a: a.reshape(shape)


@_makes("broadcast_in_dim")
def _broadcast(equation: Any) -> Form | None:
    if len(equation.invars) > 1:
        return None  # of a shape known only at run time
    shape = _output(equation).shape
    kept = equation.params["broadcast_dimensions"]
    sizes = dict(zip(kept, _input(equation).shape, strict=True))
    with_ones = tuple(sizes.get(axis, 1) for axis in range(len(shape)))
    if with_ones == shape:
        return lambda a: a.reshape(shape)
    return lambda a: np.broadcast_to(a.reshape(with_ones), shape)


@_makes("transpose")
def _transpose(equation: Any) -> Form:
    permutation = equation.params["permutation"]
    return lambda a: a.transpose(permutation)


@_makes("concatenate")
def _concatenate(equation: Any) -> Form:
    axis = equation.params["dimension"]
    return lambda *arrays: np.concatenate(arrays, axis)


@_makes("stack")
def _stack(equation: Any) -> Form:
    axis = equation.params["axis"]
    return lambda *arrays: np.stack(arrays, axis)


@_makes("iota")
def _iota(equation: Any) -> Form | None:
    if equation.invars:
        return None  # of a shape known only at run time
    aval = _output(equation)
    axis = equation.params["dimension"]
    counts = np.arange(aval.shape[axis]).astype(aval.dtype)
    beside = [1] * len(aval.shape)
    beside[axis] = -1
    filled = np.broadcast_to(counts.reshape(beside), aval.shape)
    return lambda: filled


@_makes("pad")
def _pad(equation: Any) -> Form | None:
    config = [tuple(map(int, sides)) for sides in equation.params["padding_config"]]
    if any(low < 0 or high < 0 for low, high, _ in config):
        return None  # which cuts instead
    aval = _output(equation)
    inside = tuple(
        slice(low, size - high, interior + 1)
        for size, (low, high, interior) in zip(aval.shape, config, strict=True)
    )

    def pad(a: Any, value: Any) -> np.ndarray:
        padded = np.full(aval.shape, value, aval.dtype)
        padded[inside] = a
        return padded

    return pad


# Parts of arrays. XLA moves a window that would leave the array to the array's edge.


@_makes("slice")
def _slice(equation: Any) -> Form:
    params = equation.params
    starts = params["start_indices"]
    strides = params["strides"] or [1] * len(starts)
    window = tuple(map(slice, starts, params["limit_indices"], strides))
    return lambda a: a[window]


def _window(
    starts: Sequence[Any], sizes: Sequence[int], shape: Sequence[int]
) -> tuple[slice, ...]:
    """The window of these sizes that begins at `starts`, or as near as the array has room for it."""
    window = []
    for start, size, length in zip(starts, sizes, shape, strict=True):
        begin = min(max(int(start), 0), length - size)
        window.append(slice(begin, begin + size))
    return tuple(window)


@_makes("dynamic_slice")
def _dynamic_slice(equation: Any) -> Form | None:
    shape = _input(equation).shape
    sizes = equation.params["slice_sizes"]
    if len(equation.invars) != 1 + len(shape):
        return None  # sizes known only at run time
    return lambda a, *starts: a[_window(starts, sizes, shape)]


@_makes("dynamic_update_slice")
def _dynamic_update_slice(equation: Any) -> Form:
    shape = _input(equation).shape
    sizes = _input(equation, 1).shape

    def update(a: Any, part: Any, *starts: Any) -> np.ndarray:
        updated = np.array(a)
        updated[_window(starts, sizes, shape)] = part
        return updated

    return update


@_makes("gather")
def _gather(equation: Any) -> Form | None:
    """Only of single elements along some axes, and of whole other axes: what indexing with arrays of indices needs."""
    params = equation.params
    numbers = params["dimension_numbers"]
    shape = _input(equation).shape
    indexed = numbers.start_index_map
    whole = tuple(axis for axis in range(len(shape)) if axis not in indexed)
    known = (
        tuple(sorted(indexed)) == tuple(numbers.collapsed_slice_dims)
        and not numbers.operand_batching_dims
        and all(params["slice_sizes"][axis] == shape[axis] for axis in whole)
        and params["mode"] in _OUT_OF_BOUNDS_IS_CLAMPED
    )
    if not known:
        return None
    ends = np.array([shape[axis] - 1 for axis in indexed])
    offsets = numbers.offset_dims
    num_batch = len(_output(equation).shape) - len(whole)
    whole_at = tuple(range(num_batch, num_batch + len(whole)))

    def gather(a: Any, indices: Any) -> Any:
        inside = np.clip(indices.astype(np.int64), 0, ends)
        taken = a.transpose(*indexed, *whole)[tuple(np.moveaxis(inside, -1, 0))]
        return np.moveaxis(taken, whole_at, offsets)

    return gather


@_makes("select_n")
def _select(equation: Any) -> Form | None:
    which = _input(equation)
    if which.dtype != np.bool_ or len(equation.invars) != 3:
        return None
    if not which.shape:
        return lambda which, a, b: b if which else a
    return lambda which, a, b: np.where(which, b, a)


# Sums.


@_makes("reduce_sum")
def _reduce_sum(equation: Any) -> Form:
    axes = tuple(equation.params["axes"])
    dtype = np.dtype(_output(equation).dtype)
    if not _is_float(dtype):
        return lambda a: a.sum(axis=axes, dtype=dtype)
    return _in_float32(lambda a: a.sum(axis=axes), dtype)


@_makes("reduce_max", "reduce_min")
def _reduce_extreme(equation: Any) -> Form | None:
    axes = tuple(equation.params["axes"])
    if any(_input(equation).shape[axis] == 0 for axis in axes):
        return None
    reduce = np.max if equation.primitive.name == "reduce_max" else np.min
    return lambda a: reduce(a, axis=axes)


@_makes("dot_general")
def _dot_general(equation: Any) -> Form | None:
    """16-bit operands are multiplied and summed in float32, as tensor cores do."""
    (left_summed, right_summed), (left_batch, right_batch) = equation.params[
        "dimension_numbers"
    ]
    left = _input(equation)
    right = _input(equation, 1)
    aval = _output(equation)
    if any(not _is_float(x.dtype) or x.dtype.itemsize > 4 for x in (left, right, aval)):
        return None
    left_free = _others(left.shape, [*left_batch, *left_summed])
    right_free = _others(right.shape, [*right_batch, *right_summed])
    batch = [left.shape[axis] for axis in left_batch]
    summed = math.prod(left.shape[axis] for axis in left_summed)
    rows = math.prod(left.shape[axis] for axis in left_free)
    columns = math.prod(right.shape[axis] for axis in right_free)
    left_axes = [*left_batch, *left_free, *left_summed]
    right_axes = [*right_batch, *right_summed, *right_free]

    def multiply(a: Any, b: Any) -> np.ndarray:
        a = a.astype(np.float32).transpose(left_axes)
        b = b.astype(np.float32).transpose(right_axes)
        product = a.reshape(*batch, rows, summed) @ b.reshape(*batch, summed, columns)
        return product.reshape(aval.shape).astype(aval.dtype)

    return multiply


def _others(shape: Sequence[int], axes: Sequence[int]) -> list[int]:
    return [axis for axis in range(len(shape)) if axis not in axes]
