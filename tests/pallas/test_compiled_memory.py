"""Memory of calls compiled for an H200 on a machine without a GPU, by the compiler's count."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from support.compile_for_h200 import compiled_for_h200

import jfla


@pytest.mark.aot
@pytest.mark.parametrize(("op", "most"), [("kda", 710), ("gdn", 420)])
def test_both_passes_take_as_much_memory_as_documented(op, most):
    """MiB at B1 T8192 H32. Beside a result of its own, what a kernel writes in place was once given memory earlier."""
    chunk = getattr(jfla, f"chunk_{op}")
    shape = (1, 8192, 32)
    per_channel = jax.ShapeDtypeStruct((*shape, 128), jnp.bfloat16)
    decays = (*shape, 128) if op == "kda" else shape
    rest = [jax.ShapeDtypeStruct(x, jnp.float32) for x in (decays, shape)]

    def both(*arrays: jax.Array) -> Any:
        output, adjoint = jax.vjp(lambda *x: chunk(*x).output, *arrays)
        return output, adjoint(output)

    compiled = compiled_for_h200(both, *[per_channel] * 3, *rest)
    memory = compiled.memory_analysis()
    mib = (memory.temp_size_in_bytes + memory.output_size_in_bytes) / 2**20
    assert mib <= most
