"""Every parameter of a module as PyTorch lays it out, and how tensors stack and split their rows."""

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import Sharding
from jaxtyping import Bool

from jfla.nn.layers.convolution import ShortConvolution
from jfla.nn.layers.moe import ExpertProjection
from jfla.nn.layers.projections import Projection
from jfla.nn.sharding import placement


class StoredTensor(NamedTuple):
    """Tensors of a checkpoint (mostly one) whose rows are those of some parameters (mostly one).

    The rows of `names`, equally many in each, behind one another are the rows of `parameters`
    behind one another. With `groups` these come in that many groups, each of which stacks its share
    of every parameter. `shape`: of the tensor where PyTorch has more axes, with a -1 in it.
    """

    names: tuple[str, ...]
    parameters: tuple[str, ...]
    groups: int = 1
    shape: tuple[int, ...] | None = None

    def under(self, names: str, parameters: str) -> "StoredTensor":
        """The same with something before its names, and before those of its parameters."""
        return StoredTensor(
            tuple(names + name for name in self.names),
            tuple(parameters + name for name in self.parameters),
            self.groups,
            self.shape,
        )


TensorTable = list[StoredTensor]


def nested(table: Iterable[StoredTensor], names: str, parameters: str) -> TensorTable:
    """A table of what a module holds, by the names in and the path from the module around it."""
    return [tensor.under(names, parameters) for tensor in table]


class TorchParameter(NamedTuple):
    """A parameter as PyTorch lays it out, told by the module that owns it.

    Linear is [out, in], Conv1d [channels, 1, W], Embedding as here, all others are flat. The
    matrices of experts stand behind one another, [E * out, in].
    """

    parameter: nnx.Param
    owner: nnx.Module

    @property
    def shape(self) -> tuple[int, ...]:
        """In PyTorch."""
        shape = self.parameter.shape
        if isinstance(self.owner, ExpertProjection):
            experts, inputs, outputs = shape
            return experts * outputs, inputs
        if isinstance(self.owner, Projection) and len(shape) > self.owner.outputs:
            inputs = self.owner.inputs
            return math.prod(shape[inputs:]), math.prod(shape[:inputs])
        if isinstance(self.owner, ShortConvolution):
            return math.prod(shape[1:]), 1, shape[0]
        return shape if self._is_embedding else (math.prod(shape),)

    def to_torch(self) -> np.ndarray:
        """The values, in PyTorch's layout."""
        rows, order = self._layout
        ordered = tuple(rows[axis] for axis in order)
        x = _transposed(self.parameter[...], ordered, order, self.shape)
        return np.asarray(x)

    def from_torch(
        self, x: np.ndarray, *, keep_float32: bool = False
    ) -> tuple[Array, Bool[Array, ""]]:
        """A tensor of `shape` as the parameter's value: in its layout, dtype and place.

        `keep_float32`: a float32 tensor is not rounded to a narrower dtype. The place is where the
        parameter lives; where it is only a shape, where the mesh puts its axes. Also whether all of
        it is finite.
        """
        old = self.parameter.get_raw_value()
        dtype = np.dtype(old.dtype)
        if keep_float32 and x.dtype == np.float32 and dtype.itemsize < x.dtype.itemsize:
            dtype = x.dtype
        rows, order = self._layout
        return _placed(self._place(old))(x, rows, order, old.shape, dtype)

    @property
    def _layout(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The axes that PyTorch's rows are divided into, and their order here. It is an involution."""
        if isinstance(self.owner, ExpertProjection):
            experts, inputs, outputs = self.parameter.shape
            return (experts, outputs, inputs), (0, 2, 1)
        axes = tuple(range(len(self.shape)))
        return self.shape, axes if self._is_embedding else axes[::-1]

    def _place(self, old: Array | jax.ShapeDtypeStruct) -> Sharding | None:
        if isinstance(old, Array):
            return old.sharding if old.committed else None
        for name in ("out_sharding", "sharding_names"):
            if self.parameter.has_metadata(name):
                return placement(self.parameter.get_metadata(name), old.shape)
        return None

    @property
    def _is_embedding(self) -> bool:
        return isinstance(self.owner, nnx.Embed)


Parameters = Mapping[str, TorchParameter]


def parameters_of(module: nnx.Module) -> dict[str, TorchParameter]:
    """Every parameter by its dotted path."""
    found = {}
    for path, node in nnx.iter_graph(module):
        if not isinstance(node, nnx.Module):
            continue
        for name, value in vars(node).items():
            if isinstance(value, nnx.Param):
                dotted = ".".join(map(str, (*path, name)))
                found[dotted] = TorchParameter(value, node)
    return found


# Laying out is left to the devices: the host takes minutes to transpose what they do in a second.
@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _transposed(
    x: Array, axes: tuple[int, ...], order: tuple[int, ...], shape: tuple[int, ...]
) -> Array:
    return x.reshape(axes).transpose(order).reshape(shape)


@functools.cache
def _placed(place: Sharding | None) -> Callable[..., tuple[Array, Bool[Array, ""]]]:
    """`_transposed` into a dtype and a place, and whether the result is finite."""

    def lay_out(
        x: Array,
        axes: tuple[int, ...],
        order: tuple[int, ...],
        shape: tuple[int, ...],
        dtype: np.dtype,
    ) -> tuple[Array, Bool[Array, ""]]:
        y = _transposed(x, axes, order, shape).astype(dtype)
        return y, jnp.all(jnp.isfinite(y))

    return jax.jit(lay_out, static_argnums=(1, 2, 3, 4), out_shardings=(place, None))


def stacked_shape(parts: list[TorchParameter]) -> tuple[int, ...]:
    """The shape of the rows of all parts behind one another."""
    rows = sum(part.shape[0] for part in parts)
    return (rows, *parts[0].shape[1:])


def stack(parts: list[np.ndarray], groups: int) -> np.ndarray:
    """The rows of all parts behind one another, group by group."""
    if len(parts) == 1:
        return parts[0]
    grouped = [part.reshape(groups, -1, *part.shape[1:]) for part in parts]
    x = np.concatenate(grouped, axis=1)
    return x.reshape(-1, *x.shape[2:])


def unstack(
    x: np.ndarray, parts: list[TorchParameter], groups: int
) -> list[np.ndarray]:
    """The inverse of `stack`."""
    if len(parts) == 1:
        return [x]
    ends = np.cumsum([part.shape[0] // groups for part in parts])
    grouped = x.reshape(groups, -1, *x.shape[1:])
    split = np.split(grouped, ends[:-1], axis=1)
    return [part.reshape(-1, *part.shape[2:]) for part in split]
