"""The variables of layout inference that must be equal, from its constraints: lists in the order of the program.

JAX 0.11.2 sorts them by the printed text of their operations. That takes two fifths of the time in which KDA's kernels
are lowered, because printing an operation numbers the values of the whole kernel. Any order will do that is the same in
every process. JAX 0.12 has this one.
"""

import jax
from jax.experimental.mosaic.gpu import constraints

Var = constraints.Variable


def equal_variables(system: constraints.ConstraintSystem) -> dict[Var, list[Var]]:
    """For each variable of an equation, the others that equations make equal to it."""
    classes: dict[Var, list[Var]] = {}
    for constraint in system.constraints:
        match constraint:
            case constraints.Equals(lhs=Var() as left, rhs=Var() as right):
                _unite(classes, left, right)
    return {
        v: [other for other in members if other != v] for v, members in classes.items()
    }


def _unite(classes: dict[Var, list[Var]], left: Var, right: Var) -> None:
    """Puts the class of `right` behind that of `left`: members of a class share one list."""
    first = classes.setdefault(left, [left])
    second = classes.setdefault(right, [right])
    if first is second:
        return
    first.extend(second)
    for variable in second:
        classes[variable] = first


if jax.__version__ == "0.11.2":
    constraints.compute_transitively_equal_vars = equal_variables
