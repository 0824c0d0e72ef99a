"""The record of a run: device, versions, commit, date, ceilings and rows; it is kept as JSON."""

import dataclasses
import datetime
import json
import pathlib
import platform
import subprocess
from typing import Any

import jax

from benchmarks.ceilings import Ceilings
from benchmarks.cost import cost
from benchmarks.exact import CHECKED
from benchmarks.internals import cpu_name
from benchmarks.measure import Timing
from benchmarks.providers import settings, versions
from benchmarks.shapes import Case

SCHEMA = 1
FOLDER = pathlib.Path(__file__).parent / "results"


@dataclasses.dataclass
class Row:
    """One pass of one case by one implementation. Either `ms` is there, or `refused` says why not.

    `low_ms` and `high_ms` are quartiles; `wall_ms` is the wall time per queued call; speeds are of
    `cost.cost`; the fractions are of the run's ceilings. `peak_mib` is temporaries and results.
    "backward" is "forward+backward" minus "forward", with the gradients' errors and the memory of
    both.
    """

    op: str
    timed: str
    shape: str
    gate: str
    implementation: str
    refused: str | None = None
    ms: float | None = None
    low_ms: float | None = None
    high_ms: float | None = None
    wall_ms: float | None = None
    method: str | None = None
    repeats: int | None = None
    tb_per_s: float | None = None
    tflop_per_s: float | None = None
    copy_fraction: float | None = None
    matmul_fraction: float | None = None
    errors: dict[str, float] = dataclasses.field(default_factory=dict)
    peak_mib: float | None = None
    compile_seconds: float | None = None

    @property
    def key(self) -> tuple[str, ...]:
        """What a run has only one row of."""
        return self.op, self.timed, self.shape, self.gate, self.implementation

    @property
    def timing(self) -> Timing:
        """The times of a row that has them."""
        times = (
            self.ms,
            self.low_ms,
            self.high_ms,
            self.wall_ms,
            self.method,
            self.repeats,
        )
        if None in times:
            raise ValueError(f"{self.key} was refused: {self.refused}")
        return Timing(*times)  # type: ignore[arg-type]


@dataclasses.dataclass
class Results:
    """Rows that were measured on one device, on one day, with one version of everything.

    `runs`: how many runs they come from, 0 where it was not noted. In one run every implementation
    has every case within minutes, and ours between the peers.
    """

    device: str
    platform: str
    date: str
    commit: str | None
    versions: dict[str, str]
    ceilings: Ceilings
    rows: list[Row]
    settings: dict[str, str] = dataclasses.field(default_factory=dict)
    checked: str = ""  # of what the errors are
    runs: int = 0
    schema: int = SCHEMA

    def add(self, row: Row) -> None:
        """Adds a row, in the place of an older one of the same key."""
        self.rows = [old for old in self.rows if old.key != row.key] + [row]

    def write(self, path: pathlib.Path) -> None:
        """Writes JSON with one row a line, whole or not at all."""
        head = dataclasses.asdict(self) | {"ceilings": self.ceilings._asdict()}
        rows = ",\n".join(f"  {json.dumps(_rounded(row))}" for row in head.pop("rows"))
        text = json.dumps(_rounded(head), indent=1).removesuffix("\n}")
        beside = path.with_suffix(".partial")
        beside.write_text(f'{text},\n "rows": [\n{rows}\n ]\n}}\n')
        beside.replace(path)


def read(path: pathlib.Path) -> Results:
    """Reads what `write` wrote. Raises `ValueError` for another schema."""
    found: dict[str, Any] = json.loads(path.read_text())
    if found.get("schema") != SCHEMA:
        schema = found.get("schema")
        raise ValueError(f"{path}: expected results of schema {SCHEMA}, got {schema!r}")
    found["ceilings"] = Ceilings(**found["ceilings"])
    found["rows"] = [Row(**row) for row in found["rows"]]
    return Results(**found)


def started(
    ceilings: Ceilings, commit: str | None, path: pathlib.Path | None
) -> Results:
    """A record without rows, or that of `path` where device, commit and versions are the same.

    Raises `ValueError` where it holds a record of something else.
    """
    device = jax.devices()[0]
    new = Results(
        device=device_name(device),
        platform=device.platform,
        date=datetime.date.today().isoformat(),
        commit=commit or current_commit(),
        versions={"python": platform.python_version()} | versions(),
        ceilings=ceilings,
        rows=[],
        settings=settings(),
        checked=CHECKED,
        runs=1,
    )
    if path is None or not path.exists():
        return new
    old = read(path)
    for name in ("device", "commit", "versions", "settings"):
        before = getattr(old, name)
        now = getattr(new, name)
        if before != now:
            raise ValueError(
                f"{path} holds rows of another {name}: {before}, now {now}"
            )
    new.rows = old.rows
    new.runs = _total_runs([old, new])
    return new


