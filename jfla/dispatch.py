"""Chooses the implementation of a call, can be asked why, and runs it. Backends are imported with their first call."""

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

from jfla._inputs.validate import DEFAULTS, validate, validate_recurrent
from jfla.pallas import support, trial
from jfla.pallas.context import interpreting, target
from jfla.pallas.dims import dims_of
from jfla.pallas.heuristics import decode_v_block, schedule
from jfla.pallas.padding import pad_channels, padded_sizes, without_padded_channels
from jfla.parallel import dims
from jfla.parallel.explicit_time import split_by_type
from jfla.parallel.split import why_gathered
from jfla.types import OPS, DeltaRuleOutput, Form, Implementation, Inputs, Op, Options

_LOG = logging.getLogger("jfla")


@dataclasses.dataclass(frozen=True)
class Choice:
    """Which implementation a call takes, and why not the others.

    **Fields:** `implementation`, "pallas" or "xla"; `reasons`, for each that was not taken, the reason; `detail`, what
    else there is to know about the one that is; `by_platform`, whether "pallas" is lowered for CUDA alone, because the
    arrays are traced and only the lowering knows where they are: any other platform takes "xla".

    >>> import jax, jfla
    >>> x, beta = jax.ShapeDtypeStruct((1, 64, 2, 96), "float32"), jax.ShapeDtypeStruct((1, 64, 2), "float32")
    >>> choice = jfla.explain(jfla.chunk_kda, x, x, x, x, beta)
    >>> print(choice)
    chunk_kda takes "xla": plain JAX, on every device
      not "pallas": q is float32; the kernels take bfloat16 and float16
    """

    name: str
    implementation: Implementation
    reasons: dict[str, str]
    detail: str
    by_platform: bool = False

    def __str__(self) -> str:
        lines = [f'{self.name} takes "{self.implementation}": {self.detail}']
        lines += [f'  not "{name}": {reason}' for name, reason in self.reasons.items()]
        return "\n".join(lines)


def choose(
    form: Form,
    inputs: Inputs,
    options: Options,
    wanted: Implementation | None,
    compiles: bool = False,
) -> Choice:
    """The choice for a validated call; one that is asked for by name never falls back to another.

    `compiles` is whether kernels that were never run on a GPU like this may be tried out: see `jfla.pallas.trial`.

    **Raises:** `NotImplementedError` with the reason when the implementation asked for by name cannot take the call.
    """
    name = f"{form}_{options.op.name}"
    portable = "plain JAX, on every device"
    if wanted == "xla":
        return Choice(
            name, "xla", {"pallas": 'implementation="xla" was asked for'}, portable
        )
    reason = support.unsupported(form, inputs, options)
    if reason is None and wanted is None:
        reason = trial.refused(form, inputs, options, compiles)
    if reason is None:
        by_platform = _by_platform(inputs, wanted)
        detail = _kernels_detail(inputs, by_platform)
        if form == "chunk":
            sizes = padded_sizes(inputs).items()
            detail += "".join(
                f", {letter} = {size} padded to {to}" for letter, (size, to) in sizes
            )
        named = (
            dims.inputs_of(options)
            if form == "chunk"
            else dims.recurrent_inputs_of(inputs)
        )
        gathered = why_gathered((named,), (inputs,))
        if gathered is not None:
            detail += f"; gathered, every device runs the whole call: {gathered}"
        return Choice(name, "pallas", _why_not_xla(wanted), detail, by_platform)
    if wanted == "pallas":
        raise NotImplementedError(
            f'implementation="pallas" cannot take this call: {reason}'
        )
    return Choice(name, "xla", {"pallas": reason}, portable)


def _why_not_xla(wanted: Implementation | None) -> dict[str, str]:
    if wanted == "pallas":
        return {"xla": 'implementation="pallas" was asked for'}
    return {"xla": "the kernels take this call"}


def _by_platform(inputs: Inputs, wanted: Implementation | None) -> bool:
    """Whether the platform is known only when the call is lowered."""
    if interpreting() or wanted == "pallas":
        return False
    return support.is_traced(inputs) or target() is not None


def _kernels_detail(inputs: Inputs, by_platform: bool) -> str:
    if interpreting():
        return "kernels in interpret mode"
    detail = support.KERNELS[support.machine_of(inputs)]
    if by_platform:
        detail += " where it is lowered for CUDA, elsewhere plain JAX"
    if not support.is_measured(inputs):
        detail += "; compiled, not measured on this GPU"
    return detail


