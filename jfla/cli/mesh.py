"""A run's devices as a mesh: the option `--mesh`, what it may be, and what each axis splits."""

import contextlib
import math
from collections.abc import Iterator, Mapping

import jax
from flax import nnx

from jfla.cli.refused import Refused
from jfla.nn import DeltaLM
from jfla.nn.sharding import BATCH, EMBED, HEADS, MLP, TIME, VOCAB

AXES = (
    "data",
    "sequence",
    "model",
)  # outermost first: rows go over processes before time does
_SPLIT_BY = {
    BATCH: "data",
    TIME: "sequence",
    HEADS: "model",
    MLP: "model",
    VOCAB: "model",
    EMBED: None,
}

MeshShape = Mapping[str, int]


def parse(text: str) -> MeshShape:
    """The sizes of "data=2,sequence=2,model=1"; an axis that is left out has size 1.

    **Raises:** `Refused` for anything else.

    >>> print(parse("sequence=4,data=2"))
    {'data': 2, 'sequence': 4, 'model': 1}
    """
    shape: dict[str, int] = dict.fromkeys(AXES, 1)
    seen = set()
    for part in text.split(","):
        name, _, size = (word.strip() for word in part.partition("="))
        if name not in AXES:
            raise Refused(
                "mesh", f"axes must be {', '.join(AXES)}, got {name!r} in {text!r}"
            )
        if name in seen:
            raise Refused(
                "mesh", f"an axis must occur once, got {name} again in {text!r}"
            )
        if not (size.isascii() and size.isdecimal() and int(size) > 0):
            raise Refused(
                "mesh", f"{name} must be a whole number above 0, got {size!r}"
            )
        seen.add(name)
        shape[name] = int(size)
    return shape


def check(shape: MeshShape, *, rows: int, time: int, num_heads: int) -> None:
    """Raises `Refused` unless the mesh has all devices and divides the work without a remainder."""
    size = math.prod(shape.values())
    devices = jax.device_count()
    if size != devices:
        sizes = " x ".join(map(str, shape.values()))
        raise Refused(
            "mesh",
            f"the product of its axes must be the number of devices, {devices}, "
            f"got {sizes} = {size}",
        )
    divided = {
        "data": (rows, "rows of a step"),
        "sequence": (time, "tokens of a row"),
        "model": (num_heads, "heads"),
    }
    for axis, (length, what) in divided.items():
        if length % shape[axis]:
            raise Refused(
                "mesh", f"{axis} must divide the {length} {what}, got {shape[axis]}"
            )


@contextlib.contextmanager
def layout(shape: MeshShape | None) -> Iterator[None]:
    """Under it models, optimizers and batches are split over the first devices, as `shape` says.

    None, or a single device: nothing is split.
    """
    if shape is None or math.prod(shape.values()) == 1:
        yield
        return
    sizes = tuple(shape.values())
    auto = (jax.sharding.AxisType.Auto,) * len(sizes)
    devices = jax.devices()[: math.prod(sizes)]
    mesh = jax.make_mesh(sizes, tuple(shape), axis_types=auto, devices=devices)
    # An axis of one device has no name in the rules: with one, the op would look for the state of a
    # stretch of time before its own.
    rules = tuple(
        (logical, axis if shape.get(axis, 1) > 1 else None)
        for logical, axis in _SPLIT_BY.items()
    )
    with jax.set_mesh(mesh), nnx.logical_axis_rules(rules):
        yield


def gathered(model: DeltaLM) -> DeltaLM:
    """The model whole on one device of this process, for use outside of the layout."""
    mesh = jax.sharding.get_mesh()
    if mesh.empty:
        return model
    graph, state = nnx.split(model)
    everywhere = jax.NamedSharding(mesh, jax.sharding.PartitionSpec())
    copies = jax.jit(lambda x: x, out_shardings=everywhere)(state)
    return nnx.merge(graph, jax.tree.map(lambda x: x.addressable_data(0), copies))
