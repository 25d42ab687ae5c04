"""Which plain embeddings move to the servers, and whether their weights are as drawn."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from backstay import tables
from backstay.errors import ConfigError
from backstay.trainer.adapter.swapping import is_drawn_from, is_to_swap

SHAPE = (4_000, 16)
BOUND = math.sqrt(6.0 / sum(SHAPE))


def normal(std: float, cut: float | None = None) -> Any:
    values = np.random.default_rng(5).normal(0.0, std, SHAPE)
    if cut is not None:
        values = np.where(np.abs(values) > cut * std, np.roll(values, 1), values)
        values = np.clip(values, -cut * std, cut * std)
    return values.astype(np.float32)


def uniform(low: float, high: float) -> Any:
    return np.random.default_rng(5).uniform(low, high, SHAPE).astype(np.float32)


@pytest.mark.parametrize(
    ("initializer", "weights"),
    [
        (tables.Normal(0.0, 1.0), normal(1.0)),
        (tables.Normal(0.0, 0.01), normal(0.01)),
        (tables.Uniform(-0.05, 0.05), uniform(-0.05, 0.05)),
        (tables.Xavier(*SHAPE), uniform(-BOUND, BOUND)),
        (
            tables.Xavier(*SHAPE, gain=2.0, distribution="normal"),
            normal(2.0 * math.sqrt(2.0 / sum(SHAPE))),
        ),
        (tables.TruncatedNormal(0.0, 0.1), normal(0.1, cut=2.0)),
        (tables.Zeros(), np.zeros(SHAPE, np.float32)),
        (tables.Constant(0.1), np.full(SHAPE, 0.1, np.float32)),
        (tables.Uniform(0.5, 0.5), np.full(SHAPE, 0.5, np.float32)),
        (tables.Normal(0.25, 0.0), np.full(SHAPE, 0.25, np.float32)),
    ],
)
def test_weights_are_known_by_their_own_initializer_only(
    initializer: tables.Initializer, weights: Any
) -> None:
    assert is_drawn_from(initializer, weights)
    assert not is_drawn_from(initializer, weights * np.float32(1.1) + np.float32(1e-3))


def test_one_distribution_is_not_another() -> None:
    for initializer, weights in (
        (tables.Normal(0.0, 1.0), uniform(-1.7, 1.7)),
        (tables.Uniform(-1.0, 1.0), normal(1.0)),
        (tables.Normal(0.0, 1.0), normal(1.0, cut=2.0)),
        (tables.Zeros(), normal(1.0)),
        (tables.Normal(0.0, 1.0), np.full(SHAPE, np.nan, np.float32)),
    ):
        assert not is_drawn_from(initializer, weights)


def test_a_small_matrix_and_its_padding() -> None:
    small = normal(1.0)[:50, :4].copy()
    small[2] = 0.0
    assert is_drawn_from(tables.Normal(0.0, 1.0), small, without_row=2)
    assert is_drawn_from(tables.Normal(0.0, 1.0), small[2:3], without_row=0)  # nothing else
    assert not is_drawn_from(tables.Normal(0.0, 1.0), small * 0.01, without_row=2)


@pytest.mark.parametrize(
    ("weight_bytes", "sparse", "trains", "moves"),
    [
        (100, False, True, False),
        (101, False, True, True),
        (1, True, True, True),
        (1, True, False, False),
        (101, False, False, False),
    ],
)
def test_large_or_sparse_ones_that_train_move(
    weight_bytes: int, sparse: bool, trains: bool, moves: bool
) -> None:
    arguments: dict[str, Any] = {
        "weight_bytes": weight_bytes, "sparse": sparse, "trains": trains, "over_bytes": 100,
    }  # fmt: skip
    assert is_to_swap("a.b", **arguments, obstacle=lambda: None) is moves
    if moves and weight_bytes > 100:
        with pytest.raises(ConfigError, match=r"'a\.b' has 101 bytes.*it is odd.*over_bytes"):
            is_to_swap("a.b", **arguments, obstacle=lambda: "it is odd")
    else:
        assert not is_to_swap("a.b", **arguments, obstacle=lambda: "it is odd")
