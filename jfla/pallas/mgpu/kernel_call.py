"""A call of a kernel in a program: shapes of its results at once, its code when the program is lowered.

Nothing of a kernel is traced while the program is. When it is lowered, the kernel's code is looked up or made, and a
thread compiles it while Python goes on with the next kernel.
"""

import contextvars
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jfla.pallas.context import target
from jfla.pallas.mgpu import early_compile
from jfla.pallas.mgpu.kernel_code import code_of

# Arrays to the kernel's results and, behind them, what its references are left with.
OnArrays = Callable[..., Sequence[Any]]


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class _Call:
    """A kernel that is not traced yet, and the settings of jfla and JAX with which it is to be."""

    name: str
    kernel: OnArrays
    fingerprint: str | None
    context: contextvars.Context
    x64: bool
    precision: str | None

    def __repr__(self) -> str:
        """As a program's text has it."""
        return self.name

    def lowered(self, operands: Sequence[Any]) -> jax.stages.Lowered:
        """A program that is the kernel alone."""
        described = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]

        def lower() -> jax.stages.Lowered:
            with (
                jax.enable_x64(self.x64),
                jax.default_matmul_precision(self.precision),
            ):
                traced = jax.jit(self.kernel).trace(*described)
                return traced.lower(lowering_platforms=("cuda",))

        # A context is entered once at a time, and a program may be lowered by several threads.
        return self.context.copy().run(lower)


def call(
    name: str,
    kernel: OnArrays,
    operands: Sequence[jax.Array],
    outputs: Sequence[jax.ShapeDtypeStruct],
    fingerprint: str | None,
) -> Sequence[jax.Array]:
    """`kernel(*operands)`, which has the shapes and dtypes of `outputs`.

    A kernel of the same fingerprint and operands has the same code; None says nothing of it.
    """
    deferred = _Call(
        name,
        kernel,
        fingerprint,
        contextvars.copy_context(),
        jax.config.jax_enable_x64,
        jax.config.jax_default_matmul_precision,
    )
    # The results are in the mesh of the caller, as arrays are that are made here.
    made = jax.make_jaxpr(lambda: [jnp.zeros(x.shape, x.dtype) for x in outputs])()
    return _kernel_p.bind(*operands, call=deferred, out_avals=tuple(made.out_avals))


def _results(*operands: Any, call: _Call, out_avals: Any) -> Any:
    """Inside shard_map, what a kernel makes of operands that vary over the mesh varies."""
    del call
    axes = {axis for x in operands for axis in x.manual_axis_type.varying}
    if not axes:
        return out_avals
    manual = type(operands[0].manual_axis_type)(varying=frozenset(axes))
    return tuple(x.update(manual_axis_type=manual) for x in out_avals)


def _impl(*operands: jax.Array, **params: Any) -> Sequence[jax.Array]:
    return jax.jit(functools.partial(_kernel_p.bind, **params))(*operands)


def _lower(ctx: Any, *operands: Any, call: _Call, out_avals: Any) -> Any:
    del out_avals
    # An exported program has to be readable by later versions, and Mosaic sees to that.
    if ctx.is_forward_compat():
        whole = mlir.lower_fun(jax.jit(call.kernel), multiple_results=True)
        return call.context.copy().run(whole, ctx, *operands)
    code = code_of(call.fingerprint, lambda: call.lowered(ctx.avals_in))
    early_compile.begin(code, ctx.avals_in, call.context.copy().run(target))

    # Inside shard_map only some operands may vary over the mesh; a call of XLA's takes all of them or none.
    plain = lambda avals: [ShapedArray(x.shape, x.dtype) for x in avals]
    ctx = ctx.replace(avals_in=plain(ctx.avals_in), avals_out=plain(ctx.avals_out))
    return mlir.lower_fun(code, multiple_results=True)(ctx, *operands)


_kernel_p = Primitive("jfla_kernel")
_kernel_p.multiple_results = True
_kernel_p.def_impl(_impl)
_kernel_p.def_abstract_eval(_results)
mlir.register_lowering(_kernel_p, _lower, platform="cuda")
