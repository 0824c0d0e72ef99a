"""Sets up every test run: platform, eight simulated devices, quick compiles, checked shapes, skips with reasons."""

import contextlib
import functools
import gc
import importlib.util
import os
import pathlib
import shutil

import pytest
from jaxtyping import install_import_hook

# These need PyTorch and a checkout of Flash Linear Attention.
collect_ignore = [
    f"conformance/{name}.py" for name in ("fla_adapter", "fla_plugin", "run_fla")
]

# Shapes in the annotations are checked at every call. `jfla.api` and `jfla._inputs.validate` are left out: bad
# arguments must meet their own ValueErrors.
_CHECKED = [
    "jfla.reference",
    "jfla.gates",
    "jfla.packing",
    "jfla._inputs.canonicalize",
    "jfla._inputs.chunking",
    "jfla.parallel",
    "jfla.stages",
    "jfla.affine",
    "jfla.xla",
    "jfla.pallas",
]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--compiled",
        action="store_true",
        help="compile for this machine's GPU the kernels that tests interpret otherwise",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Before any test module imports JAX."""
    marker = config.getoption("markexpr", "").strip()
    compiled = config.getoption("compiled", default=False)
    if marker == "gpu" or compiled:
        os.environ["JFLA_TEST_GPU"] = "1"  # workers of pytest-xdist inherit it
    if os.environ.get("JFLA_TEST_GPU", "0") != "1":
        os.environ["JAX_PLATFORMS"] = "cpu"
    else:
        # Processes side by side would keep memory that a test has given back.
        os.environ.setdefault("XLA_PYTHON_CLIENT_ALLOCATOR", "platform")
    flags = "--xla_force_host_platform_device_count=8"
    if os.environ.get("JFLA_TEST_GPU", "0") != "1" and marker != "aot":
        flags += " --xla_backend_optimization_level=0"  # most of the time is compiling, and half of that is LLVM's
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
    # Tracing makes many objects, few of them garbage: looking for it takes up to a tenth of the time.
    gc.set_threshold(200_000, 50, 50)
    install_import_hook(_CHECKED, "beartype.beartype")
    from support import interpreter

    from jfla import gates
    from jfla.parallel.stretch import Stretch

    interpreter.quicken()
    if compiled:
        from support import kernel_cases

        import jfla

        jfla.pallas.interpret = contextlib.nullcontext
        kernel_cases.INTERPRET = False
    for pytree in (gates.SoftplusGate, gates.SigmoidGate, Stretch):
        # JAX builds pytrees with placeholders in the place of arrays
        pytree.__init__ = pytree.__init__.__wrapped__


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    compiled = config.getoption("compiled", default=False)
    for item in items:
        if (reason := _reason_to_skip(item, compiled)) is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


def _reason_to_skip(item: pytest.Item, compiled: bool) -> str | None:
    has = item.get_closest_marker
    reason = None
    if compiled and has("interpreted"):
        reason = "holds in interpret mode alone"
    if reason is None and (compiled or has("gpu")):
        reason = _no_gpu()
    if reason is None and has("aot"):
        reason = _no_compiler()
    return reason


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Frees compiled functions between files, before they are too many.

    Each takes several memory maps, of which Linux allows a process 65,530. Without one left, LLVM ends in a
    segmentation fault.
    """
    if (
        nextitem is not None
        and nextitem.path != item.path
        and _num_memory_maps() > 20_000
    ):
        import jax

        jax.clear_caches()
        gc.collect()


def _num_memory_maps() -> int:
    maps = pathlib.Path("/proc/self/maps")
    return len(maps.read_bytes().splitlines()) if maps.exists() else 0


@functools.cache
def _no_gpu() -> str | None:
    if os.environ.get("JFLA_TEST_GPU", "0") != "1":
        return (
            "needs a GPU of compute capability 9.0: run with JFLA_TEST_GPU=1 or -m gpu"
        )
    import jax

    device = jax.devices()[0]
    if device.platform != "gpu":
        return (
            f"needs a GPU of compute capability 9.0, JAX found only {device.platform}"
        )
    if device.compute_capability != "9.0":
        return f"needs compute capability 9.0, {device.device_kind} has {device.compute_capability}"
    return None


@functools.cache
def _no_compiler() -> str | None:
    for package in ("jax_cuda13_plugin", "jax_plugins.xla_cuda13"):
        try:
            found = importlib.util.find_spec(package)
        except ModuleNotFoundError:
            found = None
        if found is None:
            return f"compiling for the H200 needs the dependency group 'aot': no package {package}"
    if shutil.which("ptxas") is None and not any(_packaged_ptxas()):
        return "compiling for the H200 needs the dependency group 'aot': no ptxas"
    return None


def _packaged_ptxas() -> list[pathlib.Path]:
    spec = importlib.util.find_spec("nvidia")
    folders = [] if spec is None else spec.submodule_search_locations or []
    return [
        path for folder in folders for path in pathlib.Path(folder).glob("*/bin/ptxas")
    ]
