"""Outputs of evaluation tasks put together, and a job's progress in a checkpoint."""

import numpy as np
import pytest
from numpy.typing import NDArray

from backstay.errors import InvalidRequest, LimitExceeded
from backstay.schedule.evaluation import RoundOutputs, TaskOutputs


def outputs(*labels: float, **values: float) -> TaskOutputs:
    array = np.array(labels, dtype=np.float32)
    return TaskOutputs(len(labels), array, 10 * array[:, np.newaxis], values)


def joined(labels: NDArray[np.float32], predictions: NDArray[np.float32]) -> float:
    assert (10 * labels == predictions[:, 0]).all()
    return float("".join(str(int(label)) for label in labels))


def refusing(labels: NDArray[np.float32], predictions: NDArray[np.float32]) -> float:
    raise InvalidRequest("needs both classes")


def test_a_task_counts_once_and_in_its_place() -> None:
    together = RoundOutputs()
    assert together.add(2, outputs(5))
    assert together.add(0, outputs(1, 2))
    assert not together.add(2, outputs(9))
    assert together.add(1, outputs())
    assert together.records == 3
    assert together.compute({"joined": joined}) == {"joined": 125.0}


def test_values_of_tasks_are_averaged_by_records() -> None:
    together = RoundOutputs()
    together.add(0, TaskOutputs(3, values={"f": 1.0}))
    together.add(1, TaskOutputs(1, values={"f": 5.0, "g": 2.0}))
    together.add(2, TaskOutputs(0, values={"f": float("nan")}))
    assert together.compute({}) == {"f": 2.0, "g": 2.0}


def test_what_cannot_be_computed_is_named() -> None:
    together = RoundOutputs()
    assert together.compute({"joined": joined}) == {}
    assert together.problems == {"joined": "there are no records"}
    together.add(0, outputs(1))
    assert together.compute({"joined": joined, "refusing": refusing}) == {"joined": 1.0}
    assert together.problems == {"refusing": "needs both classes"}


def test_rows_of_another_shape_are_refused() -> None:
    together = RoundOutputs()
    together.add(0, outputs(1))
    wide = TaskOutputs(1, np.zeros(1), np.zeros((1, 2)))
    with pytest.raises(InvalidRequest, match="task 1 have rows of the shapes"):
        together.add(1, wide)
    assert together.records == 1


def test_memory_has_a_limit() -> None:
    together = RoundOutputs(bytes_max=16)
    together.add(0, outputs(1, 2))
    with pytest.raises(LimitExceeded, match="16 bytes"):
        together.add(1, outputs(1))
    assert together.records == 2


def test_outputs_must_fit_their_records() -> None:
    with pytest.raises(InvalidRequest, match=r"labels have the shape \(2,\), expected 3"):
        TaskOutputs(3, np.zeros(2), np.zeros(3))
    with pytest.raises(InvalidRequest, match="without predictions"):
        TaskOutputs(3, np.zeros(3))
    with pytest.raises(InvalidRequest, match="-1 records"):
        TaskOutputs(-1)
