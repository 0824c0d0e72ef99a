"""Flash Linear Attention's four delta-rule ops made of jfla's: its arguments in, PyTorch tensors with gradients out.

`install` puts them in the place of FLA's own in `fla.ops.kda` and `fla.ops.gated_delta_rule`, before a test module
imports them from there. Tensors cross by DLPack, gradients come from `jax.vjp`, and `CALLS` has the implementation of
every call.
"""

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch
from fla_table import Call

import jfla

Arrays = dict[str, jax.Array]
Tensors = dict[str, torch.Tensor]

OPS = {
    "fla.ops.kda": {
        "chunk_kda": jfla.chunk_kda,
        "fused_recurrent_kda": jfla.recurrent_kda,
    },
    "fla.ops.gated_delta_rule": {
        "chunk_gated_delta_rule": jfla.chunk_gdn,
        "fused_recurrent_gated_delta_rule": jfla.recurrent_gdn,
    },
}
CALLS: list[Call] = []  # of the running test


class NotSupported(NotImplementedError):
    """jfla has no counterpart of a call; the message is the reason."""


@dataclasses.dataclass(frozen=True)
class Arguments:
    """What FLA's ops take beside q, k, v, g and beta, by FLA's names and with its defaults.

    `safe_gate`, `chunk_size` and `disable_recompute` choose among kernels of FLA and change no result: they are read
    and dropped. `cu_seqlens_cpu` is `cu_seqlens` again.
    """

    scale: float | None = None
    initial_state: torch.Tensor | None = None
    output_final_state: bool = False
    use_qk_l2norm_in_kernel: bool = False
    use_gate_in_kernel: bool = False
    A_log: torch.Tensor | None = None
    dt_bias: torch.Tensor | None = None
    use_beta_sigmoid_in_kernel: bool = False
    allow_neg_eigval: bool = False
    lower_bound: float | None = None
    cu_seqlens: torch.Tensor | None = None
    cu_seqlens_cpu: torch.Tensor | None = None
    state_v_first: bool | None = None
    safe_gate: bool = False
    chunk_size: int | None = None
    disable_recompute: bool = False


def arguments(named: dict[str, Any]) -> Arguments:
    """The arguments of a call. Raises `NotSupported` for one that jfla has no counterpart of."""
    named = dict(named)
    if "transpose_state_layout" in named:  # the old name of `state_v_first`
        if named.get("state_v_first") is not None:
            raise ValueError(
                "transpose_state_layout and state_v_first are one argument"
            )
        warnings.warn(
            "transpose_state_layout is state_v_first", DeprecationWarning, stacklevel=3
        )
        named["state_v_first"] = named.pop("transpose_state_layout")
    known = {field.name for field in dataclasses.fields(Arguments)}
    if unknown := sorted(named.keys() - known):
        raise NotSupported(f"no counterpart of {', '.join(unknown)}")
    return Arguments(**named)


def to_jax(x: torch.Tensor) -> jax.Array:
    """The tensor's memory as an array."""
    if x.is_cuda:
        torch.cuda.synchronize()  # DLPack hands no stream from PyTorch to JAX
    return jax.dlpack.from_dlpack(x.detach().contiguous())


def to_torch(x: jax.Array) -> torch.Tensor:
    """A copy: JAX may reuse the memory of its array."""
    return torch.from_dlpack(jax.block_until_ready(x)).clone()