def merged(paths: list[pathlib.Path]) -> Results:
    """One record of several, which runs of one device, date and commit wrote.

    It has all rows; of those with the same key the last one that has a time, or else the last.
    Each run may have had packages of its own, so versions and settings are put together. The
    ceilings are the best of all runs, and the fractions are made anew of them. Raises `ValueError`
    where the records do not belong together.
    """
    records = [read(path) for path in paths]
    first = records[0]
    for path, record in zip(paths, records):
        for name in ("device", "platform", "date", "commit", "checked"):
            value = getattr(record, name)
            if value != getattr(first, name):
                raise ValueError(f"{path} has another {name} than {paths[0]}: {value}")
        _put_together(path, first.versions, record.versions)
        _put_together(path, first.settings, record.settings)
    first.ceilings = Ceilings(
        copy_tb_per_s=max(record.ceilings.copy_tb_per_s for record in records),
        matmul_tflop_per_s=max(
            record.ceilings.matmul_tflop_per_s for record in records
        ),
    )
    first.runs = _total_runs(records)
    rows = first.rows + [row for record in records[1:] for row in record.rows]
    timed = {row.key for row in rows if row.ms is not None}
    first.rows = []
    for row in rows:
        if row.ms is None and row.key in timed:
            continue
        _relate(row, first.ceilings)
        first.add(row)
    return first


def _total_runs(records: list[Results]) -> int:
    counts = [record.runs for record in records]
    return sum(counts) if all(counts) else 0


def _put_together(
    path: pathlib.Path, ours: dict[str, str], theirs: dict[str, str]
) -> None:
    """Adds `theirs` to `ours`. Raises `ValueError` where both have a key with other values."""
    for key in ours.keys() & theirs.keys():
        if ours[key] != theirs[key]:
            raise ValueError(
                f"{path} has another {key}: {theirs[key]}, not {ours[key]}"
            )
    ours |= theirs


def timed_row(case: Case, implementation: str, time: Timing, ceilings: Ceilings) -> Row:
    """A row with its times and speeds."""
    g_bytes = 2 if case.is_models_call else 4
    bytes_, flops = cost(case.op, case.timed, case.shape, g_bytes)
    row = Row(case.op, case.timed, str(case.shape), case.gate, implementation)
    row.ms, row.low_ms, row.high_ms, row.wall_ms, row.method, row.repeats = time
    row.tb_per_s = bytes_ / time.ms * 1e-9
    row.tflop_per_s = flops / time.ms * 1e-9
    _relate(row, ceilings)
    return row


def _relate(row: Row, ceilings: Ceilings) -> None:
    """Sets a row's fractions of the ceilings, if it has speeds."""
    if row.tb_per_s is not None and row.tflop_per_s is not None:
        row.copy_fraction = row.tb_per_s / ceilings.copy_tb_per_s
        row.matmul_fraction = row.tflop_per_s / ceilings.matmul_tflop_per_s


def backward_row(case: Case, forward: Row, both: Row, ceilings: Ceilings) -> Row:
    """The difference of two rows: medians, and quartiles at their worst.

    Wall times where the two were not timed in the same way. Where noise makes it 0 or less, there
    is none.
    """
    b = both.timing
    f = forward.timing
    if b.method != f.method:
        b = _wall(b)
        f = _wall(f)
    case = dataclasses.replace(case, timed="backward")
    if b.ms <= f.ms:
        row = Row(case.op, case.timed, str(case.shape), case.gate, both.implementation)
        row.refused = "noise: forward+backward was not slower than forward"
        return row
    difference = Timing(
        ms=b.ms - f.ms,
        low_ms=b.low_ms - f.high_ms,
        high_ms=b.high_ms - f.low_ms,
        wall_ms=b.wall_ms - f.wall_ms,
        method=b.method,
        repeats=b.repeats,
    )
    row = timed_row(case, both.implementation, difference, ceilings)
    row.errors = {
        name: error for name, error in both.errors.items() if name != "output"
    }
    row.peak_mib = both.peak_mib
    return row


def _wall(x: Timing) -> Timing:
    return Timing(x.wall_ms, x.wall_ms, x.wall_ms, x.wall_ms, "queued", x.repeats)


def device_name(device: jax.Device) -> str:
    """The device as its maker calls it."""
    return cpu_name() if device.platform == "cpu" else device.device_kind


def current_commit() -> str | None:
    """The commit of this checkout, "+" behind it where files were changed; None outside of one."""
    git = ["git", "-C", str(FOLDER.parents[1])]
    head = [*git, "rev-parse", "--short=10", "HEAD"]
    diff = [*git, "diff", "--quiet", "HEAD", "--", "jfla", "benchmarks"]
    try:
        commit = subprocess.run(head, capture_output=True, text=True, check=True)
        changed = subprocess.run(diff, check=False).returncode
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit.stdout.strip() + ("+" if changed else "")


def newest() -> pathlib.Path | None:
    """The newest results of a GPU in the repository."""
    found = [(read(path), path) for path in FOLDER.glob("*.json")]
    dated = [(record.date, path) for record, path in found if record.platform == "gpu"]
    return max(dated)[1] if dated else None


def shape_sort(shape: str) -> int:
    """Tokens times heads of a shape's name: the order of tables."""
    sizes = {part[0]: part[1:] for part in shape.split()}
    return int(sizes["B"]) * int(sizes["T"]) * int(sizes["H"].split("/")[-1])


def _rounded(x: Any) -> Any:
    """Floats with five digits."""
    if isinstance(x, float):
        return float(f"{x:.5g}")
    if isinstance(x, dict):
        return {name: _rounded(value) for name, value in x.items()}
    return x
