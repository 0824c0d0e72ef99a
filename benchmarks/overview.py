"""The few times that the README shows: ours beside the best of others, at gates of models, from one file of results.

KDA's times depend on the gate. Those at the gate "production" come first; in their place stand those at "strong".
"""

import textwrap
from typing import NamedTuple

from benchmarks.markdown import table
from benchmarks.results import Results, Row
from benchmarks.shapes import OPS, README

LINE = 100  # columns
OURS = "pallas"
EXACT_PEER = "fla"
NAMES = {
    "pallas": "jfla",
    "fla": "FLA 0.6.0",
    "cudnn": "cuDNN frontend 1.32.0",
    "flash_qla": "FlashQLA 0.1.3",
    "flashinfer": "FlashInfer 0.7.2",
    "jla": "jla 0.1.0",
}
# The passes in which these cut a sequence that comes alone, and drop small decays there.
CUTS = {"cudnn": ("forward",), "flash_qla": ("forward", "backward")}
GATES = {
    "production": "-5 sigmoid(x), x normal, the bounded gate of published models",
    "strong": "a log-sigmoid, -5 to 0",
}


class Time(NamedTuple):
    """Milliseconds of one implementation; `backward` is None where it has none."""

    op: str
    shape: str
    implementation: str
    forward: float
    backward: float | None
    gate: str
    clock: str

    def drops(self, timed: str) -> bool:
        """Whether a pass leaves out a part of the recurrence."""
        return self.shape.startswith("B1 ") and timed in CUTS.get(
            self.implementation, ()
        )


def bench_times(record: Results) -> list[Time]:
    """What `jfla bench` timed forward, each with its backward."""
    found = []
    rows = {row.key: row for row in record.rows if row.ms is not None}
    for row in rows.values():
        if row.timed != "forward":
            continue
        clock = (
            "Device time by the profiler" if row.method == "device" else "Wall clock"
        )
        key = (row.op, row.shape, row.implementation)
        backward = rows.get(_key_of_backward(row))
        backward_ms = None if backward is None else backward.ms
        found.append(Time(*key, row.ms or 0.0, backward_ms, row.gate, clock))
    return found


def _key_of_backward(row: Row) -> tuple[str, ...]:
    return row.op, "backward", row.shape, row.gate, row.implementation


def chosen(record: Results) -> list[Time]:
    """One time of every op, shape and implementation: at the first gate of `GATES` that it has one at."""
    known = bench_times(record)
    found: dict[tuple[str, str, str], Time] = {}
    for gate in GATES:
        for time in known:
            shown = time.shape in map(str, README) and time.implementation in NAMES
            if shown and time.gate == gate:
                found.setdefault((time.op, time.shape, time.implementation), time)
    return sorted(found.values(), key=_place)


def _place(time: Time) -> tuple[int, ...]:
    shapes = [str(shape) for shape in README]
    names = list(NAMES)
    return (
        OPS.index(time.op),
        shapes.index(time.shape),
        names.index(time.implementation),
    )


def overview(record: Results) -> str:
    """The README's table and what has to be known of it."""
    times = chosen(record)
    body = []
    shown: list[Time] = []
    for op in OPS:
        for shape in README:
            some = [time for time in times if (time.op, time.shape) == (op, str(shape))]
            row = _row(some)
            if row is not None:
                body.append(
                    (f"{op.upper()} {shape.batch} x {shape.time}", *row.cells())
                )
                shown += row.times()
    header = (
        "batch x tokens",
        "jfla",
        NAMES[EXACT_PEER],
        "fastest other forward",
        "fastest other backward",
    )
    return "\n\n".join([table(header, body), _caption(shown, record)]) if body else ""


class _Row(NamedTuple):
    """What one line of the table compares."""

    ours: Time
    exact_peer: Time | None
    forward: Time | None  # the fastest of the others
    backward: Time | None

    def times(self) -> list[Time]:
        return list(dict.fromkeys(time for time in self if time is not None))

    def cells(self) -> list[str]:
        """Milliseconds, the shortest forward and the shortest backward in bold, a mark where one drops."""
        least = {
            "forward": min(time.forward for time in self.times()),
            "backward": min(
                (time.backward for time in self.times() if time.backward is not None),
                default=None,
            ),
        }

        def cell(time: Time | None, *passes: str) -> str:
            if time is None:
                return ""
            texts = []
            for timed in passes:
                ms = getattr(time, timed)
                mark = " †" if time.drops(timed) else ""
                texts.append(
                    "no" if ms is None else f"{_digits(ms, least[timed])}{mark}"
                )
            return " / ".join(texts)

        def named(time: Time | None, timed: str) -> str:
            name = "" if time is None else f" {_library(time.implementation)}"
            return f"{cell(time, timed)}{name}"

        return [
            cell(self.ours, "forward", "backward"),
            cell(self.exact_peer, "forward", "backward"),
            named(self.forward, "forward"),
            named(self.backward, "backward"),
        ]


