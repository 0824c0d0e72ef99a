"""Maps of spans of time composed by pairs: against one after the other, and with matmuls that round decays near 1."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jfla import affine
from jfla.xla.chain import Maps, chain_by_pairs

BATCH, HEADS, K, V = 1, 2, 8, 4


def draw(num_spans, scalar_gate):
    """A first state, and the maps of spans."""
    rng = np.random.default_rng(2)
    batch = (num_spans, BATCH, HEADS)
    decay = rng.random((*batch, 1 if scalar_gate else K))
    erased = rng.standard_normal((*batch, K, K)) / K**0.5
    written = rng.standard_normal((*batch, K, V))
    return rng.standard_normal((BATCH, HEADS, K, V)), Maps(decay, erased, written)


@pytest.mark.parametrize("scalar_gate", [False, True], ids=["KDA", "GDN"])
@pytest.mark.parametrize("adjoint", [False, True])
@pytest.mark.parametrize("num_spans", [1, 2, 3, 6, 7, 13])
def test_a_chain_by_pairs_is_the_chain(num_spans, adjoint, scalar_gate):
    first, maps = draw(num_spans, scalar_gate)
    with jax.enable_x64(True):
        r = maps.decay[..., None] * np.eye(K) - maps.erased
        # In reverse cotangents go through the transposed maps, which `affine.chain` is given as such.
        applied = np.swapaxes(r, -1, -2) if adjoint else r
        spans = [jnp.asarray(np.moveaxis(x, 0, 2)) for x in (applied, maps.written)]
        want = affine.chain(jnp.asarray(first), *spans, reverse=adjoint)
        behind = affine.through(jnp.asarray(first), *spans, reverse=adjoint)
        maps = Maps(*(jnp.asarray(x) for x in maps))
        got, end = chain_by_pairs(jnp.asarray(first), maps, adjoint=adjoint)
        np.testing.assert_allclose(
            got, jnp.moveaxis(want, 2, 0), rtol=1e-12, atol=1e-12
        )
        np.testing.assert_allclose(end, behind, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("adjoint", [False, True])
def test_a_decay_near_1_keeps_its_digits_where_products_round(adjoint, monkeypatch):
    """Every span erases most of one channel. The others decay to a third; 0.999 in bfloat16 would leave them whole."""
    num_spans = 1000
    exact = jnp.matmul
    rounded = lambda x: x.astype(jnp.bfloat16).astype(x.dtype)
    monkeypatch.setattr(jnp, "matmul", lambda a, b: exact(rounded(a), rounded(b)))
    key = np.zeros((K, 1))
    key[0] = 1
    maps = Maps(
        jnp.full((num_spans, 1), 0.999),
        jnp.asarray(np.broadcast_to(0.95 * key @ key.T, (num_spans, K, K)), "float32"),
        jnp.zeros((num_spans, K, V)),
    )
    first = jnp.ones((K, V))
    starts, end = chain_by_pairs(first, maps, adjoint=adjoint)
    want = 0.999 ** np.arange(num_spans + 1)
    np.testing.assert_allclose(end[1:], want[-1], rtol=1e-4)
    np.testing.assert_allclose(end[0], 0, atol=1e-3)
    starts = starts[:: -1 if adjoint else 1]
    want = np.broadcast_to(want[:-1, None, None], (num_spans, K - 1, V))
    np.testing.assert_allclose(starts[:, 1:], want, rtol=1e-4)
