"""Facts about compiled kernels, by name: registers, spills, instructions, shared memory; and their files."""

import json
import os
import pathlib
import re

Facts = dict[str, dict[str, int]]  # of every kernel, by name


def facts(report: str, counted: dict[str, str]) -> Facts:
    """Of every kernel in the compiler's report: registers, spilled bytes, instructions by class; the worst of each."""
    found: Facts = {}
    resources = (
        r"Function properties for (jfla_\w+?)_mosaic_gpu_kernel\s+"
        r".*?(\d+) bytes spill stores.*?Used (\d+) registers"
    )
    for name, spilled, registers in re.findall(resources, report, re.DOTALL):
        kernel = found.setdefault(name, {"registers": 0, "spilled bytes": 0})
        kernel["registers"] = max(kernel["registers"], int(registers))
        kernel["spilled bytes"] = max(kernel["spilled bytes"], int(spilled))
    for name in re.findall(
        r"serialized due to .*? the function '(jfla_\w+?)_mosaic_gpu_kernel'", report
    ):
        found[name]["serialized"] = 1
    for name, code in re.findall(
        r"\.text\.(jfla_\w+?)_mosaic_gpu_kernel:(.*?)(?=//-----|\Z)", report, re.DOTALL
    ):
        for fact, start in counted.items():
            count = len(re.findall(rf"\s{re.escape(start)}[.\s;]", code))
            found[name][fact] = max(found[name].get(fact, 0), count)
    return found


def check_report(
    path: pathlib.Path, name: str, now: Facts, counted: dict[str, str]
) -> None:
    """Holds `now` to the report, or writes it there."""
    stored = json.loads(path.read_text()) if path.exists() else {}
    if os.environ.get("JFLA_WRITE_REPORT"):
        path.write_text(
            json.dumps(dict(sorted((stored | {name: now}).items())), indent=1) + "\n"
        )
        return
    # what an earlier test compiled is not reported again
    assert now.keys() <= stored[name].keys()
    for kernel in now:
        before = stored[name][kernel]
        for fact in counted:
            assert now[kernel][fact] >= before[fact] * 0.9, (
                f"{kernel}: {fact} {before[fact]} -> {now[kernel][fact]}"
            )
