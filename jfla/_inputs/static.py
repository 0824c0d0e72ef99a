"""Checks of static arguments and of the gate's kind: each raises ValueError with the rule and what came."""

import math
import numbers
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jfla.gates import SigmoidGate, SoftplusGate
from jfla.types import CHUNK

_IMPLEMENTATIONS = (None, "pallas", "xla")


def _is_state_dtype(x: Any) -> bool:
    try:
        return jnp.dtype(x) in (jnp.float32, jnp.bfloat16)
    except TypeError:
        return False


def _is_number(x: Any) -> bool:
    return isinstance(x, numbers.Real) and not isinstance(x, bool) and math.isfinite(x)


def _is_int(x: Any) -> bool:
    return isinstance(x, (int, np.integer)) and not isinstance(x, bool)


def _is_flag(x: Any) -> bool:
    return isinstance(x, (bool, np.bool_))


_STATIC_RULES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "beta_max": ("None or a static number above 0 (1.0, or 2.0 for negative eigenvalues)",
                 lambda x: x is None or (_is_number(x) and x > 0)),
    "qk_norm": ("True or False", _is_flag),
    "scale": ("None or a static finite number", lambda x: x is None or _is_number(x)),
    "return_final_state": ("True or False", _is_flag),
    "return_states": ("True or False", _is_flag),
    "return_states_every": (f"None or a static multiple of {CHUNK}",
                            lambda x: x is None or (_is_int(x) and bool(x >= CHUNK and x % CHUNK == 0))),
    "state_dtype": ("None, float32 or bfloat16", lambda x: x is None or _is_state_dtype(x)),
    "num_segments": ("None or a static int of at least 1",
                     lambda x: x is None or (_is_int(x) and bool(x >= 1))),
    "implementation": (f"one of {_IMPLEMENTATIONS}",
                       lambda x: x is None or (isinstance(x, str) and x in _IMPLEMENTATIONS)),
}  # fmt: skip


def check_static(static: dict[str, Any]) -> None:
    for name, x in static.items():
        rule, holds = _STATIC_RULES[name]
        if not holds(x):
            raise ValueError(f"{name} must be {rule}, got {x!r}")


def check_sequence_axis(axis: Any) -> None:
    """An axis over which shard_map has split the arrays: elsewhere nobody has only a stretch of time."""
    names = axis if isinstance(axis, tuple) else (axis,)
    split = jax.sharding.get_abstract_mesh().manual_axes
    if axis is not None and not set(names) <= set(split):
        raise ValueError(
            "sequence_axis must be None or an axis of the shard_map around the call "
            f"({', '.join(map(repr, split)) or 'there is none'}), got {axis!r}"
        )


def check_gate_type(gate: Any) -> None:
    if gate is None:
        return
    if not isinstance(gate, (SoftplusGate, SigmoidGate)):
        raise ValueError(
            f"gate must be None, a SoftplusGate or a SigmoidGate, got {type(gate).__name__}"
        )
    if isinstance(gate, SoftplusGate) and gate.a_log is None:
        raise ValueError(
            "gate.a_log must be an array [HV] for a SoftplusGate, got None"
        )
    if isinstance(gate, SigmoidGate) and not (
        _is_number(gate.lower_bound) and gate.lower_bound < 0
    ):
        raise ValueError(
            f"gate.lower_bound must be a static number below 0, got {gate.lower_bound!r}"
        )
