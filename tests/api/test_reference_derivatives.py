"""Derivatives of the reference, in both modes and to second order."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads
from support.cases import Config, Style, call, draw, error, slope


def scalar(config: Config, form: str, cotangents):
    def loss(x):
        out = call(config, form, x, None)
        return jnp.sum(out.output * cotangents["output"]) + jnp.sum(
            out.final_state * cotangents["final_state"]
        )

    return loss


@pytest.mark.parametrize(("op", "mode"), [("kda", "fwd"), ("gdn", "rev")])
def test_second_derivatives_of_the_recurrence_against_finite_differences(op, mode):
    """Forward over reverse and reverse over reverse."""
    config = Config(
        op,
        batch=1,
        time=3,
        key_dim=2,
        value_dim=2,
        gate="softplus",
        qk_norm=True,
        state=True,
        final=True,
    )
    with jax.enable_x64(True):
        x, _, cotangents = draw(config, Style(1))
        x = jax.tree.map(jnp.asarray, x)
        loss = scalar(config, "recurrent", cotangents)
        check_grads(
            jax.jit(jax.grad(loss)), (x,), order=1, modes=[mode], atol=1e-6, rtol=1e-6
        )


@pytest.mark.slow
def test_hessian_of_the_chunked_form_is_that_of_the_recurrence():
    """With respect to the queries, keys and decays around the chunk boundary."""
    config = Config("kda", batch=1, time=66, key_dim=2, value_dim=2, final=True)
    with jax.enable_x64(True):
        x, _, cotangents = draw(config, Style(2))
        x = jax.tree.map(jnp.asarray, x)
        near = {name: x[name][:, 62:] for name in ("q", "k", "g")}

        def hessian(form):
            loss = scalar(config, form, cotangents)
            moved = lambda near: (
                x | {name: x[name].at[:, 62:].set(near[name]) for name in near}
            )
            return jax.jit(jax.hessian(lambda near: loss(moved(near))))(near)

        chunked, recurrent = hessian("plain"), hessian("recurrent")
        errors = jax.tree.map(error, chunked, recurrent)
        # Each by itself: a NaN can hide in a maximum.
        assert all(x <= 1e-10 for x in jax.tree.leaves(errors))
        assert float(jnp.linalg.norm(recurrent["k"]["g"])) > 0.1


@pytest.mark.parametrize("op", ["kda", "gdn"])
@pytest.mark.parametrize("form", ["plain", "recurrent"])
def test_jvp_of_the_reference_is_the_slope_of_the_oracle(op, form):
    config = Config(op, time=66, gate="softplus", state=True, final=True)
    x, _, cotangents = draw(config, Style(3))
    tangents = {name: np.cos(a) for name, a in x.items()}
    with jax.enable_x64(True):
        loss = scalar(config, form, cotangents)
        slopes = jax.jit(lambda x, dx: jax.jvp(loss, (x,), (dx,))[1])(x, tangents)
    want = sum(slope(config, x, None, cotangents, name, tangents[name]) for name in x)
    np.testing.assert_allclose(slopes, want, rtol=1e-10)
