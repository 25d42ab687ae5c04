"""What attempts have predicted of the tasks of a round that are not done: each batch once.

An attempt tells with its acknowledged batches what was predicted for exactly these, from its first
batch on. The next attempt begins behind them, and so with their scores. A task counts when it is
done: with the scores of the attempt that did it, and those that this attempt began with. Scores of
other attempts at the same batches count nowhere.

Scores stay packed until a task is done, because most of them are told again and again. What an
attempt begins with is recorded before it begins. A new job master knows no other batches: they are
done again. Imports ``backstay.job`` and ``job_engine``; does no I/O.
"""

from __future__ import annotations

import base64
import binascii
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from backstay.errors import InvalidRequest
from backstay.job.score_counts import Scores
from backstay.json_record import JsonRecord

__all__ = [
    "BegunKey",
    "RoundScores",
    "Scored",
    "begun_keys",
    "begun_scores",
    "packed_text",
    "scores_of_text",
    "unpacked_text",
]

log = logging.getLogger(__name__)


class Scored(NamedTuple):
    """What an attempt has predicted.

    Attributes:
        first_batch: Where it began.
        packed: ``Scores`` of the batches from there on that it tells as acknowledged.
    """

    first_batch: int
    packed: bytes


@dataclass(frozen=True)
class _BegunForm(JsonRecord, what="scores of begun tasks"):
    """``progressive/begun/<round>/<task>/<batch>``: of the batches before that one.

    Attributes:
        by: The column whose values have scores of their own.
        scores: Packed, as text.
    """

    by: str
    scores: str


class BegunKey(NamedTuple):
    """The key of a record of what an attempt began with, and what it says."""

    key: str
    round: str
    task: int
    batch: int


class _Known(NamedTuple):
    """The scores of the first batches of a task, in parts that are to be added up."""

    batches: int
    parts: tuple[bytes, ...]


class RoundScores:
    """The scores of tasks that were begun, by task.

    Args:
        by: The column whose values have scores of their own; empty: none.
        recorded: What attempts of earlier job masters began with: packed scores by task and the
            number of the first batch.
    """

    def __init__(
        self, by: str = "", recorded: Mapping[tuple[int, int], bytes] | None = None
    ) -> None:
        self._by = by
        # By task and first batch.
        self._begun_with: dict[int, dict[int, bytes]] = {}
        self._newest: dict[int, _Known] = {}
        for (task, first_batch), packed in sorted((recorded or {}).items()):
            self._begun_with.setdefault(task, {})[first_batch] = packed
            self._newest[task] = _Known(first_batch, (packed,))

    def batches(self, task: int) -> int:
        """Return of how many of a task's first batches the scores are known."""
        known = self._newest.get(task)
        return 0 if known is None else known.batches

    def tasks(self) -> Iterable[int]:
        """Return the tasks of which the scores of some batches are known."""
        return list(self._newest)

    def tell(self, task: int, acknowledged: int, scored: Scored) -> None:
        """Take in what an attempt has predicted, with its acknowledged batches."""
        if acknowledged > max(self.batches(task), scored.first_batch):
            before = self._before(task, scored.first_batch)
            self._newest[task] = _Known(acknowledged, (*before, scored.packed))

    def begin(self, task: int, first_batch: int) -> str | None:
        """Let an attempt begin; return what is to be recorded before that.

        None: there is nothing to record.
        """
        known = self._newest.get(task)
        if known is None or known.batches != first_batch or not first_batch:
            return None
        begun_with = self._begun_with.setdefault(task, {})
        if first_batch in begun_with:
            return None
        packed = begun_with[first_batch] = _sum(known.parts).to_bytes()
        self._newest[task] = _Known(first_batch, (packed,))
        return self.text(task, first_batch)

    def text(self, task: int, first_batch: int) -> str:
        """Return the record of what an attempt began with."""
        return _BegunForm(self._by, packed_text(self._begun_with[task][first_batch])).to_json()

    def finish(self, task: int, first_batch: int, scores: Scores) -> Scores:
        """Return the scores of a task that is done, by what its last attempt predicted."""
        whole = _sum(self._before(task, first_batch))
        whole.merge(scores)
        return whole

    def forget(self, task: int) -> Iterable[int]:
        """Forget a task; return the first batches of its attempts that are recorded."""
        self._newest.pop(task, None)
        return self._begun_with.pop(task, {}).keys()

    def recorded(self) -> Iterable[tuple[int, int]]:
        """Return task and first batch of all that is recorded."""
        return [(task, first) for task, begun in self._begun_with.items() for first in begun]

    def _before(self, task: int, first_batch: int) -> tuple[bytes, ...]:
        """Return the scores of the batches before an attempt's first; none if not known."""
        packed = self._begun_with.get(task, {}).get(first_batch)
        return () if packed is None else (packed,)


def _sum(parts: Iterable[bytes]) -> Scores:
    total = Scores()
    for packed in parts:
        try:
            total.merge(Scores.from_bytes(packed))
        except InvalidRequest as error:
            # It was told by a worker that is gone, and no one can tell it again.
            log.error("predictions of some batches are not in the metrics: %s", error)
    return total


def begun_scores(
    recorded: Mapping[str, str], round_name: str, by: str
) -> dict[tuple[int, int], bytes]:
    """Return the packed scores that attempts of a round began with, by task and first batch.

    Args:
        recorded: The records below ``keys.all_progressive``, by the rest of their keys.
        round_name: Of the round.
        by: The column whose values count.

    Raises:
        InvalidRequest: A record cannot be read.
    """
    found = {}
    for begun in begun_keys(recorded):
        if begun.round == round_name:
            form = _BegunForm.from_json(recorded[begun.key])
            scores = scores_of_text(form.scores, keeps_values=form.by == by)
            found[begun.task, begun.batch] = scores.to_bytes()
    return found


def begun_keys(keys: Iterable[str]) -> list[BegunKey]:
    """Return which of some keys, without ``keys.all_progressive``, are of what attempts begin with.

    Raises:
        InvalidRequest: One names no batch of a task.
    """
    found = []
    for key in keys:
        kind, *place = key.split("/")
        if kind != "begun":
            continue
        if len(place) != 3 or not (place[1].isdecimal() and place[2].isdecimal()):
            raise InvalidRequest(f"progressive metrics: the record {key!r} names no batch")
        found.append(BegunKey(key, place[0], int(place[1]), int(place[2])))
    return found


def packed_text(packed: bytes) -> str:
    """Return bytes as they stand in a record."""
    return base64.b64encode(packed).decode("ascii")


def unpacked_text(text: str) -> bytes:
    """Return the bytes that ``packed_text`` wrote.

    Raises:
        InvalidRequest: It is no such text.
    """
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest(f"scores: not base64: {error}") from error


def scores_of_text(text: str, *, keeps_values: bool) -> Scores:
    """Return the scores of a record, with or without those of values of a column.

    Raises:
        InvalidRequest: They cannot be read.
    """
    scores = Scores.from_bytes(unpacked_text(text))
    if not keeps_values:
        scores.by.clear()
    return scores
