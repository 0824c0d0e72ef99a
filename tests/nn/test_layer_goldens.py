"""The layers against the layers of other libraries: output, input gradient, and a cached run."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support import golden_layers, goldens


@pytest.fixture(params=golden_layers.FAMILIES, scope="module")
def golden(request, tmp_path_factory):
    family = request.param
    layer, arrays, options = golden_layers.load(family, tmp_path_factory.mktemp(family))
    return layer, arrays, options, goldens.TOLERANCES[f"layer_{family}.npz"]


def test_output_and_gradient_are_the_peers(golden):
    layer, arrays, _, tolerance = golden

    @nnx.jit
    def run(layer, x, dy):
        y, pullback = jax.vjp(layer, x)
        return y, pullback(dy)[0]

    y, dx = run(layer, arrays["x"], arrays["dy"])
    assert goldens.rms_error(y, arrays["y"]) <= tolerance["y"]
    assert goldens.rms_error(dx, arrays["dx"]) <= tolerance["dx"]


def test_cached_run_is_the_peers(golden):
    layer, arrays, options, tolerance = golden
    run = nnx.jit(lambda layer, x, cache: layer(x, cache=cache))
    x, prefill = jnp.asarray(arrays["decode/x"]), options["prefill"]
    y, cache = run(layer, x[:, :prefill], layer.init_cache(x.shape[0]))
    assert goldens.rms_error(y, arrays["decode/y_prefill"]) <= tolerance["decode"]
    steps = []
    for t in range(prefill, x.shape[1]):
        y, cache = run(layer, x[:, t : t + 1], cache)
        steps.append(y)
    assert len(steps) == options["steps"]
    assert (
        goldens.rms_error(np.concatenate(steps, axis=1), arrays["decode/y_steps"])
        <= tolerance["decode"]
    )

    state = arrays["decode/recurrent_state"]
    if options["recurrent_state_layout"] == "B,HV,V,K":
        state = state.swapaxes(-1, -2)
    assert cache.state.shape == state.shape
    assert goldens.rms_error(cache.state, state) <= tolerance["decode"]
    # The peers keep as many inputs as the kernel is long; the oldest of them is never read again.
    tails = jnp.concatenate(
        [tail.reshape(*tail.shape[:2], -1) for tail in cache.tails], axis=-1
    )
    assert (
        goldens.rms_error(tails, arrays["decode/conv_state"][:, :, 1:].swapaxes(1, 2))
        <= tolerance["conv_state"]
    )
