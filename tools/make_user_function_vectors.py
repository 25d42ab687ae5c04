"""Write tests/vectors/user_functions.json: user functions, and what they give on NumPy arrays.

The servers must compute the same: to the bit, or to 1e-6 where a function uses exp, log or general
powers, whose last bit NumPy rounds otherwise.

    python -m tools.make_user_function_vectors
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from backstay.tables import UserOptimizer, per_element, per_row
from backstay.tables.part import in_json

PATH = Path(__file__).parents[1] / "tests" / "vectors" / "user_functions.json"
STEPS = 6


def adagrad(
    weights: Any,
    gradient: Any,
    accumulator: Any = per_element(),
    *,
    learning_rate: float,
    epsilon: float = 1e-10,
) -> Any:
    """The built-in Adagrad, in its order of operations."""
    accumulator = accumulator + gradient * gradient
    step = learning_rate * gradient / (np.sqrt(accumulator) + epsilon)
    return weights - step, accumulator


def ftrl(
    weights: Any,
    gradient: Any,
    linear: Any = per_element(),
    accumulator: Any = per_element(0.1),
    *,
    learning_rate: float,
    l1: float = 0.0,
    l2: float = 0.0,
    learning_rate_power: float = -0.5,
) -> Any:
    """The built-in FTRL, in its order of operations."""
    before = accumulator**-learning_rate_power
    accumulator = accumulator + gradient * gradient
    after = accumulator**-learning_rate_power
    linear = linear + (gradient - (after - before) / learning_rate * weights)
    shrunk = (np.sign(linear) * l1 - linear) / (after / learning_rate + l2)
    return np.where(np.abs(linear) > l1, shrunk, 0.0), linear, accumulator


def clipped_by_norm(
    weights: Any,
    gradient: Any,
    velocity: Any = per_element(),
    count: Any = per_row(),
    *,
    learning_rate: float,
    momentum: float = 0.9,
    limit: float = 1.0,
) -> Any:
    """Reductions, a state of one value a row, masks."""
    norm = np.sqrt(np.sum(gradient * gradient))
    gradient = gradient * np.minimum(1.0, limit / np.maximum(norm, 1e-6))
    velocity = momentum * velocity + gradient
    spread = np.max(weights) - np.min(weights)
    step = learning_rate * velocity
    step = np.where((spread > 4.0) | (count < 2.0), 0.5 * step, step)
    weights = weights - step - 0.01 * np.mean(weights)
    return np.clip(weights, -2.0, 2.0), velocity, count + 1.0


def soft(
    weights: Any,
    gradient: Any,
    scale: Any = per_row(1.0),
    *,
    learning_rate: float,
    power: float = 0.75,
) -> Any:
    """Functions whose last bit is ours."""
    scale = 0.9 * scale + np.mean(np.abs(gradient)) ** power
    weights = weights - learning_rate * np.log(1.0 + np.exp(gradient)) / scale
    return weights * np.exp(-(weights**2) * 0.01), scale


CASES: list[tuple[Callable[..., Any], dict[str, float], bool]] = [
    (adagrad, {"learning_rate": 0.05, "epsilon": 1e-6}, True),
    (ftrl, {"learning_rate": 0.1, "l1": 0.2, "l2": 0.01}, True),
    (clipped_by_norm, {"learning_rate": 0.1}, True),
    (soft, {"learning_rate": 0.1}, False),
]


def case(function: Callable[..., Any], settings: dict[str, float], exact: bool) -> dict[str, Any]:
    """Return one row's life: its weights and states after each gradient."""
    optimizer = UserOptimizer.of(function, **settings)
    random = np.random.default_rng(7)
    dim = 19
    weights = random.normal(size=dim).astype(np.float32)
    states: list[Any] = [
        np.full(dim, state.initial, np.float32)
        if state.per == "element"
        else np.float32(state.initial)
        for state in optimizer.states
    ]
    first, steps = weights.tolist(), []
    given = {**optimizer.settings, "learning_rate": optimizer.learning_rate}
    for _ in range(STEPS):
        gradient = random.normal(size=dim).astype(np.float32)
        weights, *states = function(weights, gradient, *states, **given)
        assert weights.dtype == np.float32
        assert all(np.asarray(state).dtype == np.float32 for state in states)
        row = np.concatenate([weights, *(np.atleast_1d(state) for state in states)])
        steps.append({"gradient": gradient.tolist(), "row": row.tolist()})
    return {
        "optimizer": in_json(optimizer),
        "exact": exact,
        "weights": first,
        "steps": steps,
    }


def text() -> str:
    """Return the file's content."""
    return json.dumps([case(*one) for one in CASES], indent=1) + "\n"


if __name__ == "__main__":
    PATH.write_text(text())
