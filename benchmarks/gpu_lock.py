"""A lock on a GPU that several processes share: they compile beside one another, and use the GPU one at a time."""

import contextlib
import fcntl
import os
import pathlib
from collections.abc import Iterator

FILE = "JFLA_BENCH_GPU_FILE"  # the environment variable that names what is locked


@contextlib.contextmanager
def gpu_lock() -> Iterator[None]:
    """Holds the lock that is the file named by `FILE`; without one the GPU is this process's own.

    A thread that holds it must not ask for it again: it would wait for itself.
    """
    name = os.environ.get(FILE)
    if name is None:
        yield
        return
    # Closing the file unlocks it.
    with pathlib.Path(name).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
