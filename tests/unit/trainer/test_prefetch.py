"""Which features go to which layer, learned from one batch."""

from __future__ import annotations

from typing import Any

import numpy as np

from backstay.trainer.model.prefetch import PrefetchPlan


class Layer:
    """Notes what it was asked to fetch."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def prefetch(self, ids: Any, /) -> None:
        self.asked.append(ids.tolist())


def test_whole_features_columns_and_ranges_are_found() -> None:
    whole, column, columns, computed = Layer(), Layer(), Layer(), Layer()
    users = np.array([5, 6, 7])
    fields = np.arange(12).reshape(3, 4)
    plan = PrefetchPlan(np.asarray)
    plan.watch(whole, [np.array([1, 2, 3])])  # of an evaluation before
    plan.start()
    plan.watch(whole, [users])
    plan.watch(column, [fields[:, 2]])
    plan.watch(columns, [fields[:, 1:3]])
    plan.watch(computed, [users * 31])
    plan.watch(columns, [users, fields])  # with offsets: left out
    plan.learn({"user": users, "fields": fields, "hour": np.ones(3, np.float32)})
    assert plan.is_learned
    next_users, next_fields = users + 100, fields + 100
    plan.prefetch({"user": next_users, "fields": next_fields, "hour": np.ones(3, np.float32)})
    assert whole.asked == [next_users.tolist()]
    assert column.asked == [next_fields[:, 2].tolist()]
    assert columns.asked == [next_fields[:, 1:3].tolist()]
    assert computed.asked == []


def test_what_the_model_changes_in_place_is_still_found() -> None:
    layer, users = Layer(), np.array([5, 6, 7])
    plan = PrefetchPlan(np.asarray)
    assert not plan.is_learned
    given = users.copy()
    plan.watch(layer, [given])
    given += 1000
    plan.learn({"0": users})
    plan.prefetch({"0": users})
    assert layer.asked == [[5, 6, 7]]
