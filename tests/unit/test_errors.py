"""What is wrong always has words: an error without a text never looks like "all is well"."""

from __future__ import annotations

import numpy as np
import pytest

from backstay import errors
from backstay.errors import BackstayError
from backstay.schedule.evaluation import RoundOutputs, TaskOutputs

ERRORS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, BackstayError)
]


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_an_error_without_a_text_has_its_name(kind: type[BackstayError]) -> None:
    assert str(kind()) == kind.__name__
    assert str(kind("")) == kind.__name__
    assert str(kind("the disk is full")) == "the disk is full"


def test_a_metric_that_fails_without_a_word_is_named() -> None:
    outputs, zeros = RoundOutputs(), np.zeros(3, np.float32)
    outputs.add(0, TaskOutputs(3, labels=zeros, predictions=zeros))

    def fails(_labels: object, _predictions: object) -> float:
        raise ValueError

    assert outputs.compute({"auc": fails}) == {}
    assert outputs.problems == {"auc": "ValueError"}
