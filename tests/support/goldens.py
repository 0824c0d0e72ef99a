"""Reads the golden files: results of other libraries' own code in float64, with the tolerance each array deserves."""

import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jfla

FOLDER = pathlib.Path(__file__).parents[1] / "goldens"
TOLERANCES = json.loads((FOLDER / "tolerances.json").read_text())
OPS = sorted(name for name in TOLERANCES if name.startswith("op_"))
GATES = sorted({name.split("/")[0] for name in TOLERANCES["gates.npz"]})


def load(name: str) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """(arrays, options) of one file."""
    with np.load(FOLDER / name) as file:
        arrays = {key: file[key] for key in file.files}
    return arrays, json.loads(str(arrays.pop("options")))


def rms_error(x: Any, ref: np.ndarray) -> float:
    """rms(x - ref) / rms(ref) in float64; NaN never passes."""
    x, ref = np.asarray(x, np.float64).reshape(ref.shape), ref.astype(np.float64)
    return float(np.linalg.norm(x - ref) / np.linalg.norm(ref))


def differentiable(
    arrays: dict[str, np.ndarray], options: dict[str, Any]
) -> dict[str, Any]:
    """The inputs that have gradients, in jfla's layout: `cu_seqlens` puts the states' sequence axis behind B = 1."""
    names = ("q", "k", "v", "g", "beta", "initial_state", "A_log", "dt_bias")
    inputs = {name: jnp.asarray(arrays[name]) for name in names if name in arrays}
    if options["cu_seqlens"] and "initial_state" in inputs:
        inputs["initial_state"] = inputs["initial_state"][None]
    if "dt_bias" in inputs and options["op"] == "kda":
        inputs["dt_bias"] = inputs["dt_bias"].reshape(options["HV"], options["K"])
    return inputs


def gate(
    inputs: dict[str, Any], lower_bound: float | None
) -> jfla.SoftplusGate | jfla.SigmoidGate:
    parameters = inputs.get("A_log"), inputs.get("dt_bias")
    return (
        jfla.SoftplusGate(*parameters)
        if lower_bound is None
        else jfla.SigmoidGate(*parameters, lower_bound)
    )


def run(
    op, inputs: dict[str, Any], arrays: dict[str, np.ndarray], options: dict[str, Any]
) -> jfla.DeltaRuleOutput:
    """Calls `op` as the golden's options say."""
    return op(
        *(inputs[name] for name in ("q", "k", "v", "g", "beta")),
        gate=gate(inputs, options["lower_bound"])
        if options["use_gate_in_kernel"]
        else None,
        beta_max=(2.0 if options["allow_neg_eigval"] else 1.0)
        if options["use_beta_sigmoid"]
        else None,
        qk_norm=options["use_qk_l2norm"],
        scale=options["scale"],
        initial_state=inputs.get("initial_state"),
        return_final_state=True,
        segment_ids=segments(arrays, options),
        num_segments=options["N"] if options["cu_seqlens"] else None,
    )


def segments(
    arrays: dict[str, np.ndarray], options: dict[str, Any]
) -> jax.Array | None:
    if not options["cu_seqlens"]:
        return None
    return jfla.segment_ids_from_cu_seqlens(
        jnp.asarray(arrays["cu_seqlens"]), options["T"]
    )


def results(
    op, arrays: dict[str, np.ndarray], options: dict[str, Any]
) -> dict[str, jax.Array]:
    """Everything the golden stores: o, final_state and the gradient of sum(o * do) + sum(final_state * dht)."""

    def loss(inputs):
        out = run(op, inputs, arrays, options)
        dstate = (
            jnp.asarray(arrays["dht"])
            if "dht" in arrays
            else jnp.zeros(out.final_state.shape)
        )
        total = jnp.sum(out.output * arrays["do"]) + jnp.sum(
            out.final_state * dstate.reshape(out.final_state.shape)
        )
        return total, out

    grads, out = jax.grad(loss, has_aux=True)(differentiable(arrays, options))
    return {"o": out.output, "final_state": out.final_state} | {
        f"d{name}": grad for name, grad in grads.items()
    }


def load_gate(
    case: str,
) -> tuple[dict[str, np.ndarray], float | None, dict[str, float]]:
    """(arrays, lower_bound or None for softplus, tolerances) of one case of `gates.npz`."""
    arrays, options = load("gates.npz")
    own = {
        name.removeprefix(f"{case}/"): x
        for name, x in arrays.items()
        if name.startswith(f"{case}/")
    }
    tolerances = {name.removeprefix(f"{case}/"): x for name, x in TOLERANCES["gates.npz"].items()
                  if name.startswith(f"{case}/")}  # fmt: skip
    return own, options["lower_bound"] if "lower_bound" in case else None, tolerances


def gate_inputs(arrays: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    """g [..., HV, G], A_log and dt_bias in jfla's layout: G is 1 for GDN, whose files have no such axis."""
    inputs = {
        name: jnp.asarray(arrays[name])
        for name in ("g", "A_log", "dt_bias")
        if name in arrays
    }
    if inputs["g"].ndim == 3:
        inputs["g"] = inputs["g"][..., None]
    elif "dt_bias" in inputs:
        inputs["dt_bias"] = inputs["dt_bias"].reshape(inputs["g"].shape[2:])
    return inputs
