"""The correction by the trainer's steps that a push brings along."""

from __future__ import annotations

import pytest

from backstay.tables import SGD, Adam, TableSpec
from backstay.trainer.push_steps import PushSteps
from backstay.trainer.table import Table

GLOBAL = Adam(beta1=0.5, beta2=0.75, steps="global")


def table(name: str, optimizer: Adam | SGD) -> Table:
    return Table.of(TableSpec.sparse(name, 1, optimizer=optimizer))


def test_each_table_counts_its_own_pushes() -> None:
    steps, one, other = PushSteps(), table("one", GLOBAL), table("other", GLOBAL)
    found = [steps.correction(one), steps.correction(one), steps.correction(other)]
    assert found == [GLOBAL.correction(step) for step in (1, 2, 1)]
    assert found[0] == pytest.approx(0.5**1 / 0.5)


def test_the_steps_of_all_trainers_count() -> None:
    steps, one = PushSteps(), table("one", GLOBAL)
    steps.correction(one)
    steps.done = 7
    assert steps.correction(one) == GLOBAL.correction(8)
    # What this one was told is late: its own pushes since then count, and no step comes twice.
    assert steps.correction(one) == GLOBAL.correction(9)
    steps.done = 3
    assert steps.correction(one) == GLOBAL.correction(10)


def test_others_are_not_corrected() -> None:
    steps = PushSteps()
    assert steps.correction(table("sgd", SGD())) == 1.0
    assert steps.correction(table("row", Adam())) == 1.0