def _row(times: list[Time]) -> _Row | None:
    """Ours beside the others; None without ours."""
    found = {time.implementation: time for time in times}
    if OURS not in found:
        return None
    others = [time for name, time in found.items() if name not in (OURS, EXACT_PEER)]
    both = [time for time in others if time.backward is not None]
    return _Row(
        ours=found[OURS],
        exact_peer=found.get(EXACT_PEER),
        forward=min(others, key=lambda time: time.forward, default=None),
        backward=min(both, key=lambda time: time.backward or 0.0, default=None),
    )


def _library(implementation: str) -> str:
    """The library's name without its version."""
    return NAMES[implementation].split()[0]


def _digits(ms: float, least: float | None) -> str:
    text = f"{ms:#.3g}".rstrip(".")
    return f"**{text}**" if ms == least else text


def _caption(shown: list[Time], record: Results) -> str:
    """Which device, gates, clocks and commits."""
    return "\n".join(
        [
            f"Milliseconds, forward / backward, on one {record.device}, {record.date}, commit "
            f"{record.commit}; bfloat16, 32 heads,",
            "K = V = 128; the shortest in bold.",
            *_versions(shown),
            *_gates(shown),
            "",
            "† drops what decays below a bound: these cut a sequence that comes alone into pieces",
            "(cuDNN in its forward, bound 2^-20; FlashQLA where it finds that faster, e^-10).",
            "jfla and FLA drop nothing.",
            "",
            *_clocks(shown),
            *_untimed(_asked_for(record)),
            "",
            "To measure these again, with no case begun after 7 minutes: "
            "`jfla bench --set readme --pass backward --seconds 420 --json FILE.json`.",
        ]
    )


def _versions(shown: list[Time]) -> list[str]:
    """The others with their versions."""
    others = [time.implementation for time in shown]
    names = [NAMES[name] for name in NAMES if name in others and name != OURS]
    return [f"The others: {', '.join(names)}."] if names else []


def _gates(shown: list[Time]) -> list[str]:
    """The times at each gate, a line a gate."""
    lines = []
    for gate, text in GATES.items():
        of_ops = []
        for op in OPS:
            times = [time for time in shown if (time.gate, time.op) == (gate, op)]
            if names := dict.fromkeys(_library(time.implementation) for time in times):
                of_ops.append(f"{op.upper()} of {', '.join(names)}")
        if of_ops:
            lines.append(f"Decays of {text}: {'; '.join(of_ops)}.")
    return lines


def _asked_for(record: Results) -> list[Row]:
    """The rows of the table's shapes: of those without a time the reader must know why."""
    shapes = list(map(str, README))
    return [
        row
        for row in record.rows
        if row.shape in shapes and row.gate in GATES and row.implementation in NAMES
    ]


def _untimed(rows: list[Row]) -> list[str]:
    """One sentence: every library that lacks times in the table, with its reasons."""
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if row.ms is None:
            reasons.setdefault(row.implementation, []).append(str(row.refused))
    libraries = [
        f"{_library(name)} ({'; '.join(dict.fromkeys(reasons[name]))})"
        for name in NAMES
        if name in reasons
    ]
    line = f"Not in every row: {', '.join(libraries)}."
    return ["", *textwrap.wrap(line, LINE)] if libraries else []


def _clocks(shown: list[Time]) -> list[str]:
    """Who was timed how, a line a clock; one line where all were timed alike."""
    clocks: dict[str, list[str]] = {}
    for time in shown:
        name = f"{time.op.upper()} of {_library(time.implementation)}"
        clocks.setdefault(time.clock, []).append(name)
    if len(clocks) == 1:
        return [f"{clock}." for clock in clocks]
    return [
        f"{clock}: {', '.join(dict.fromkeys(names))}."
        for clock, names in clocks.items()
    ]
