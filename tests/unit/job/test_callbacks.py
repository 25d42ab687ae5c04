"""What callbacks are told of evaluations, and when."""

from __future__ import annotations

from collections.abc import Mapping

from backstay.job.callbacks import Callback, Callbacks, Evaluation


class Recorder(Callback):
    def __init__(self) -> None:
        self.seen: list[dict[str, float]] = []

    def on_evaluation(self, metrics: Mapping[str, float]) -> None:
        self.seen.append(dict(metrics))


def told(*evaluations: Evaluation | None) -> list[dict[str, float]]:
    """Return what is heard of the newest evaluations that a row of tasks come with."""
    recorder = Recorder()
    callbacks = Callbacks([recorder], lambda rate: None)
    for one in evaluations:
        callbacks.evaluation_is(one)
    return recorder.seen


def test_each_evaluation_is_told_once() -> None:
    first, second = Evaluation(1, {"auc": 0.5}), Evaluation(2, {"auc": 0.5})
    assert told(None, first, first, second, second) == [{"auc": 0.5}, {"auc": 0.5}]


def test_a_metric_without_a_value_is_no_news() -> None:
    assert len(told(*(Evaluation(1, {"auc": float("nan")}) for _ in range(3)))) == 1


def test_an_evaluation_that_is_done_again_after_a_restore_is_told_again() -> None:
    seen = told(Evaluation(1, {"auc": 0.5}), None, Evaluation(1, {"auc": 0.6}))
    assert [metrics["auc"] for metrics in seen] == [0.5, 0.6]
