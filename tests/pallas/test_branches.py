"""Branches of kernels by a number: what they do, and that no kernel converts a boolean."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.mosaic import gpu as mosaic

import jfla
from jfla.pallas.mgpu.branches import cond, int_of, when
from jfla.pallas.mgpu.launch import launch


@pytest.mark.interpreted
@pytest.mark.parametrize("x", [-1, 3])
def test_a_kernel_takes_the_branch_of_its_condition(x):
    def body(x_gmem, outputs_gmem, _smem, _barriers):
        of_cond, of_when = outputs_gmem
        is_positive = x_gmem[0] > 0
        of_cond[0] = cond(is_positive, lambda a: 2 * a, lambda a: a - 1, x_gmem[0])
        of_when[0] = int_of(is_positive)

        @when(is_positive)
        def _():
            of_when[0] = of_when[0] + 10

    scalar = jax.ShapeDtypeStruct((1,), jnp.int32)
    with jfla.pallas.interpret():
        of_cond, of_when = launch(
            body,
            jnp.array([x], jnp.int32),
            (scalar, scalar),
            grid={},
            num_warpgroups=1,
            name="branches",
        )
    assert (int(of_cond[0]), int(of_when[0])) == ((6, 11) if x > 0 else (-2, 0))


@pytest.mark.parametrize(
    ("op", "shape"), [("kda", (8, 4096, 32)), ("gdn", (3, 4096, 50))]
)
def test_no_kernel_converts_less_than_16_bits(op, shape, monkeypatch):
    """With JAX 0.11.2 each such conversion costs 10 ms of lowering."""
    widths = []
    astype = mosaic.FragmentedArray.astype

    def recording(self, new_dtype, **kwargs):
        widths.extend(mosaic.bitwidth(x) for x in (self.mlir_dtype, new_dtype))
        return astype(self, new_dtype, **kwargs)

    monkeypatch.setattr(mosaic.FragmentedArray, "astype", recording)
    chunk = getattr(jfla, f"chunk_{op}")

    def value_and_grads(do, *main):
        out, adjoint = jax.vjp(lambda *x: chunk(*x).output, *main)
        return out, adjoint(do)

    tokens = jax.ShapeDtypeStruct((*shape, 128), jnp.bfloat16)
    gates = jax.ShapeDtypeStruct(shape, jnp.float32)
    decays = jax.ShapeDtypeStruct((*shape, 128), jnp.float32) if op == "kda" else gates
    with jfla.pallas.compiling_for("9.0"):
        traced = jax.jit(value_and_grads).trace(
            tokens, tokens, tokens, tokens, decays, gates
        )
        traced.lower(lowering_platforms=("cuda",))
    assert min(widths) >= 16
