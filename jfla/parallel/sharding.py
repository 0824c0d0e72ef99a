"""Meshes with explicit axes: sharding in types at an op's boundary, the compiler's partitioner inside (auto_axes)."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from jfla.types import DeltaRuleOutput, Inputs, Options

Run = Callable[..., DeltaRuleOutput]  # of Inputs, Options and other static arguments


def compiler_partitioned(run: Run) -> Run:
    """`run`, partitioned by JAX's compiler inside even where mesh axes are explicit (`AxisType.Explicit`).

    Rows and heads do not see each other: there is nothing that a caller could say about the layout of what is in
    between. The output is laid out as v, the final state (several along time, too) as the initial one, or along v's
    rows and heads.
    """

    @functools.wraps(run)
    def partitioned(inputs: Inputs, options: Options, *static: Any) -> DeltaRuleOutput:
        mesh = explicit_mesh(inputs)
        if mesh is None:
            return run(inputs, options, *static)
        output = jax.typeof(inputs.v).sharding.spec
        state = P(output[0], *([None] * options.per_segment_state), output[2])
        if inputs.initial_state is not None:
            state = jax.typeof(inputs.initial_state).sharding.spec
        if options.return_states or options.states_every is not None:
            state = P(output[0], None, *state[1:])
        layout: Any = (output, state if options.return_final_state else None)

        def inside(inputs: Inputs) -> tuple[Any, ...]:
            return tuple(run(inputs, options, *static))

        auto: Any = jax.sharding.auto_axes(inside, out_sharding=layout)
        with jax.sharding.use_abstract_mesh(mesh):
            return DeltaRuleOutput(*auto(inputs))

    return partitioned


def explicit_mesh(inputs: Inputs) -> AbstractMesh | None:
    """The mesh with explicit axes around the call, or that on which its arrays lie; None where there is neither."""
    meshes = [
        jax.sharding.get_abstract_mesh(),
        *(jax.typeof(x).sharding.mesh for x in jax.tree.leaves(inputs)),
    ]
    return next(
        (
            mesh
            for mesh in meshes
            if not mesh.empty and AxisType.Explicit in mesh.axis_types
        ),
        None,
    )
