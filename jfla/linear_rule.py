"""Derivatives in both modes of an op whose backward is in closed form.

`jax.custom_vjp` takes forward mode away, and a `jax.custom_jvp` alone has JAX transpose the tangents instead of calling
the closed form. Here the tangent is one primitive, linear in its operands, between the two:

    map         d_output = J(inputs) d_inputs           by `jax.jvp` of the plain op: forward mode
    transposed  d_inputs = J(inputs)^T d_output         the closed-form backward from what the forward left

Each is the other's transpose. Its own derivative along the inputs is JAX's derivative of the plain op, to any order.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
from jax.custom_derivatives import SymbolicZero, zero_from_primal
from jax.extend.core import Primitive, unmapped_aval
from jax.interpreters import ad, batching, mlir

from jfla.parallel.varying import vary_with


class Rule(Protocol):
    """The static part of an op and its four functions of pytrees: hashable, equal for equal calls."""

    def primal(self, inputs: Any) -> Any:
        """The output of a call that is not differentiated."""
        ...

    def forward(self, inputs: Any) -> tuple[Any, Any]:
        """The output and the residuals, which carry the names that a checkpoint policy looks for."""
        ...

    def backward(self, inputs: Any, residuals: Any, d_output: Any) -> Any:
        """Cotangents of the inputs, None for those that have none."""
        ...

    def plain(self, inputs: Any) -> Any:
        """The output by operations that JAX differentiates in every mode."""
        ...


def differentiable(rule: Rule, inputs: Any) -> Any:
    """The output of `rule` at a pytree of inputs; under shard_map everything varies over the axes of any of them."""
    return _primal(rule, vary_with(inputs, *jax.tree.leaves(inputs)))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _primal(rule: Rule, inputs: Any) -> Any:
    return rule.primal(inputs)


@functools.partial(_primal.defjvp, symbolic_zeros=True)
def _primal_jvp(
    rule: Rule, primals: tuple[Any], tangents: tuple[Any]
) -> tuple[Any, Any]:
    output, residuals = rule.forward(*primals)
    return output, _tangent(rule, (*primals, residuals), *tangents, output)


def _tangent(rule: Rule, kept: tuple[Any, Any], d_inputs: Any, output: Any) -> Any:
    """The tangent of `output`; inputs with a symbolic zero for a tangent are constants."""
    kept_leaves, kept_tree = jax.tree.flatten(kept)
    output_leaves, output_tree = jax.tree.flatten(output)
    tangents = jax.tree.leaves(d_inputs)
    moving = tuple(i for i, dx in enumerate(tangents) if not _is_zero(dx))
    jacobian = _Jacobian(rule, kept_tree, output_tree, moving)
    d_output = _jacobian_p.bind(
        *kept_leaves,
        *(tangents[i] for i in moving),
        jacobian=jacobian,
        out_avals=tuple(jax.typeof(x) for x in output_leaves),
    )
    return output_tree.unflatten(d_output)


def _is_zero(tangent: Any) -> bool:
    return type(tangent) is SymbolicZero or tangent.dtype == jax.dtypes.float0


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def opaque_forward(forward: Callable, rule: Rule, inputs: Any) -> tuple[Any, Any]:
    """`forward(rule, inputs)`, for a `Rule.forward` of kernels, which JAX cannot differentiate a second time."""
    return forward(rule, inputs)


@functools.partial(opaque_forward.defjvp, symbolic_zeros=True)
def _opaque_forward_jvp(
    forward: Callable,
    rule: Rule,
    primals: tuple[Any],
    tangents: tuple[Any],
) -> tuple[Any, Any]:
    output, residuals = opaque_forward(forward, rule, *primals)
    # Residuals follow from the inputs, along which alone `_Jacobian` is differentiated.
    still = zero_from_primal(residuals, symbolic_zeros=True)
    return (output, residuals), (
        _tangent(rule, (*primals, residuals), *tangents, output),
        still,
    )


# The primitive: operands are the leaves of (inputs, residuals), then those that it is linear in.


@dataclasses.dataclass(frozen=True)
class _Jacobian:
    """The map of the tangents of some leaves of the inputs, `moving`, or its transpose, under any number of vmaps."""

    rule: Rule
    kept: jax.tree_util.PyTreeDef
    output: jax.tree_util.PyTreeDef
    moving: tuple[int, ...]
    transposed: bool = False
    # of every leaf kept, the inner vmap first
    vmaps: tuple[tuple[int | None, ...], ...] = ()

    def split(self, operands: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        """What is kept, and what the map is linear in."""
        return operands[: self.kept.num_leaves], operands[self.kept.num_leaves :]

    def __call__(self, *operands: Any) -> Sequence[Any]:
        """The map; the transposed one by the rule's backward."""
        return self._vmapped(self._backward if self.transposed else self._plain)(
            *operands
        )

    def plain(self, *operands: Any) -> Sequence[Any]:
        """The same by operations that JAX differentiates, without the backward."""
        return self._vmapped(self._plain)(*operands)

    def _vmapped(self, function: Callable) -> Callable:
        for kept_axes in self.vmaps:
            linear = self.output.num_leaves if self.transposed else len(self.moving)
            function = jax.vmap(function, in_axes=(*kept_axes, *[0] * linear))
        return function

    def _backward(self, *operands: Any) -> Sequence[Any]:
        leaves, d_output = self.split(operands)
        inputs, residuals = self.kept.unflatten(leaves)
        d_inputs = self.rule.backward(
            inputs, residuals, self.output.unflatten(d_output)
        )
        # A cotangent of None, that of integers, has a leaf to stand for.
        d_leaves = jax.tree.structure(inputs).flatten_up_to(d_inputs)
        return [d_leaves[i] for i in self.moving]

    def _plain(self, *operands: Any) -> Sequence[Any]:
        leaves, linear = self.split(operands)

        def output(*moved: jax.Array) -> list[jax.Array]:
            at = list(leaves)
            for i, x in zip(self.moving, moved, strict=True):
                at[i] = x
            inputs, _ = self.kept.unflatten(at)
            return jax.tree.leaves(self.rule.plain(inputs))

        moved = [leaves[i] for i in self.moving]
        if not self.transposed:
            return jax.jvp(output, moved, list(linear))[1]
        return jax.vjp(output, *moved)[1](list(linear))


