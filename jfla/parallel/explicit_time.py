"""A chunked op on arrays whose time is split over explicit mesh axes: the call that `sequence_axis` makes by hand."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jfla.parallel import dims
from jfla.parallel.sharding import explicit_mesh
from jfla.types import DeltaRuleOutput, Inputs, Options

Run = Callable[[Inputs, Options], DeltaRuleOutput]


def split_by_type(run: Run) -> Run:
    """`run`, where v's type says that time is split: in shard_map, every device with its rows, stretch and heads.

    All arrays are laid out as v is; what else v's type splits is gathered. The output is laid out as v.
    """

    @functools.wraps(run)
    def call(inputs: Inputs, options: Options) -> DeltaRuleOutput:
        mesh = explicit_mesh(inputs)
        spec = jax.typeof(inputs.v).sharding.spec if mesh is not None else None
        if (
            mesh is None
            or spec is None
            or spec[1] is None
            or options.sequence_axis is not None
        ):
            return run(inputs, options)
        if options.states_every is not None:
            raise NotImplementedError(
                "return_states_every with v's time split over explicit mesh axes: the states along "
                f"time have no layout; reshard v, whose type is split by {spec}, to whole time"
            )
        axes = {"B": spec[0], "T": spec[1], "HV": spec[2], "H": spec[2]}
        if inputs.q.shape[2] % _size(mesh, spec[2]):
            axes |= {"H": None, "HV": None}  # more devices than query heads
        in_specs = _specs(dims.inputs_of(options), inputs, axes)
        output = P(axes["B"], axes["T"], axes["HV"])
        final = P(axes["B"], *([None] * options.per_segment_state), axes["HV"])
        explicit = {
            name
            for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
            if kind == AxisType.Explicit
        }
        on_stretch = dataclasses.replace(options, sequence_axis=spec[1])

        @jax.jit
        def on_mesh(inputs: Inputs) -> tuple[Any, ...]:
            local = jax.shard_map(
                lambda inputs: tuple(run(inputs, on_stretch)),
                mesh=mesh,
                in_specs=(in_specs,),
                out_specs=(output, final if options.return_final_state else None),
                axis_names=explicit,
            )
            return local(jax.tree.map(jax.sharding.reshard, inputs, in_specs))

        with jax.sharding.use_abstract_mesh(mesh):
            return DeltaRuleOutput(*on_mesh(inputs))

    return call


def _specs(labels: Any, inputs: Inputs, axes: dict[str, Any]) -> Any:
    """The layout of every array, by the names of its dimensions."""
    flat, structure = jax.tree.flatten(labels)
    parts = structure.flatten_up_to(inputs)

    def of_part(label: str, part: Any) -> Any:
        names = label.split()
        return jax.tree.map(
            lambda x: P(*(axes.get(name) for name in names[: x.ndim])), part
        )

    return structure.unflatten(
        [of_part(*pair) for pair in zip(flat, parts, strict=True)]
    )


def _size(mesh: Any, axis: Any) -> int:
    """Devices along a mesh axis, along several, or 1 along none."""
    size = 1
    for name in axis if isinstance(axis, tuple) else (axis,):
        size *= mesh.shape.get(name, 1)
    return size
