"""Progressive validation on a worker: what the model predicts for a batch before it trains on it.

The predictions are those of the training step's own forward pass, which comes before the update.
``Scorer`` checks them, and ``AttemptScores`` keeps them until their batches are acknowledged. This
module may import numpy, the scores and the model definition.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from backstay.errors import ConfigError
from backstay.job.metrics import Metric
from backstay.job.score_counts import OTHER, Scores
from backstay.job_spec import ProgressiveSpec
from backstay.trainer.worker.evaluation import labels_of

__all__ = ["AttemptScores", "Groups", "Predicted", "Scorer", "answers_logits", "groups_of"]

VALUE_CHARACTERS_MAX = 64
# A name is needed: figures of all records have none.
EMPTY = "(empty)"


class Groups(NamedTuple):
    """The values of a column in a batch.

    Attributes:
        names: The values, each once.
        codes: For each record the place of its value in ``names``, int64 [n].
    """

    names: Sequence[str]
    codes: NDArray[np.int64]


class Predicted(NamedTuple):
    """What was predicted for a batch.

    Attributes:
        predictions: Probabilities or logits, float64 [n].
        labels: float64 [n].
        groups: The column that the job names; None: it names none.
    """

    predictions: NDArray[np.float64]
    labels: NDArray[np.float64]
    groups: Groups | None


def groups_of(column: NDArray[Any]) -> Groups:
    """Return the values of a column as text, none empty: the first 64 characters of each."""
    values = np.asarray(column)
    if values.ndim != 1 or values.dtype.kind not in "biufUSM":
        values = np.array([_text(value) for value in values], dtype=np.str_)
    found, codes = np.unique(values, return_inverse=True)
    # Long values may be equal once they are cut.
    names, again = np.unique([_text(value) for value in found], return_inverse=True)
    return Groups(names.tolist(), again[codes].astype(np.int64))


def answers_logits(spec: ProgressiveSpec, metrics: Mapping[str, str | Metric]) -> bool:
    """Return whether the model answers logits, not probabilities.

    Args:
        spec: Of the job.
        metrics: Those of the model file.

    Raises:
        ConfigError: Neither the job nor the metrics say it.
    """
    if spec.predictions != "auto":
        return spec.predictions == "logits"
    named = {metric for metric in metrics.values() if isinstance(metric, str)}
    if ("logloss" in named) == ("logloss_of_logits" in named):
        raise ConfigError(
            "progressive.predictions: set it to probabilities or logits: auto needs a model file "
            "whose eval_metrics have one of logloss (the model answers probabilities) and "
            "logloss_of_logits"
        )
    return "logloss_of_logits" in named


class Scorer:
    """Makes of what the model answered for a batch what is counted.

    Args:
        spec: Of the job.
        metrics: Those of the model file.

    Raises:
        ConfigError: It is not known what the model answers.
    """

    def __init__(self, spec: ProgressiveSpec, metrics: Mapping[str, str | Metric]) -> None:
        self._spec = spec
        self._logits = answers_logits(spec, metrics)

    def of(self, predictions: NDArray[Any] | None, labels: Any, groups: Groups | None) -> Predicted:
        """Return what was predicted for a batch.

        Args:
            predictions: What the model answered; None: no tensor.
            labels: As ``feed`` returned them.
            groups: The column that the job names.

        Raises:
            ConfigError: It is not one number for each record.
        """
        if predictions is None:
            raise ConfigError(
                "progressive: the model must answer one tensor, with a number for each record"
            )
        if predictions.ndim == 0 or predictions.size != len(predictions):
            raise ConfigError(
                f"progressive: the model answers {list(predictions.shape)}: one number for each "
                "record is needed"
            )
        flat = predictions.reshape(-1).astype(np.float64)
        wanted = labels_of(labels, flat.shape, "for progressive metrics").astype(np.float64)
        return Predicted(flat, wanted, groups)

    def begin(self, first_batch: int, values: Sequence[str] = ()) -> AttemptScores:
        """Return the scores of an attempt at a task, which begins.

        Args:
            first_batch: Its first batch.
            values: Of the column: those that have figures of their own by now.
        """
        return AttemptScores(
            first_batch, logits=self._logits, values=values, values_max=self._spec.by_values_max
        )


class AttemptScores:
    """What an attempt at a task has predicted, batch by batch; from any thread.

    It holds not more than the records of its task.
    """

    def __init__(
        self, first_batch: int, *, logits: bool, values: Sequence[str], values_max: int
    ) -> None:
        """Begin; see ``Scorer.begin``."""
        self._lock = threading.Lock()
        self._logits = logits
        self._values = set(values)
        self._values_max = values_max
        self._first = self._counted = first_batch
        self._waiting: deque[Predicted] = deque()
        self._scores = Scores()
        self._packed = b""

    def add(self, predicted: Predicted) -> None:
        """Take what was predicted for the next batch."""
        with self._lock:
            self._waiting.append(predicted)

    def up_to(self, acknowledged: int) -> tuple[int, bytes]:
        """Return for how many batches scores are told, and their packed scores.

        Those are the batches of the task up to that number, from the attempt's first one on: all
        that are acknowledged and were added by now. Never fewer than were told before.

        Args:
            acknowledged: Batches of the task, from 0, that are acknowledged everywhere.
        """
        with self._lock:
            count = min(acknowledged - self._counted, len(self._waiting))
            if count > 0:
                self._count([self._waiting.popleft() for _ in range(count)])
                self._counted += count
                self._packed = self._scores.to_bytes()
            return self._counted, self._packed

    def all(self) -> Scores:
        """Return the scores of all batches of the attempt."""
        self.up_to(self._counted + len(self._waiting))
        return self._scores

    def _count(self, batches: Sequence[Predicted]) -> None:
        predictions = np.concatenate([one.predictions for one in batches])
        labels = np.concatenate([one.labels for one in batches])
        self._scores.all.add(predictions, labels, logits=self._logits)
        groups = [one.groups for one in batches if one.groups is not None]
        if not groups:
            return
        # Few, so that there is one addition for each, however many batches and values there are.
        names: dict[str, int] = {}
        codes = np.concatenate([self._codes(one, names) for one in groups])
        for name, code in names.items():
            rows = codes == code
            counts = self._scores.of(name)
            counts.add(predictions[rows], labels[rows], logits=self._logits)

    def _codes(self, groups: Groups, names: dict[str, int]) -> NDArray[np.int64]:
        """Return for each record the place of its value in ``names``, which grow."""
        places = np.empty(len(groups.names), np.int64)
        for code, name in enumerate(groups.names):
            shown = name
            if name not in self._values:
                if len(self._values) >= self._values_max or name == OTHER:
                    shown = OTHER
                else:
                    self._values.add(name)
            places[code] = names.setdefault(shown, len(names))
        return places[groups.codes]


def _text(value: Any) -> str:
    if isinstance(value, bytes):
        value = value.decode(errors="replace")
    # JSON may have half of a surrogate pair, which no record could hold.
    text = str(value)[:VALUE_CHARACTERS_MAX].encode(errors="replace").decode()
    return text or EMPTY
