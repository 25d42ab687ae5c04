"""Progressive validation: figures of predictions that were made before their records were trained.

Scores of tasks that are done come in, each once. They are counted in a window, which ends after so
many records or so much time, and in counts that decay with each record. When a window ends, its
figures are kept and alerts are judged by them.

The scores of a task are recorded before the task is recorded as done. Now and then all counts are
recorded, after all tasks that are in them. So a job master that starts has exactly the tasks that
are done: the counts, and the scores that were recorded since, but for those of tasks that are not
done: these come again.

Imports ``backstay.job``, ``job_engine``, the keys of records and the job's spec; does no I/O.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from backstay.consensus.records.keys import JobKeys
from backstay.errors import InvalidRequest
from backstay.job.score_counts import BUCKETS, GROUP_BUCKETS, OTHER, ScoreCounts, Scores
from backstay.job_engine.alerts import Alerts
from backstay.job_engine.records import Records
from backstay.job_engine.round_scores import (
    begun_keys,
    packed_text,
    scores_of_text,
    unpacked_text,
)
from backstay.job_spec import JobSpec, ProgressiveSpec
from backstay.json_record import Count, JsonRecord

__all__ = ["Progressive"]

# Windows that are kept for people.
WINDOWS_KEPT = 10
# Tasks whose scores are recorded one by one until all counts are.
TASKS_MAX = 64
# And the size of these records, in characters.
TASKS_TEXT_MAX = 512 * 1024

IsDone = Callable[[str, int], bool]


class _Series:
    """Counts of one value of the column, or of all records."""

    def __init__(self, buckets: int) -> None:
        self.window = ScoreCounts(buckets)
        self.decayed = ScoreCounts(buckets)

    def add(self, counts: ScoreCounts) -> None:
        self.window.merge(counts)
        self.decayed.merge(counts)


@dataclass(frozen=True)
class _CountsForm(JsonRecord, what="counts of predictions"):
    """``progressive/counts/<number>``: all counts at one moment.

    Attributes:
        number: Of the last task that is in them; later tasks have higher ones.
        examples: Records counted since the beginning.
        skipped: Those that could not be.
        window: Number of the window that is open, from 1.
        age_s: How long it has been open.
        by: The column.
        series: Value of the column, and its packed counts of the window and decayed; all records
            come first, with an empty value.
        alerts: By their text, in how many windows in a row each has held, and the last figure.
    """

    number: Count
    examples: Count
    skipped: Count
    window: Count
    age_s: float
    by: str
    series: tuple[tuple[str, str, str], ...]
    alerts: Mapping[str, tuple[Count, float]]


@dataclass(frozen=True)
class _TaskForm(JsonRecord, what="scores of a task"):
    """``progressive/tasks/<number>``: the packed scores of one task, and of values of a column."""

    round: str
    task: Count
    by: str
    scores: str


class Progressive:
    """The metrics of a job's predictions; what changes is recorded."""

    def __init__(
        self,
        spec: JobSpec,
        keys: JobKeys,
        records: Records,
        recorded: Mapping[str, str],
        is_done: IsDone,
        now_s: float,
    ) -> None:
        """Go on with what is recorded.

        Args:
            spec: The job's; it has ``progressive``.
            keys: The job's keys.
            records: Where changes go.
            recorded: The records below ``keys.all_progressive``, by the rest of their keys.
            is_done: Whether a task of a round, by its name, is recorded as done.
            now_s: Monotonic seconds.

        Raises:
            InvalidRequest: A record cannot be read.
        """
        assert spec.progressive is not None
        self._spec: ProgressiveSpec = spec.progressive
        self._keys = keys
        self._records = records
        self._alert_specs = spec.alerts
        self._begin(now_s)
        self._load(recorded, is_done, now_s)

    def _begin(self, now_s: float) -> None:
        """Begin without any count."""
        self._alerts = Alerts(self._alert_specs)
        self.examples = self.skipped = self._number = 0
        self._all = _Series(BUCKETS)
        self._by: dict[str, _Series] = {}
        self._window = 1
        self._window_began_s = now_s
        # The tasks that are recorded one by one: number and size.
        self._single: deque[tuple[int, int]] = deque()
        # The numbers of the counts that are recorded.
        self._recorded: set[int] = set()
        self._windows: deque[dict[str, Any]] = deque(maxlen=WINDOWS_KEPT)
        self._shown: dict[str, Any] | None = None

    # What comes in.

    @property
    def window(self) -> int:
        """Number of the window that is open, from 1."""
        return self._window

    @property
    def values(self) -> Sequence[str]:
        """The values of the column that have counts of their own."""
        return [value for value in self._by if value != OTHER]

    def add(self, round_name: str, task: int, scores: Scores) -> None:
        """Count the scores of a task that is done; call it before that is staged.

        Args:
            round_name: Of its round.
            task: Its number.
            scores: Of all its batches.
        """
        self._number += 1
        scores = self._placed(scores)
        form = _TaskForm(round_name, task, self._spec.by, packed_text(scores.to_bytes()))
        text = form.to_json()
        # What says that the task is done may be on its way already.
        self._records.stage_first(self._keys.progressive_task(self._number), lambda: text)
        self._single.append((self._number, len(text)))
        self._count(scores)

    def look(self, steps: int, now_s: float) -> str:
        """End the window if it is full or its time is over; call it after tasks are staged as done.

        Args:
            steps: Of the job.
            now_s: Monotonic seconds.

        Returns:
            Why the job is to stop; empty: it is not.
        """
        window, spec = self._all.window, self._spec
        is_full = spec.window_examples and window.examples + window.skipped >= spec.window_examples
        if is_full or (spec.window_s and now_s - self._window_began_s >= spec.window_s):
            return self._end_window(steps, now_s)
        size = sum(size for _, size in self._single)
        if len(self._single) >= TASKS_MAX or size >= TASKS_TEXT_MAX:
            self._record_counts(now_s)
        return ""

    def go_back(self, recorded: Mapping[str, str], is_done: IsDone, now_s: float) -> None:
        """Take what a checkpoint keeps, which belongs to the rows that were restored.

        Raises:
            InvalidRequest: A record cannot be read; ``check`` says so before.
        """
        for number, _ in self._single:
            self._records.stage_removal(self._keys.progressive_task(number))
        windows, last, counts = list(self._windows), self._number, self._recorded
        self._begin(now_s)
        self._load(recorded, is_done, now_s)
        self._windows.extend(one for one in windows if one["number"] < self._window)
        # No number is used again: a record of before may not be removed yet.
        self._number, self._recorded = max(last, self._number), counts
        self._record_counts(now_s)

    @staticmethod
    def check(recorded: Mapping[str, str]) -> None:
        """Raise InvalidRequest if a record cannot be read."""
        _counts_of(recorded)
        _tasks_of(recorded)
        begun_keys(recorded)

    # What people see.

    def shown(self) -> dict[str, Any]:
        """Return all figures as plain values: those of now, and of the newest windows."""
        if self._shown is None:
            self._shown = {
                "examples": self.examples,
                "skipped": self.skipped,
                "decayed": self._all.decayed.figures(),
                "by": {value: one.decayed.figures() for value, one in self._by.items()},
                "windows": list(self._windows),
                "alerts": self._alerts.words,
            }
        return self._shown

    def show_windows(self, shown: Mapping[str, Any]) -> None:
        """Take over the windows that an earlier job master has shown."""
        kept = {one["number"]: one for one in [*shown.get("windows", ()), *self._windows]}
        kept = {number: one for number, one in kept.items() if number < self._window}
        self._windows.clear()
        self._windows.extend(one for _, one in sorted(kept.items()))
        self._shown = None

    # How it is done.

    def _count(self, scores: Scores) -> None:
        half_life = self._spec.half_life_examples
        examples = int(scores.all.examples)
        if half_life and examples:
            factor = 0.5 ** (examples / half_life)
            for series in (self._all, *self._by.values()):
                series.decayed.decay(factor)
        self._all.add(scores.all)
        for value, counts in scores.by.items():
            self._by.setdefault(value, _Series(GROUP_BUCKETS)).add(counts)
        self.examples += examples
        self.skipped += int(scores.all.skipped)
        self._shown = None

    def _placed(self, scores: Scores) -> Scores:
        """Return scores in which values are together that get no figures of their own."""
        placed, values = Scores(), set(self.values)
        placed.all = scores.all
        for value, counts in scores.by.items():
            name = value
            if value not in values:
                name = value if len(values) < self._spec.by_values_max else OTHER
                values |= {name} - {OTHER}
            if name in placed.by:
                placed.by[name].merge(counts)
            else:
                placed.by[name] = counts
        return placed

    def _end_window(self, steps: int, now_s: float) -> str:
        """End the window: keep its figures, judge the alerts, record all counts."""
        ended: dict[str, Any] = {
            "number": self._window,
            "steps": steps,
            "window": self._all.window.figures(),
            "decayed": self._all.decayed.figures(),
            "window_by": {value: one.window.figures() for value, one in self._by.items()},
            "decayed_by": {value: one.decayed.figures() for value, one in self._by.items()},
        }
        stop = self._alerts.judge(ended)
        ended["alerts"] = self._alerts.words
        if stop:
            self._alerts.begin_stops_anew()
        if len(self._windows) > 1:
            # Figures of values are many: those of two windows do.
            self._windows[-2].update(window_by={}, decayed_by={})
        self._windows.append(ended)
        self._window += 1
        self._window_began_s = now_s
        for series in (self._all, *self._by.values()):
            series.window = ScoreCounts(series.window.buckets)
        self._shown = None
        self._record_counts(now_s)
        return stop

    # Records.

    def _record_counts(self, now_s: float) -> None:
        """Record all counts as they are now, and remove what they take the place of.

        Under a key of their own: a record that waits to be written, and that tells of tasks which
        are staged after it, could be written before these.
        """
        series = [("", self._all), *self._by.items()]
        form = _CountsForm(
            self._number,
            self.examples,
            self.skipped,
            self._window,
            max(0.0, now_s - self._window_began_s),
            self._spec.by,
            tuple(
                (value, packed_text(one.window.to_bytes()), packed_text(one.decayed.to_bytes()))
                for value, one in series
            ),
            self._alerts.recorded(),
        )
        text = form.to_json()
        self._records.stage_text(self._keys.progressive_counts(self._number), text)
        for number in self._recorded - {self._number}:
            self._records.stage_removal(self._keys.progressive_counts(number))
        self._recorded = {self._number}
        while self._single:
            number, _ = self._single.popleft()
            self._records.stage_removal(self._keys.progressive_task(number))

    def _load(self, recorded: Mapping[str, str], is_done: IsDone, now_s: float) -> None:
        counts = _counts_of(recorded)
        if counts:
            newest = max(counts)
            self._recorded = {newest}
            self._take_counts(counts[newest], now_s)
            for number in counts.keys() - {newest}:
                self._records.stage_removal(self._keys.progressive_counts(number))
        counted = self._number
        for number, (form, size) in _tasks_of(recorded).items():
            self._number = max(self._number, number)
            if number <= counted or not is_done(form.round, form.task):
                self._records.stage_removal(self._keys.progressive_task(number))
                continue
            self._single.append((number, size))
            self._count(_scores(form, self._spec.by))
        for begun in begun_keys(recorded):
            if is_done(begun.round, begun.task):
                self._records.stage_removal(f"{self._keys.all_progressive}{begun.key}")

    def _take_counts(self, found: _CountsForm, now_s: float) -> None:
        self._number, self._window = found.number, max(1, found.window)
        self.examples, self.skipped = found.examples, found.skipped
        self._window_began_s = now_s - found.age_s
        self._alerts.take(found.alerts)
        for value, window, decayed in found.series:
            if value and found.by != self._spec.by:
                # Values of another column.
                continue
            series = self._all
            if value:
                series = self._by[value] = _Series(GROUP_BUCKETS)
            series.window, series.decayed = _counts(window), _counts(decayed)


