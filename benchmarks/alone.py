"""One GPU and several processes: they compile beside one another, and are on the GPU one at a time."""

import contextlib
import fcntl
import os
import pathlib
from collections.abc import Iterator

FILE = "JFLA_BENCH_GPU_FILE"  # the environment variable that names what is locked


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Waits until no other process or thread is in this block with the file that `FILE` names.

    Without one the GPU is this process's own. Not to be entered twice by one thread: it would wait
    for itself.
    """
    name = os.environ.get(FILE)
    if name is None:
        yield
        return
    # Closing the file unlocks it.
    with pathlib.Path(name).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
