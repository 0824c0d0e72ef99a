"""Checks the arguments of all four ops by one table, and turns them into `Inputs` and `Options`."""

import dataclasses
from collections.abc import Iterator
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jax.typing import DTypeLike

from jfla._inputs.static import check_gate_type, check_sequence_axis, check_static
from jfla.gates import Gate
from jfla.pool import check_slots, is_known
from jfla.types import AxisName, Inputs, Op, Options

DEFAULTS: dict[str, Any] = {
    "gate": None,
    "beta_max": None,
    "qk_norm": False,
    "scale": None,
    "initial_state": None,
    "return_final_state": False,
    "state_dtype": None,
    "segment_ids": None,
    "num_segments": None,
    "implementation": None,
    "sequence_axis": None,
}


def validate(
    op: Op,
    *arrays: Array,
    return_states_every: int | None = None,
    **arguments: Any,
) -> tuple[Inputs, Options]:
    """The arguments of a chunked `op` as Inputs and Options. Raises ValueError naming the argument at fault."""
    check_static({"return_states_every": return_states_every})
    inputs, options = _validate(op, *arrays, **arguments, state_slots=None)
    if return_states_every is None:
        return inputs, options
    if options.sequence_axis is not None:
        raise ValueError(
            "return_states_every must be None with sequence_axis (the final state is one state then), "
            f"got {return_states_every}"
        )
    if inputs.segment_ids is not None:
        raise ValueError(
            "return_states_every must be None with segment_ids (it takes one sequence per row), "
            f"got {return_states_every}"
        )
    every = int(return_states_every)
    return inputs, dataclasses.replace(
        options, return_final_state=True, states_every=every
    )


def _validate(
    op: Op,
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    *,
    gate: Gate | None,
    beta_max: float | None,
    qk_norm: bool,
    scale: float | None,
    initial_state: Array | None,
    return_final_state: bool,
    state_dtype: DTypeLike | None,
    segment_ids: Array | None,
    num_segments: int | None,
    implementation: str | None,
    state_slots: Array | None,
    sequence_axis: AxisName | None = None,
) -> tuple[Inputs, Options]:
    """What all ops have in common."""
    static = {
        "beta_max": beta_max, "qk_norm": qk_norm, "scale": scale, "return_final_state": return_final_state,
        "state_dtype": state_dtype, "num_segments": num_segments, "implementation": implementation,
    }  # fmt: skip
    check_static(static)
    check_gate_type(gate)
    check_sequence_axis(sequence_axis)

    needed = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    optional = {
        "initial_state": initial_state,
        "segment_ids": segment_ids,
        "state_slots": state_slots,
    }
    optional |= {
        "gate.a_log": getattr(gate, "a_log", None),
        "gate.dt_bias": getattr(gate, "dt_bias", None),
    }
    optional = {name: x for name, x in optional.items() if x is not None}
    arrays = {name: _as_array(name, x) for name, x in (needed | optional).items()}
    for name, x in arrays.items():
        _check_dtype(name, x)
    _check_shapes(op, arrays, num_segments, return_final_state)
    _check_devices(arrays)
    if "state_slots" in arrays:
        _check_pool(arrays, state_dtype)
    elif "segment_ids" in arrays:
        if "initial_state" in arrays:
            num_segments = arrays["initial_state"].shape[1]
        _check_segment_ids(arrays["segment_ids"], num_segments)

    states = return_final_state or initial_state is not None
    options = Options(
        op=op,
        scale=float(arrays["q"].shape[-1] ** -0.5 if scale is None else scale),
        beta_max=None if beta_max is None else float(beta_max),
        qk_norm=bool(qk_norm),
        return_final_state=bool(return_final_state),
        num_segments=None if num_segments is None else int(num_segments),
        per_segment_state=num_segments is not None and states,
        sequence_axis=sequence_axis,
        state_dtype=_final_dtype(state_dtype, arrays),
    )
    if gate is not None:
        gate = dataclasses.replace(
            gate, a_log=arrays.get("gate.a_log"), dt_bias=arrays.get("gate.dt_bias")
        )
    inputs = Inputs(
        q=arrays["q"],
        k=arrays["k"],
        v=arrays["v"],
        g=_with_last_axis(arrays["g"]) if op.scalar_gate else arrays["g"],
        beta=arrays["beta"],
        gate=gate,
        initial_state=arrays.get("initial_state"),
        segment_ids=_as_int32(arrays.get("segment_ids")),
        state_slots=arrays.get("state_slots"),
    )
    return inputs, options


