"""Several processes of one run: how they find each other, agree, and which of them writes.

Every process runs the same program on its own devices (`jax.distributed`). Without `start` there is
one, and nothing here sends anything.
"""

import hashlib

import jax
import numpy as np
from jax.experimental import multihost_utils

from jfla.cli.refused import Refused

_LONGEST = 4096  # bytes of what the first process tells the others


def start(
    coordinator: str | None, num_processes: int | None, process_id: int | None
) -> None:
    """Joins the other processes, before anything is computed.

    `coordinator` is None for a single process, "HOST:PORT" of the process with id 0, or "auto" for
    what the cluster's environment says.

    **Raises:** `Refused` for options that do not fit together, and for a cluster that JAX does not
    know.
    """
    if coordinator is None:
        for option, value in (
            ("num-processes", num_processes),
            ("process-id", process_id),
        ):
            if value is not None:
                raise Refused(
                    option, f"--coordinator must be given with it, got {value} alone"
                )
        return
    if coordinator == "auto":
        if num_processes is not None or process_id is not None:
            raise Refused(
                "coordinator", "auto must come without --num-processes and --process-id"
            )
        try:
            jax.distributed.initialize()
        except ValueError as error:
            raise Refused(
                "coordinator",
                f"auto must find a cluster in the environment (Slurm, Open MPI, ...), got: {error}",
            ) from None
        return
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal():
        raise Refused(
            "coordinator", f"it must be HOST:PORT or auto, got {coordinator!r}"
        )
    if num_processes is None or process_id is None:
        raise Refused(
            "coordinator", "an address must come with --num-processes and --process-id"
        )
    if not 0 <= process_id < num_processes:
        raise Refused(
            "process-id", f"it must be in 0 .. {num_processes - 1}, got {process_id}"
        )
    jax.distributed.initialize(coordinator, num_processes, process_id)


def is_first() -> bool:
    """Whether this is the process that prints and writes what all have."""
    return jax.process_index() == 0


def agree(what: str, value: str | bytes) -> None:
    """Raises `ValueError` in all processes unless `value` is the same in all.

    Processes with different programs would wait for each other for ever.
    """
    if jax.process_count() == 1:
        return
    encoded = value.encode() if isinstance(value, str) else value
    digest = np.frombuffer(hashlib.sha256(encoded).digest(), np.uint8)
    digests = multihost_utils.process_allgather(digest)
    different = np.flatnonzero((digests != digests[0]).any(axis=1)).tolist()
    if different:
        raise ValueError(
            f"all processes must have the same {what}, got other ones in processes {different} "
            "than in process 0"
        )


def told(text: str) -> str:
    """What the first process says, cut to a few kB, in all processes; all wait for it."""
    if jax.process_count() == 1:
        return text
    encoded = text.encode()[:_LONGEST].ljust(_LONGEST, b"\0")
    received = multihost_utils.broadcast_one_to_all(np.frombuffer(encoded, np.uint8))
    return bytes(np.asarray(received, np.uint8)).rstrip(b"\0").decode(errors="ignore")
