"""The architecture that Mosaic GPU lowers to, where `compiling_for` says it.

Mosaic infers it from the default device, and takes compute capability 9.0 where that is no GPU. The instructions it
chooses by it (copies, fences, casts) would be Hopper's in a kernel for another GPU.
"""

from collections.abc import Callable

from jax.experimental.mosaic.gpu import utils

from jfla.pallas.context import target

_of_device: Callable[[], tuple[int, int]] = utils._infer_arch


def infer_arch() -> tuple[int, int]:
    """(major, minor) of the target that was described, else of the device that JAX computes on."""
    described = target()
    if described is None:
        return _of_device()
    major, minor = described.compute_capability.split(".")
    return int(major), int(minor)


utils._infer_arch = infer_arch
