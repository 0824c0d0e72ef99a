"""Names this machine's CPU."""

import os
import platform


def cpu_name() -> str:
    """The CPU's model and the number of cores this process may use."""
    try:
        with open("/proc/cpuinfo") as file:
            model = next(
                line.split(":", 1)[1].strip()
                for line in file
                if line.startswith("model name")
            )
    except (OSError, StopIteration):
        model = platform.processor() or platform.machine()
    cores = (
        len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count()
    )
    return f"{model}, {cores} cores"