def explain(
    function: Callable[..., DeltaRuleOutput], *args: Any, **kwargs: Any
) -> Choice:
    """Which implementation `function(*args, **kwargs)` takes here, and why; nothing is computed.

    **Arguments:**

    - `function`: `jfla.chunk_kda`, `jfla.chunk_gdn`, `jfla.recurrent_kda` or `jfla.recurrent_gdn`.
    - the others: those of the call; arrays or `jax.ShapeDtypeStruct`s, which count as lying on the default device.

    **Returns:** a `Choice`.

    **Raises:** what the call would raise for bad arguments; `ValueError` for another function.

    >>> import jax, jfla
    >>> x, beta = jax.numpy.ones((1, 1, 2, 16)), jax.numpy.ones((1, 1, 2))
    >>> jfla.explain(jfla.recurrent_gdn, x, x, x, -beta, beta).implementation
    'xla'
    """
    name = getattr(function, "__name__", "")
    form, _, op_name = name.partition("_")
    module = getattr(function, "__module__", "")
    if module != "jfla.api" or form not in ("chunk", "recurrent") or op_name not in OPS:
        raise ValueError(
            "function must be jfla.chunk_kda, chunk_gdn, recurrent_kda or recurrent_gdn, "
            f"got {function!r}"
        )
    inputs, options, wanted = _validated(OPS[op_name], form, args, kwargs)
    return choose(form, inputs, options, wanted)


def _validated(
    op: Op,
    form: Form,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[Inputs, Options, Implementation | None]:
    arguments: dict[str, Any] = DEFAULTS | kwargs
    if form == "recurrent":
        arguments = {"return_states": False, "state_slots": None} | arguments
    check = validate if form == "chunk" else validate_recurrent
    inputs, options = check(op, *args, **arguments)
    return inputs, options, arguments["implementation"]


def run(op: Op, form: Form, *args: Any, **kwargs: Any) -> DeltaRuleOutput:
    """Validates a call of a public op, chooses, logs the choice and runs it."""
    inputs, options, wanted = _validated(op, form, args, kwargs)

    def chosen(inputs: Inputs, options: Options) -> DeltaRuleOutput:
        choice = choose(form, inputs, options, wanted, compiles=True)
        _LOG.debug("%s", choice)
        return _RUNNERS[form, choice.implementation](inputs, options, choice)

    return (split_by_type(chosen) if form == "chunk" else chosen)(inputs, options)


def _chunk_xla(inputs: Inputs, options: Options, choice: Choice) -> DeltaRuleOutput:
    from jfla.xla import op as xla

    return xla.run(inputs, options)


def _recurrent_xla(inputs: Inputs, options: Options, choice: Choice) -> DeltaRuleOutput:
    from jfla.reference import recurrent

    return recurrent.run(inputs, options)


def _chunk_pallas(inputs: Inputs, options: Options, choice: Choice) -> DeltaRuleOutput:
    from jfla import chunk_op

    padded = pad_channels(inputs, options.op.scalar_gate)
    plan = chunk_op.Plan(
        schedule(
            options.op,
            dims_of(padded, options),
            support.num_sms(inputs),
            support.smem_bytes(inputs),
            support.machine_of(inputs),
            support.bytes_per_us(inputs),
            exclusive=support.exclusive(inputs),
        ),
        interpret=interpreting(),
        by_platform=choice.by_platform,
    )
    return without_padded_channels(chunk_op.run(padded, options, plan), inputs)


def _recurrent_pallas(
    inputs: Inputs, options: Options, choice: Choice
) -> DeltaRuleOutput:
    """The kernel is for decoding: what is differentiated is the definition, in any mode."""
    from jfla.pallas.common import decode
    from jfla.reference import recurrent

    sizes = dims_of(inputs)
    num_sms = support.num_sms(inputs)
    plan = decode.DecodePlan(
        decode_v_block(sizes, num_sms),
        interpret=interpreting(),
        by_platform=choice.by_platform,
        num_sms=num_sms,
        machine=support.machine_of(inputs),
    )
    return decode.decode(inputs, options, recurrent.run, plan)


_RUNNERS = {
    ("chunk", "xla"): _chunk_xla,
    ("recurrent", "xla"): _recurrent_xla,
    ("chunk", "pallas"): _chunk_pallas,
    ("recurrent", "pallas"): _recurrent_pallas,
}
