"""The classes of equal variables that layout inference works with: as JAX finds them, in an order of their own."""

import random

from jax.experimental.mosaic.gpu import constraints

from jfla.pallas.mgpu.equal_variables import equal_variables


def _system(pairs):
    variable = constraints.Variable
    equations = [constraints.Equals(variable(a), variable(b)) for a, b in pairs]
    fixed = constraints.Equals(
        variable("fixed"), constraints.SMEMTransforms(None, None)
    )
    return constraints.ConstraintSystem(constraints=[fixed, *equations])


def _connected(pairs, start):
    """Reached from `start` over pairs, by repetition until nothing is added."""
    reached = {start}
    while True:
        more = {x for pair in pairs if reached & set(pair) for x in pair} - reached
        if not more:
            return reached - {start}
        reached |= more


def test_classes_are_those_connected_by_equations():
    rng = random.Random(0)
    for _ in range(20):
        names = [f"v{i}" for i in range(12)]
        pairs = [tuple(rng.sample(names, 2)) for _ in range(8)]
        found = equal_variables(_system(pairs))
        assert {v.key for v in found} == {name for pair in pairs for name in pair}
        for variable, others in found.items():
            assert len(others) == len(set(others))
            assert {v.key for v in others} == _connected(pairs, variable.key)


def test_order_is_that_of_the_equations():
    found = equal_variables(_system([("d", "c"), ("a", "b"), ("b", "d")]))
    assert [v.key for v in found] == ["d", "c", "a", "b"]
    assert [v.key for v in found[constraints.Variable("d")]] == ["a", "b", "c"]
