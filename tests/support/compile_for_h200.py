"""Compiles a function for an H200, on a machine without a GPU, in this process."""

from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import topologies

import jfla
from benchmarks.h200 import H200


def compile_for_h200(function: Callable[..., Any], *arguments: Any) -> str:
    """The optimised program of a function of described arrays."""
    return compiled_for_h200(function, *arguments).as_text()


def compiled_for_h200(
    function: Callable[..., Any], *arguments: Any
) -> jax.stages.Compiled:
    """The same with what the compiler says of it."""
    topology = topologies.get_topology_desc(
        platform="cuda", topology_name="1x1x1", target_config=H200, topology="1x1x1"
    )
    here = jax.sharding.SingleDeviceSharding(topology.devices[0])
    on_h200 = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here)
    with jfla.pallas.compiling_for("9.0"):
        traced = jax.jit(function).trace(*jax.tree.map(on_h200, arguments))
        return traced.lower().compile()
