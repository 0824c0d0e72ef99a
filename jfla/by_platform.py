"""A function for each platform, of which only that for the platform of the lowering is traced.

`jax.lax.platform_dependent` traces all of its branches, which are whole implementations of an op. Here one is traced at
once, that of the default backend or of the described GPU, and says what the others return; they are traced if they are
lowered.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import Primitive, jaxpr_as_fun, unmapped_aval
from jax.interpreters import batching, mlir

from jfla.pallas.context import target


def by_platform(*args: Any, default: Callable, **functions: Callable) -> Any:
    """`functions[platform](*args)` where that platform has a function, else `default(*args)`.

    All return the same shapes and dtypes and have no derivative rule. What is traced late has the matmul precision of
    the call, and no other of its contexts.
    """
    backend = "gpu" if target() is not None else jax.default_backend()
    platform = "cuda" if backend == "gpu" else backend
    likely = functions.get(platform, default)
    jaxpr, shapes = jax.make_jaxpr(likely, return_shape=True)(*args)
    leaves, structure = jax.tree.flatten(args)
    result = jax.tree.structure(shapes)
    precise = jax.default_matmul_precision(jax.config.jax_default_matmul_precision)

    def branch(function: Callable) -> Callable:
        if function is likely:
            return jaxpr_as_fun(jaxpr)

        @precise
        def flat(*leaves: Any) -> Sequence[Any]:
            return jax.tree.leaves(function(*structure.unflatten(leaves)))

        return functools.partial(
            _late_p.bind, function=flat, out_avals=tuple(jaxpr.out_avals)
        )

    branches = {name: branch(function) for name, function in functions.items()}
    return result.unflatten(
        lax.platform_dependent(*leaves, default=branch(default), **branches)
    )


def _impl(*operands: Any, function: Callable, out_avals: Any) -> Sequence[Any]:
    del out_avals
    return function(*operands)


def _batch(
    operands: Sequence[Any], axes: Sequence[Any], *, function: Callable, out_avals: Any
) -> tuple[Sequence[Any], list[int]]:
    size = next(x.shape[axis] for x, axis in zip(operands, axes) if axis is not None)
    out = _late_p.bind(
        *operands,
        function=jax.vmap(function, in_axes=tuple(axes)),
        out_avals=tuple(unmapped_aval(size, 0, aval) for aval in out_avals),
    )
    return out, [0] * len(out)


_late_p = Primitive("jfla_traced_when_lowered")
_late_p.multiple_results = True
_late_p.def_impl(_impl)
_late_p.def_abstract_eval(lambda *_, function, out_avals: out_avals)
batching.primitive_batchers[_late_p] = _batch
mlir.register_lowering(_late_p, mlir.lower_fun(_impl, multiple_results=True))