def _impl(
    *operands: Any, jacobian: _Jacobian, out_avals: tuple[Any, ...]
) -> Sequence[Any]:
    return jacobian.plain(*operands)


def _derivative(
    jacobian: _Jacobian,
    operands: Sequence[Any],
    tangents: Sequence[Any],
    out_avals: Any,
) -> list[Any]:
    """Linear in its last operands; along the inputs by JAX. The residuals follow from the inputs."""
    kept, _ = jacobian.split(operands)
    d_kept, d_linear = jacobian.split(tangents)
    d_out = [ad.Zero(aval) for aval in out_avals]
    if any(type(t) is not ad.Zero for t in d_linear):
        d_linear = map(ad.instantiate_zeros, d_linear)
        d_out = _jacobian_p.bind(
            *kept, *d_linear, jacobian=jacobian, out_avals=out_avals
        )
    inputs = jacobian.kept.children()[0].num_leaves
    moving = [i for i in range(inputs) if type(d_kept[i]) is not ad.Zero]
    if moving:

        def along(*moved: jax.Array) -> Sequence[Any]:
            at = dict(zip(moving, moved, strict=True))
            return jacobian.plain(*(at.get(i, x) for i, x in enumerate(operands)))

        at = [operands[i] for i in moving]
        _, d_along = jax.jvp(along, at, [d_kept[i] for i in moving])
        d_out = [ad.add_tangents(a, b) for a, b in zip(d_out, d_along, strict=True)]
    return d_out


def _jvp(
    primals: Sequence[Any],
    tangents: Sequence[Any],
    *,
    jacobian: _Jacobian,
    out_avals: Any,
) -> tuple[Sequence[Any], Sequence[Any]]:
    out = _jacobian_p.bind(*primals, jacobian=jacobian, out_avals=out_avals)
    return out, _derivative(jacobian, primals, tangents, out_avals)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _closed_form(jacobian: _Jacobian, operands: tuple[Any, ...]) -> list[Any]:
    """The map, if transposed by the rule's backward: not in the primitive, which declares no effects."""
    return list(jacobian(*operands))


@functools.partial(_closed_form.defjvp, symbolic_zeros=True)
def _closed_form_jvp(
    jacobian: _Jacobian,
    primals: tuple[Any],
    tangents: tuple[Any],
) -> tuple[list[Any], list[Any]]:
    out = _closed_form(jacobian, *primals)
    zeros = [ad.Zero(t.aval) if type(t) is SymbolicZero else t for t in tangents[0]]
    d_out = _derivative(jacobian, *primals, zeros, tuple(map(jax.typeof, out)))
    return out, [ad.instantiate_zeros(d) for d in d_out]


def _transpose(
    cotangents: Sequence[Any],
    *operands: Any,
    jacobian: _Jacobian,
    out_avals: Any,
) -> list[Any]:
    kept, linear = jacobian.split(operands)
    transposed = dataclasses.replace(jacobian, transposed=not jacobian.transposed)
    d_linear = _closed_form(transposed, (*kept, *map(ad.instantiate_zeros, cotangents)))
    asked = [d if ad.is_undefined_primal(x) else None for d, x in zip(d_linear, linear)]
    return [None] * len(kept) + asked


def _batch(
    operands: Sequence[Any],
    axes: Sequence[Any],
    *,
    jacobian: _Jacobian,
    out_avals: Any,
) -> tuple[Sequence[Any], list[int]]:
    """One more vmap around the map: over every linear operand, and over what is kept where it has the axis."""
    size = next(x.shape[axis] for x, axis in zip(operands, axes) if axis is not None)
    n_kept = jacobian.kept.num_leaves
    kept_axes = tuple(None if axis is None else 0 for axis in axes[:n_kept])
    in_front = [
        x if axis is None and i < n_kept else batching.bdim_at_front(x, axis, size)
        for i, (x, axis) in enumerate(zip(operands, axes))
    ]
    out = _jacobian_p.bind(
        *in_front,
        jacobian=dataclasses.replace(jacobian, vmaps=(*jacobian.vmaps, kept_axes)),
        out_avals=tuple(unmapped_aval(size, 0, aval) for aval in out_avals),
    )
    return out, [0] * len(out)


_jacobian_p = Primitive("jfla_jacobian")
_jacobian_p.multiple_results = True
_jacobian_p.def_impl(_impl)
_jacobian_p.def_abstract_eval(lambda *_, jacobian, out_avals: out_avals)
ad.primitive_jvps[_jacobian_p] = _jvp
ad.primitive_transposes[_jacobian_p] = _transpose
batching.primitive_batchers[_jacobian_p] = _batch
mlir.register_lowering(_jacobian_p, mlir.lower_fun(_impl, multiple_results=True))
