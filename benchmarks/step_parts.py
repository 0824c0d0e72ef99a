"""Time of the parts of a training step: the op and the optimizer, each alone, and what is left of the step."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Int

from benchmarks import measure
from benchmarks.records import Record
from jfla import nn

REPEATS = 5


def parts(
    model: nn.DeltaLM,
    tokens: Int[Array, "B T"],
    optimizer: optax.GradientTransformation,
    opt_state: Any,
    step_ms: float,
) -> Record:
    """Milliseconds of a step: `step` (given), `op`, `optimizer`, and `rest`: projections, convolutions, norms, head.

    The op, forward and backward, is timed on what the layers hand it at these tokens, layers in turn, and counted once
    a layer.
    """
    calls = op_calls(model, tokens)
    run = jax.jit(functools.partial(_forward_and_backward, model))
    of_op = measure.timing(run, jax.block_until_ready, calls, REPEATS)
    params = nnx.state(model, nnx.Param)

    @jax.jit
    def update(x: tuple[Any, Any]) -> Any:
        grads, opt_state = x
        updates, opt_state = optimizer.update(grads, opt_state, grads)
        return optax.apply_updates(grads, updates), opt_state

    of_optimizer = measure.timing(
        update, jax.block_until_ready, [(params, opt_state)], REPEATS
    )
    op_ms = of_op.ms * len(calls)
    return {
        "step_ms": step_ms,
        "op_ms": round(op_ms, 4),
        "optimizer_ms": round(of_optimizer.ms, 4),
        "rest_ms": round(step_ms - op_ms - of_optimizer.ms, 4),
        "method": of_op.method,
    }


def op_calls(model: nn.DeltaLM, tokens: Int[Array, "B T"]) -> list[Any]:
    """What every layer's op gets: (q, k, v, gate's input, logits of beta), the gate; and a cotangent of its output."""
    x = model.embed(tokens).astype(model.config.dtype)
    calls = []
    for block in model.blocks:
        call, x = _call_and_output(*nnx.split(block), x)
        calls.append(call)
    return jax.block_until_ready(calls)


@functools.partial(jax.jit, static_argnums=0)
def _call_and_output(graph: Any, state: Any, x: Array) -> tuple[Any, Array]:
    """Of a block: what its op gets and a cotangent; and what leaves the block. Blocks of one kind share a program."""
    block = nnx.merge(graph, state)
    mixer: Any = block.mixer
    y = block.mixer_norm(x)
    q, _ = mixer.q_conv(mixer.q_proj(y))
    k, _ = mixer.k_conv(mixer.k_proj(y))
    v, _ = mixer.v_conv(mixer.v_proj(y))
    d_output = jax.random.normal(jax.random.key(0), v.shape, v.dtype)
    arrays = (q, k, v, mixer._decay_input(y), mixer.b_proj(y))
    return ((arrays, mixer._gate()), d_output), block(x, None, None)[0]


def _forward_and_backward(model: nn.DeltaLM, call: Any) -> Any:
    """As in a layer: the output is needed by what follows, the cotangents by what came before."""
    arguments, d_output = call
    mixer: Any = model.blocks[0].mixer
    op = mixer._op(recurrent=False)

    def output(arrays: tuple[Array, ...], gate: Any) -> Array:
        implementation = model.config.implementation
        out = op(
            *arrays,
            gate=gate,
            beta_max=1.0,
            qk_norm=True,
            implementation=implementation,
        )
        return out.output

    found, adjoint = jax.vjp(output, *arguments)
    return found, adjoint(jnp.asarray(d_output, found.dtype))
