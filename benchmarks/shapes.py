"""What is measured: shapes in sets by name, gates, passes, and the case that they make together."""

import dataclasses
from typing import Literal

Op = Literal["kda", "gdn"]
Pass = Literal["forward", "backward", "forward+backward", "decode", "scan+output"]
Gate = Literal[
    "production", "published", "recorded", "strong", "weak", "mixed", "reset", "model"
]
Packing = Literal["uniform", "random", "skewed"]

OPS: tuple[Op, ...] = ("kda", "gdn")
PASSES: tuple[Pass, ...] = (
    "forward",
    "backward",
    "forward+backward",
    "decode",
    "scan+output",
)
GATES: tuple[Gate, ...] = (
    "production",
    "published",
    "recorded",
    "strong",
    "weak",
    "mixed",
    "reset",
    "model",
)


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of one call, K = V = `dim`.

    With `packing`, `segments` sequences lie one behind the other along T.

    >>> print(Shape(1, 8192, 16, value_heads=32))
    B1 T8192 H16/32 D128
    """

    batch: int
    time: int
    heads: int
    dim: int = 128
    value_heads: int = 0  # 0: as many as heads
    packing: Packing | None = None
    segments: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "value_heads", self.value_heads or self.heads)

    def __str__(self) -> str:
        grouped = "" if self.heads == self.value_heads else f"/{self.value_heads}"
        packed = f" {self.packing} S{self.segments}" if self.packing else ""
        return f"B{self.batch} T{self.time} H{self.heads}{grouped} D{self.dim}{packed}"


@dataclasses.dataclass(frozen=True)
class Case:
    """One thing that every implementation does in turn.

    `timed` is never "backward": that one is a difference.
    """

    op: Op
    timed: Pass
    shape: Shape
    gate: Gate = "production"

    @property
    def is_models_call(self) -> bool:
        """Whether the op applies a gate with parameters, to a raw input in bfloat16, and normalises q and k."""
        return self.gate == "model"

    def __str__(self) -> str:
        return f"{self.op} {self.timed}, {self.shape}, {self.gate}"


README = (Shape(1, 8192, 32), Shape(8, 4096, 32), Shape(1, 65536, 32))

SETS: dict[str, tuple[Shape, ...]] = {
    "quick": (Shape(2, 512, 2, 64),),
    "readme": README,
    "paper": (
        *README,
        Shape(1, 2048, 32),
        Shape(8, 1024, 8, 64),
        Shape(1, 8192, 16, value_heads=32),
    ),
    "fla823": tuple(Shape(16, 2**power, 8, 256) for power in range(8, 15)),
    "fla": (
        Shape(1, 8192, 96),
        Shape(2, 16384, 16),
        Shape(4, 2048, 16),
        Shape(4, 4096, 64),
        Shape(8, 2048, 32, 256),
        Shape(8, 1024, 8, 64),
    ),
    "packed": (
        *(
            Shape(1, time, 32, packing=packing, segments=segments)
            for time in (4096, 8192, 16384)
            for segments in (10, 20)
            for packing in ("uniform", "random", "skewed")
        ),
        Shape(1, 16384, 32, packing="uniform", segments=64),
    ),
    "decode": tuple(Shape(batch, 1, 32) for batch in (1, 8, 64, 256)),
}


def chosen(sets: list[str], names: list[str]) -> list[Shape]:
    """The shapes of some sets, each once; with `names` those alone, in that order.

    Raises `ValueError` for a name that none of them has.
    """
    shapes = {str(shape): shape for name in sets for shape in SETS[name]}
    for name in names:
        if name not in shapes:
            raise ValueError(f"shapes must be among {', '.join(shapes)}, got {name!r}")
    return [shapes[name] for name in dict.fromkeys(names or shapes)]


def cases(
    shapes: list[Shape], ops: list[Op], passes: list[Pass], gates: list[Gate]
) -> list[Case]:
    """Every combination, once.

    Decode is one token with a state, so shapes that differ in T alone
    are one case of it; packed shapes have none, and shapes of one token nothing else. "scan+output"
    is what follows the work inside the chunks: states and output.

    >>> for case in cases([Shape(2, 512, 2, 64)], ["kda"], ["backward", "decode"], ["weak"]):
    ...     print(case)
    kda forward, B2 T512 H2 D64, weak
    kda forward+backward, B2 T512 H2 D64, weak
    kda decode, B2 T1 H2 D64, weak
    """
    wanted = (
        {*passes, "forward", "forward+backward"} if "backward" in passes else {*passes}
    )
    wanted -= {"backward", "decode"}
    timed: list[Pass] = [name for name in PASSES if name in wanted]
    long = [shape for shape in shapes if shape.time > 1]
    found = [
        Case(op, name, shape, gate)
        for op in ops
        for gate in gates
        for shape in long
        for name in timed
    ]
    if "decode" in passes:
        tokens = [
            dataclasses.replace(shape, time=1)
            for shape in shapes
            if shape.packing is None
        ]
        for op in ops:
            found += [
                Case(op, "decode", shape, gate) for gate in gates for shape in tokens
            ]
    return list(dict.fromkeys(found))
