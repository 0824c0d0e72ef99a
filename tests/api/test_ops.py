"""The chunked ops against the definition: float64 to rounding, and what float32, bfloat16 and float16 may lose."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from support.cases import (
    GATES,
    Config,
    Style,
    draw,
    error,
    errors,
    evaluate,
    oracle,
    slope,
    styles,
)

KDA = [
    Config(time=130, group=2, state=True, final=True),
    Config(
        time=65,
        heads=2,
        group=2,
        key_dim=4,
        gate="softplus",
        beta_max=1.0,
        qk_norm=True,
        final=True,
    ),
    Config(time=64, group=4, gate="sigmoid", beta_max=2.0, state=True),
    Config(
        time=63,
        heads=2,
        key_dim=4,
        value_dim=8,
        gate="sigmoid-",
        qk_norm=True,
        scale=1.0,
    ),
    Config(time=1, group=4, gate="softplus-", state=True, final=True),
    Config(time=130, group=2, segments=4, state=True, final=True),
    Config(time=130, heads=2, segments=4, gate="softplus", beta_max=2.0, qk_norm=True),
]
GDN = [
    Config(time=130, heads=2, group=2, state=True, final=True, qk_norm=True),
    Config(
        time=64,
        heads=2,
        key_dim=4,
        value_dim=8,
        gate="sigmoid",
        qk_norm=True,
        final=True,
    ),
    Config(time=63, group=2, gate="softplus-", beta_max=1.0, state=True, scale=0.5),
    Config(
        time=130,
        group=2,
        segments=4,
        gate="softplus",
        beta_max=1.0,
        state=True,
        final=True,
    ),
]
CONFIGS = KDA + [dataclasses.replace(config, op="gdn") for config in GDN]


def of_usual(configs: list[Config]) -> list[Any]:
    """Every second one; the others are left to -m slow."""
    marks = [[], [pytest.mark.slow]] * len(configs)
    return [pytest.param(config, marks=mark) for config, mark in zip(configs, marks)]


FORWARD = ("output", "final_state")
HARD = Style(
    gates=("weak", "extreme", "none", "empty", "strong"),
    betas=(0.0, 1.0, 2.0, None),
    repeated_keys=True,
)


def hypotheses(examples: int):
    """Drawn values; the compile of the first one takes what time it takes."""
    checks = [HealthCheck.too_slow, HealthCheck.differing_executors]
    options = settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=checks,
    )
    return lambda test: options(
        example(HARD)(
            example(dataclasses.replace(HARD, run=16))(given(style=styles)(test))
        )
    )


@pytest.mark.parametrize("config", of_usual(CONFIGS), ids=str)
@hypotheses(12)
def test_float64_is_the_definition(config, style):
    """Outputs, states and every gradient: against jfla's recurrence, and that and these against numpy's."""
    x, ids, cotangents = draw(config, style)
    chunked = evaluate(config, "chunk", x, ids, cotangents)
    recurrent = evaluate(config, "recurrent", x, ids, cotangents)
    assert chunked.keys() == {*cotangents, *(f"d{name}" for name in x)}
    wrong = {
        name: e for name, e in errors(chunked, recurrent).items() if not e <= 1e-12
    }
    assert not wrong

    # Neither of these knows anything of jfla: the definition in numpy, and its slope by an imaginary step.
    exact = oracle(config, x, ids)
    assert all(error(chunked[name], exact[name]) <= 1e-12 for name in cotangents)
    for name, a in x.items():
        direction = np.random.default_rng(style.seed).standard_normal(a.shape)
        terms = np.where(np.isfinite(a), direction * chunked[f"d{name}"], 0)
        assert abs(
            np.sum(terms) - slope(config, x, ids, cotangents, name, direction)
        ) <= 1e-12 * np.sum(np.abs(terms))


UNDERFLOW = 1e-35  # float32 has nothing smaller: a state can decay to 0 there that is 1e-57 in float64


def bounds(dtype: str, names) -> dict[str, float]:
    if dtype == "float32":
        return {name: 1e-5 if name in FORWARD else 1e-4 for name in names}
    special = dict.fromkeys(FORWARD, 5e-3) | {"dg": 1.5e-2, "dbeta": 1.5e-2}
    return {name: special.get(name, 8e-3) for name in names}


PRECISION = [
    dataclasses.replace(config, dtype=dtype)
    for dtype, configs in (
        ("float32", [KDA[0], KDA[1], GDN[0], GDN[3]]),
        ("bfloat16", [KDA[0], KDA[1], GDN[3]]),
        ("float16", [GDN[0]]),
    )
    for config in (dataclasses.replace(c, op="gdn") if c in GDN else c for c in configs)
]


@pytest.mark.parametrize("config", of_usual(PRECISION), ids=str)
@hypotheses(10)
def test_what_a_precision_may_lose(config, style):
    """Against float64 on the same rounded inputs. Results and gradients come in the dtype of what they belong to."""
    x, ids, cotangents = draw(config, style)
    got = evaluate(config, "chunk", x, ids, cotangents)
    exact = evaluate(
        dataclasses.replace(config, dtype="float64"), "recurrent", x, ids, cotangents
    )
    limits = bounds(config.dtype, got)
    wrong = {
        name: (e, limits[name])
        for name, e in errors(got, exact, UNDERFLOW).items()
        if not e <= limits[name]
    }
    assert not wrong
    # only what goes in and comes out is narrow: nothing is rounded on the way
    if config.dtype != "float32":
        float32 = evaluate(
            dataclasses.replace(config, dtype="float32"), "chunk", x, ids, cotangents
        )
        rounded = {name: a.astype(got[name].dtype) for name, a in float32.items()}
        limits = {
            name: 1e-6 + 1.1 * e
            for name, e in errors(rounded, exact, UNDERFLOW).items()
        }
        wrong = {
            name: (e, limits[name])
            for name, e in errors(got, exact, UNDERFLOW).items()
            if not e <= limits[name]
        }
        assert not wrong
    wide = {
        name: np.dtype("float32")
        for name in ("final_state", "dinitial_state", "da_log", "ddt_bias")
    }
    narrow = np.dtype(got["output"].dtype)
    assert str(narrow) == config.dtype
    assert all(a.dtype == wide.get(name, narrow) for name, a in got.items())


@pytest.mark.parametrize(
    "config", [KDA[0], dataclasses.replace(GDN[0], op="gdn")], ids=str
)
@pytest.mark.parametrize(
    "gates",
    [*((name,) for name in GATES), ("extreme", "weak"), ("strong", "none")],
    ids=str,
)
def test_every_kind_of_gate_in_float32(config, gates):
    """Each kind alone, and weak gates right behind strong ones, with every kind of beta."""
    config = dataclasses.replace(config, dtype="float32")
    for betas in ((0.0,), (1.0,), (2.0,), (None,)):
        style = Style(seed=5, gates=gates, run=7, betas=betas)
        x, ids, cotangents = draw(config, style)
        got = evaluate(config, "chunk", x, ids, cotangents)
        exact = evaluate(
            dataclasses.replace(config, dtype="float64"),
            "recurrent",
            x,
            ids,
            cotangents,
        )
        limits = bounds("float32", got)
        wrong = {
            name: e
            for name, e in errors(got, exact, UNDERFLOW).items()
            if not e <= limits[name]
        }
        assert not wrong, betas