class _Differentiable(torch.autograd.Function):
    """A function of named arrays that returns an output and a final state or None."""

    @staticmethod
    def forward(
        ctx: Any, function: Callable, names: tuple[str, ...], *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        arrays = {name: to_jax(x) for name, x in zip(names, tensors, strict=True)}
        (output, final), ctx.adjoint = jax.vjp(function, arrays)
        ctx.names = names
        ctx.tensors = [(x.shape, x.dtype) for x in tensors]
        return to_torch(output), None if final is None else to_torch(final)

    @staticmethod
    def backward(
        ctx: Any, *cotangents: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        arrays = tuple(None if x is None else to_jax(x) for x in cotangents)
        (found,) = ctx.adjoint(arrays)
        gradients = [
            to_torch(found[name]).reshape(shape).to(dtype)
            for name, (shape, dtype) in zip(ctx.names, ctx.tensors, strict=True)
        ]
        return None, None, *gradients


def _gate(x: Arrays, given: Arguments, heads: int, channels: tuple[int, ...]) -> Any:
    if not given.use_gate_in_kernel:
        return None
    a_log = x["A_log"].reshape(heads) if "A_log" in x else None
    dt_bias = x["dt_bias"].reshape(heads, *channels) if "dt_bias" in x else None
    if given.lower_bound is None:
        return jfla.SoftplusGate(a_log, dt_bias)
    return jfla.SigmoidGate(a_log, dt_bias, lower_bound=given.lower_bound)


def _initial_state(x: Arrays, given: Arguments) -> jax.Array | None:
    """[B, HV, K, V], or [1, S, HV, K, V] of packed sequences; in float32, as FLA's final states are."""
    state = x.get("initial_state")
    if state is None:
        return None
    state = state.astype(jnp.float32)
    if given.state_v_first:
        state = state.swapaxes(-1, -2)
    return state if given.cu_seqlens is None else state[None]


def named_arguments(op: Callable, x: Arrays, given: Arguments) -> dict[str, Any]:
    """What jfla's op takes by name."""
    time, heads = x["v"].shape[1:3]
    channels = x["q"].shape[-1:] if op.__name__.endswith("kda") else ()
    state = _initial_state(x, given)
    found: dict[str, Any] = {
        "gate": _gate(x, given, heads, channels),
        "scale": given.scale,
        "qk_norm": given.use_qk_l2norm_in_kernel,
        "initial_state": state,
        "return_final_state": given.output_final_state,
    }
    if given.use_beta_sigmoid_in_kernel:
        found["beta_max"] = 2.0 if given.allow_neg_eigval else 1.0
    if given.cu_seqlens is not None:
        lengths = to_jax(given.cu_seqlens.int())
        found["segment_ids"] = jfla.segment_ids_from_cu_seqlens(lengths, time)
        if given.output_final_state or state is not None:
            found["num_segments"] = len(lengths) - 1
    return found


def _tensors(given: Arguments, named: dict[str, torch.Tensor | None]) -> Tensors:
    """All that a call has gradients of. A call of GDN may leave out g and beta."""
    v = named["v"]
    assert v is not None
    heads = v.shape[:3]
    if named["g"] is None:
        named["g"] = torch.zeros(heads, device=v.device)
    if named["beta"] is None:
        named["beta"] = torch.ones(heads, device=v.device)
    named["initial_state"] = given.initial_state
    if given.use_gate_in_kernel:
        named |= {"A_log": given.A_log, "dt_bias": given.dt_bias}
    return {name: x for name, x in named.items() if x is not None}


def _main(x: Arrays) -> list[jax.Array]:
    return [x[name] for name in ("q", "k", "v", "g", "beta")]


def _note(op: Callable, x: Arrays, named: dict[str, Any]) -> None:
    """Appends to CALLS. Raises `NotSupported` where a named implementation refuses the call."""
    try:
        choice = jfla.explain(op, *_main(x), **named)
    except NotImplementedError as refusal:
        raise NotSupported(str(refusal)) from refusal
    reason = choice.reasons.get("pallas", "")
    CALLS.append(Call(op.__name__, choice.implementation, reason))


def adapted(op: Callable, implementation: str | None) -> Callable:
    """jfla's `op` with the interface of FLA's op of the same form."""

    def call(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor | None = None,
        beta: torch.Tensor | None = None,
        **rest: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        given = arguments(rest)
        tensors = _tensors(given, {"q": q, "k": k, "v": v, "g": g, "beta": beta})

        def named(x: Arrays) -> dict[str, Any]:
            return named_arguments(op, x, given) | {"implementation": implementation}

        @jax.jit
        def function(x: Arrays) -> tuple[jax.Array, jax.Array | None]:
            output, final = op(*_main(x), **named(x))
            if final is not None and given.cu_seqlens is not None:
                final = final[0]
            if final is not None and given.state_v_first:
                final = final.swapaxes(-1, -2)
            return output, final

        arrays = {name: to_jax(x) for name, x in tensors.items()}
        _note(op, arrays, named(arrays))
        if op.__name__.startswith("chunk"):
            return _Differentiable.apply(function, tuple(tensors), *tensors.values())
        # FLA's recurrent ops have no backward. Differentiated, jfla's run the definition and not the kernel.
        output, final = function(arrays)
        return to_torch(output), None if final is None else to_torch(final)

    return call


def install(modules: dict[str, Any], implementation: str | None) -> None:
    """Replaces the ops in FLA's packages, which `modules` has by name."""
    for package, ops in OPS.items():
        for name, op in ops.items():
            setattr(modules[package], name, adapted(op, implementation))
