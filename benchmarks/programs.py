"""One interface to a compiled call of any library: first call, later calls, memory, results."""

import importlib
import time
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.inputs import Arrays

Results = dict[str, Any]  # "output", "final_state", "dq", ... as arrays of the library
Part = Callable[[str, Any], Any]  # of a result's name and array: what is compared of it


class Refused(Exception):
    """An implementation does not take a case; the message is the reason."""


class Program(Protocol):
    """One implementation of one case."""

    compile_seconds: float
    peak_bytes: int | None

    def load(self, arrays: Arrays) -> Any:
        """The arrays as the library takes them; not timed."""
        ...

    def compile(self, loaded: Any) -> None:
        """What `first` does before it needs the device, where a library has a call for that."""
        ...

    def first(self, loaded: Any) -> Results:
        """Compiles, or tunes, and runs once; sets `compile_seconds` and `peak_bytes`."""
        ...

    def __call__(self, loaded: Any) -> Results:
        """Starts one call."""
        ...

    def wait(self, results: Results) -> Any:
        """Returns when the results are there."""
        ...

    def compared(
        self, results: Results, names: tuple[str, ...], part: Part
    ) -> dict[str, np.ndarray]:
        """A part of the named results in this library's layouts, in float32; not timed."""
        ...

    def release(self) -> None:
        """Gives back memory that the library keeps for later calls."""
        ...


def same(x: Any) -> Any:
    """What `arrange` and `restore` do where a library's layouts are ours."""
    return x


class JaxProgram:
    """A JAX function.

    `arrange` makes its argument of the case's arrays, `restore` undoes its layouts; both are
    jitted. Peak memory: temporaries and results of its compiled form.
    """

    compile_seconds = 0.0
    peak_bytes: int | None = None
    _compiled: Any = None

    def __init__(
        self,
        function: Callable[[Any], Results],
        arrange: Callable[[Arrays], Any] = same,
        restore: Callable[[Results], Results] = same,
    ) -> None:
        self._function = function
        self._arrange: Callable[[Arrays], Any] = (
            arrange if arrange is same else jax.jit(arrange)
        )
        self._restore = restore

    def load(self, arrays: Arrays) -> Any:
        return jax.block_until_ready(self._arrange(arrays))

    def compile(self, loaded: Any) -> None:
        start = time.perf_counter()
        compiled = self._jitted().lower(*self._arguments(loaded)).compile()
        self.compile_seconds = time.perf_counter() - start
        memory = compiled.memory_analysis()
        if memory is not None:
            self.peak_bytes = memory.temp_size_in_bytes + memory.output_size_in_bytes
        self._compiled = compiled

    def first(self, loaded: Any) -> Results:
        if self._compiled is None:
            self.compile(loaded)
        start = time.perf_counter()
        results = jax.block_until_ready(self(loaded))
        self.compile_seconds += time.perf_counter() - start
        return results

    def _jitted(self) -> Any:
        return jax.jit(self._function)

    def _arguments(self, loaded: Any) -> tuple:
        return (loaded,)

    def __call__(self, loaded: Any) -> Results:
        return self._compiled(*self._arguments(loaded))

    def wait(self, results: Results) -> Results:
        return jax.block_until_ready(results)

    def compared(
        self, results: Results, names: tuple[str, ...], part: Part
    ) -> dict[str, np.ndarray]:
        @jax.jit  # one compilation instead of two for every result
        def parts(results: Results) -> Results:
            restored = self._restore(results)
            return {
                name: part(name, restored[name]).astype("float32") for name in names
            }

        return {name: np.asarray(x) for name, x in parts(results).items()}

    def release(self) -> None:
        pass


class DecodeProgram(JaxProgram):
    """A JAX function that takes `initial_state`, donated, and gives it back as `final_state`.

    Each call goes on from the state that the last one with the same inputs left, and overwrites it.
    """

    def load(self, arrays: Arrays) -> list[Any]:
        state = jnp.copy(arrays["initial_state"])
        rest = {name: x for name, x in arrays.items() if name != "initial_state"}
        return jax.block_until_ready([rest, state])

    def __call__(self, loaded: list[Any]) -> Results:
        results = super().__call__(loaded)
        loaded[1] = results["final_state"]
        return results

    def _jitted(self) -> Any:
        def function(rest: Arrays, state: jax.Array) -> Results:
            return self._function(rest | {"initial_state": state})

        return jax.jit(function, donate_argnums=1)

    def _arguments(self, loaded: list[Any]) -> tuple:
        return tuple(loaded)


class TorchProgram:
    """A PyTorch function of a dictionary of tensors that share the memory of JAX's arrays.

    `arrange` and `restore` are those of `JaxProgram`.
    `compile_seconds`: a library that keeps its kernels on disk has a short first call where they
    are there already.
    """

    compile_seconds = 0.0
    peak_bytes: int | None = None

    def __init__(
        self,
        function: Callable[[dict[str, Any]], Results],
        arrange: Callable[[dict[str, Any]], dict[str, Any]] = same,
        restore: Callable[[Results], Results] = same,
    ) -> None:
        self._torch = importlib.import_module("torch")
        self._function = function
        self._arrange = arrange
        self._restore = restore

    def load(self, arrays: Arrays) -> dict[str, Any]:
        return self._arrange(
            {name: self._torch.from_dlpack(x) for name, x in arrays.items()}
        )

    def compile(self, loaded: dict[str, Any]) -> None:
        pass

    def first(self, loaded: dict[str, Any]) -> Results:
        """The second call tells the memory: the first one tunes, on tensors of its own."""
        start = time.perf_counter()
        self.wait(self._function(loaded))
        self.compile_seconds = time.perf_counter() - start
        cuda = self._torch.cuda
        cuda.reset_peak_memory_stats()
        before = cuda.memory_allocated()
        results = self._function(loaded)
        self.wait(results)
        self.peak_bytes = cuda.max_memory_allocated() - before
        return results

    def __call__(self, loaded: dict[str, Any]) -> Results:
        return self._function(loaded)

    def wait(self, results: Results) -> None:
        self._torch.cuda.synchronize()

    def compared(
        self, results: Results, names: tuple[str, ...], part: Part
    ) -> dict[str, np.ndarray]:
        restored = self._restore(results)
        return {
            name: part(name, restored[name]).detach().float().cpu().numpy()
            for name in names
        }

    def release(self) -> None:
        self._torch.cuda.empty_cache()