def _counts(text: str) -> ScoreCounts:
    return ScoreCounts.from_bytes(unpacked_text(text))


def _scores(form: _TaskForm, by: str) -> Scores:
    """Return the scores of a record; those of values only if they are of that column."""
    return scores_of_text(form.scores, keeps_values=form.by == by)


def _counts_of(recorded: Mapping[str, str]) -> dict[int, _CountsForm]:
    """Return all counts that are recorded, by number; more than one if a job master died."""
    found = {}
    for number, text in _below(recorded, "counts/").items():
        form = found[number] = _CountsForm.from_json(text)
        for place, (value, *packed) in enumerate(form.series):
            buckets = GROUP_BUCKETS if place else BUCKETS
            if bool(value) != bool(place) or any(_counts(one).buckets != buckets for one in packed):
                raise InvalidRequest("counts of predictions: all records must be the first series")
    return found


def _tasks_of(recorded: Mapping[str, str]) -> dict[int, tuple[_TaskForm, int]]:
    """Return the tasks that are recorded one by one, by number, and the size of each record."""
    found = {}
    for number, text in _below(recorded, "tasks/").items():
        form = _TaskForm.from_json(text)
        _scores(form, form.by)
        found[number] = form, len(text)
    return found


def _below(recorded: Mapping[str, str], prefix: str) -> dict[int, str]:
    """Return the records below a prefix, by their numbers, in their order."""
    found = {}
    for key, text in recorded.items():
        if key.startswith(prefix):
            number = key.removeprefix(prefix)
            if not number.isdecimal():
                raise InvalidRequest(f"progressive metrics: the record {key!r} has no number")
            found[int(number)] = text
    return dict(sorted(found.items()))