def validate_recurrent(
    op: Op,
    *arrays: Array,
    return_states: bool,
    state_slots: Array | None,
    **arguments: Any,
) -> tuple[Inputs, Options]:
    """The same for the ops that go token by token, which take pools and return the state after every token."""
    check_static({"return_states": return_states})
    if return_states and state_slots is None and arguments["segment_ids"] is not None:
        raise ValueError(
            "return_states must be False with segment_ids (it takes one sequence per row), got True"
        )
    inputs, options = _validate(op, *arrays, **arguments, state_slots=state_slots)
    if not return_states:
        return inputs, options
    return inputs, dataclasses.replace(
        options, return_final_state=True, return_states=True
    )


def _final_dtype(state_dtype: DTypeLike | None, arrays: dict[str, Array]) -> str | None:
    """Of the final state: as asked for; else a pool stays as it is, bfloat16 goes on as bfloat16, and None."""
    if state_dtype is not None:
        return jnp.dtype(state_dtype).name
    initial_state = arrays.get("initial_state")
    if initial_state is None:
        return None
    stays = "state_slots" in arrays or initial_state.dtype == jnp.bfloat16
    return initial_state.dtype.name if stays else None


def _check_pool(arrays: dict[str, Array], state_dtype: DTypeLike | None) -> None:
    """One sequence per row, every slot there once, and one dtype."""
    pool = arrays["initial_state"]
    check_slots(arrays["state_slots"], pool.shape[0])
    if "segment_ids" in arrays:
        _check_segment_ids(arrays["segment_ids"], 1)
    if state_dtype is not None and jnp.dtype(state_dtype) != pool.dtype:
        raise ValueError(
            f"state_dtype must be None or the pool's {pool.dtype} with state_slots, got {jnp.dtype(state_dtype)}"
        )


def _as_array(name: str, x: Any) -> Array:
    if isinstance(x, jax.ShapeDtypeStruct):
        return cast(Array, x)  # `supported` asks about shapes without data
    if isinstance(x, np.ndarray) and not x.dtype.isnative:
        # JAX takes arrays in the machine's byte order only.
        x = x.astype(x.dtype.newbyteorder("="))
    try:
        return jnp.asarray(x)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} must be an array, got {type(x).__name__}") from error


def _with_last_axis(x: Array) -> Array:
    if isinstance(x, jax.ShapeDtypeStruct):
        return cast(Array, jax.ShapeDtypeStruct((*x.shape, 1), x.dtype))
    return x[..., None]


def _as_int32(ids: Array | None) -> Array | None:
    """One dtype for everybody: id - 1 wraps around in an unsigned one, a position does not fit in a narrow one."""
    return (
        ids
        if ids is None or isinstance(ids, jax.ShapeDtypeStruct)
        else ids.astype(jnp.int32)
    )


def _check_dtype(name: str, x: Array) -> None:
    if name in ("segment_ids", "state_slots"):
        if not jnp.issubdtype(x.dtype, jnp.integer):
            raise ValueError(f"{name} must be integer, got {x.dtype}")
    elif name == "initial_state":
        if x.dtype not in (jnp.float32, jnp.bfloat16, jnp.float64):
            raise ValueError(
                f"initial_state must be float32 or bfloat16 (or float64), got {x.dtype}"
            )
    elif x.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16, jnp.float64):
        raise ValueError(
            f"{name} must be float32, bfloat16, float16 or float64, got {x.dtype}"
        )


def _check_shapes(
    op: Op,
    arrays: dict[str, Array],
    num_segments: int | None,
    return_final_state: bool,
) -> None:
    for name, axes in (("q", "[B, T, H, K]"), ("v", "[B, T, HV, V]")):
        shape = arrays[name].shape
        if len(shape) != 4 or 0 in shape:
            raise ValueError(
                f"{name} must be {axes} with no axis of length 0, got {_show(shape)}"
            )
    heads = arrays["q"].shape[2]
    value_heads = arrays["v"].shape[2]
    for name, wanted, axes in _array_rules(
        op, arrays, num_segments, return_final_state
    ):
        if name in arrays and arrays[name].shape != wanted:
            raise ValueError(
                f"{name} must be {axes} = {_show(wanted)}, got {_show(arrays[name].shape)}"
            )
        if name == "v" and value_heads % heads != 0:
            raise ValueError(
                f"v must have a multiple of q's {heads} heads (HV = r H, r >= 1), got HV = {value_heads}"
            )


