"""Arrays between memory and the registers that a layout says, by the threads themselves, without TMA."""

from jax.experimental.pallas import mosaic_gpu as plgpu

from jfla.pallas.mgpu.types import Gmem, Layout, Reg, Smem


def load_with_layout(ref: Gmem | Smem, layout: Layout) -> Reg:
    """An array of global or shared memory in the registers that `layout` says, without TMA."""
    return plgpu.load(ref, layout=layout, optimized=False)


def store_from_layout(ref_gmem: Gmem, x: Reg) -> None:
    """Registers to global memory as they lie, without TMA."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref_gmem, x, optimized=False)
    else:  # JAX 0.11
        ref_gmem[...] = x