def _array_rules(
    op: Op,
    arrays: dict[str, Array],
    num_segments: int | None,
    return_final_state: bool,
) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """(argument, shape it must have, that shape in letters), in the order in which they are checked."""
    (batch, time, heads, key_dim), (value_heads, value_dim) = (
        arrays["q"].shape,
        arrays["v"].shape[2:],
    )
    per_head = (value_heads,) if op.scalar_gate else (value_heads, key_dim)
    letters = "HV" if op.scalar_gate else "HV, K"
    yield "k", (batch, time, heads, key_dim), "[B, T, H, K]"
    yield "v", (batch, time, value_heads, value_dim), "[B, T, HV, V]"
    yield "g", (batch, time, *per_head), f"[B, T, {letters}]"
    yield "beta", (batch, time, value_heads), "[B, T, HV]"
    yield "gate.a_log", (value_heads,), "[HV]"
    yield "gate.dt_bias", per_head, f"[{letters}]"
    yield "segment_ids", (batch, time), "[B, T]"
    state = (value_heads, key_dim, value_dim)
    if "state_slots" in arrays:
        yield "state_slots", (batch,), "[B]"
        if num_segments is not None:
            raise ValueError(
                f"num_segments must be None with state_slots, got {num_segments}"
            )
        if "initial_state" not in arrays:
            raise ValueError(
                "initial_state must be a pool [P, HV, K, V] with state_slots, got None"
            )
        num_slots = max([1, *arrays["initial_state"].shape[:1]])
        yield "initial_state", (num_slots, *state), "[P, HV, K, V]"
    elif "segment_ids" not in arrays:
        if num_segments is not None:
            raise ValueError(
                f"num_segments must be None without segment_ids, got {num_segments}"
            )
        yield "initial_state", (batch, *state), "[B, HV, K, V]"
    elif "initial_state" in arrays:
        given = arrays["initial_state"].shape
        if len(given) != 5 or given[1] == 0:
            raise ValueError(
                f"initial_state must be [B, S, HV, K, V] with segment_ids, got {_show(given)}"
            )
        if num_segments not in (None, given[1]):
            raise ValueError(
                f"num_segments must be the S = {given[1]} of initial_state, got {num_segments}"
            )
        yield "initial_state", (batch, given[1], *state), "[B, S, HV, K, V]"
    elif return_final_state and num_segments is None:
        raise ValueError(
            "num_segments must be a static int for return_final_state with segment_ids and no initial_state, got None"
        )


def _check_devices(arrays: dict[str, Array]) -> None:
    """Committed arrays must live together; what is not committed moves by itself, what is traced has no place yet."""
    first: tuple[str, set] | None = None
    for name, x in arrays.items():
        if isinstance(x, Tracer) or not getattr(x, "committed", False):
            continue
        devices = x.sharding.device_set
        first = first or (name, devices)
        if devices != first[1]:
            here, there = (sorted(map(str, d)) for d in (devices, first[1]))
            raise ValueError(
                f"{name} must be on the devices of {first[0]}, {there}, got {here}"
            )


def _check_segment_ids(segment_ids: Array, num_segments: int | None) -> None:
    """Looks at the values where there are any; under a transformation they are the caller's word."""
    if not is_known(segment_ids):
        return
    ids = np.asarray(segment_ids)
    if ids.min() < 0:
        raise ValueError(
            f"segment_ids must be 1 .. S, or 0 for padding, got {ids.min()}"
        )
    # Padding at the end counts as larger than every id.
    step = np.diff(
        np.where(ids == 0, np.iinfo(np.int64).max, ids.astype(np.int64)), axis=1
    )
    if (step < 0).any():
        row, token = np.argwhere(step < 0)[0]
        pair = f"{ids[row, token]} before {ids[row, token + 1]} at segment_ids[{row}, {token}:{token + 2}]"
        raise ValueError(
            f"segment_ids must not decrease along T, with padding (0) only at the end, got {pair}"
        )
    if num_segments is not None and ids.max() > num_segments:
        raise ValueError(
            f"segment_ids must be at most num_segments = {num_segments}, got {ids.max()}"
        )


def _show(shape: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, shape))}]"
