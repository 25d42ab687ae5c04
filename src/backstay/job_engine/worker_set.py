"""Which worker processes should run: their number, relaunches with a pause and a limit.

The launcher reports which workers run and which ended, and why; ``wanted`` says which ids should
run. An id stands for one process and is never used again. A worker fills a *place*: when it ends,
another worker takes the place after a pause, until too many of them failed in a row. Imports
``backstay.errors``, ``job_spec``, ``json_record`` and ``job_engine``; does no I/O.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from annotated_types import Interval

from backstay.backoff import Backoff
from backstay.errors import ConfigError, InvalidRequest
from backstay.job_engine.launch import ExitReason, WorkerExit
from backstay.job_spec import JobSpec
from backstay.json_record import NUMBER_MAX, Count, JsonRecord

__all__ = ["WorkerPolicy", "WorkerSet"]

# Replaced workers that hung, and whose end no launcher has told yet.
HUNG_MAX = 1000
# A record with more places is refused.
PLACES_MAX = 1_000_000


@dataclass(frozen=True)
class WorkerPolicy:
    """How many workers, and how often one is replaced.

    Attributes:
        initial, least, most: Number at the start, and the bounds of ``scale``.
        max_relaunches: How often in a row a worker that failed is replaced; one whose end is no
            failure (``ExitReason``) always is.
        backoff_s: Pause before a replacement; doubled with each in a row. After an end that is no
            failure, the first replacement needs none.
        backoff_max_s: The longest such pause.
        steady_s: After a worker that ran so long the counts of its place begin anew.
    """

    initial: int = 1
    least: int = 1
    most: int = 1
    max_relaunches: int = 10
    backoff_s: float = 0.5
    backoff_max_s: float = 30.0
    steady_s: float = 300.0

    @classmethod
    def of(cls, spec: JobSpec) -> WorkerPolicy:
        """Return the policy that a job asks for."""
        workers = spec.workers
        return cls(
            initial=workers.initial,
            least=workers.min,
            most=workers.max,
            max_relaunches=workers.max_relaunches,
        )

    def __post_init__(self) -> None:
        if not 0 <= self.least <= self.initial <= self.most:
            raise ConfigError(
                f"workers: initial = {self.initial} must be within {self.least} to {self.most}"
            )
        if self.max_relaunches < 0:
            raise ConfigError(f"max_relaunches = {self.max_relaunches}: must be at least 0")
        if not (0 <= self.backoff_s <= self.backoff_max_s and self.steady_s >= 0):
            raise ConfigError("workers: 0 <= backoff_s <= backoff_max_s, steady_s >= 0 must hold")


class _Place:
    """What one worker fills.

    Attributes:
        worker: Number of its worker; None while it waits for the next one.
        failures: How often in a row a worker of it failed by itself.
        relaunches: How often in a row a worker of it ended, by itself or not.
        not_before_s: When the next worker may come.
        since_s: When its worker was first reported to run; None: not yet.
        last: How its last worker ended.
        given_up: Whether there will be no other one.
    """

    __slots__ = (
        "failures",
        "given_up",
        "last",
        "not_before_s",
        "relaunches",
        "since_s",
        "worker",
    )

    def __init__(self) -> None:
        self.worker: int | None = None
        self.failures = 0
        self.relaunches = 0
        self.not_before_s = float("-inf")
        self.since_s: float | None = None
        self.last = ""
        self.given_up = False

    @property
    def number(self) -> int:
        """Its worker's number; -1 while it waits for the next one."""
        return -1 if self.worker is None else self.worker

    @number.setter
    def number(self, number: int) -> None:
        self.worker = number if number >= 0 else None


class WorkerSet:
    """The workers of a job."""

    def __init__(self, policy: WorkerPolicy) -> None:
        """Begin with ``initial`` workers wanted."""
        self._policy = policy
        self._places: list[_Place] = []
        self._by_worker: dict[str, _Place] = {}
        # The places of workers that were replaced because they hung. Whether that was a failure is
        # known with their end. Not recorded: under the next job master it was none.
        self._hung: dict[str, _Place] = {}
        # For which no machine has room. Not recorded: the launcher tells them again.
        self._waiting: frozenset[str] = frozenset()
        self._next_id = 0
        self._desired = 0
        self._lent = 0
        self._finished = False
        # What ``to_json`` returned last; None: something has changed since.
        self._text: str | None = None
        self._set_places(policy.initial)

    def wanted(self, now_s: float) -> tuple[str, ...]:
        """Return the ids that should run, oldest first; makes the ids that are due.

        Record ``to_json`` before a launcher acts on it: an id must not be made twice.
        """
        if self._finished:
            return ()
        for place in self._places:
            if place.worker is None and not place.given_up and place.not_before_s <= now_s:
                self._text = None
                place.worker, self._next_id = self._next_id, self._next_id + 1
                self._by_worker[f"w-{place.worker}"] = place
        return tuple(
            f"w-{number}"
            for number in sorted(p.worker for p in self._places if p.worker is not None)
        )

    def next_change_s(self) -> float | None:
        """Return when a pause ends and ``wanted`` may have one more; None if none is waited for."""
        ends = [p.not_before_s for p in self._places if p.worker is None and not p.given_up]
        return min(ends) if ends and not self._finished else None

    def running(self, workers: Iterable[str], now_s: float) -> list[WorkerExit]:
        """Take a launcher's list of running processes, and return the exits that it did not tell.

        These workers were in an earlier list and are not in this one. Pass their exits to
        ``exited``, after the exits that the launcher told.
        """
        running = set(workers)
        lost = []
        for worker, place in self._by_worker.items():
            if worker in running:
                place.since_s = now_s if place.since_s is None else place.since_s
            elif place.since_s is not None:
                lost.append(WorkerExit(worker, ExitReason.NODE_LOST))
        return lost

    def note_waiting(self, workers: Iterable[str]) -> None:
        """Take note of the workers for which no machine has room."""
        self._waiting = frozenset(workers)

    def has_place(self, worker: str) -> bool:
        """Whether this worker is one of those that are wanted now."""
        return worker in self._by_worker

    def has_hung(self, worker: str) -> bool:
        """Whether this worker was replaced because it hung, and its end was not told yet."""
        return worker in self._hung

    def exited(self, end: WorkerExit, now_s: float) -> None:
        """Take note that a process ended.

        The end of a worker that is not wanted any more is ignored, so exits may be told again. A
        worker that hung has failed, unless that was because its machine was lost.
        """
        hung = self._hung.pop(end.worker_id, None)
        if hung is not None and end.reason is not ExitReason.NODE_LOST:
            self._fail_late(hung, f"{end.worker_id} hung")
        place = self._by_worker.get(end.worker_id)
        if place is not None:
            how = f"{end.worker_id} {end.how}"
            self._ended(place, how, failed=end.reason.is_a_failure, now_s=now_s)

    def replace(self, worker: str, now_s: float) -> bool:
        """Want another process instead of this one, which hangs; False if it is not wanted."""
        place = self._by_worker.get(worker)
        if place is None:
            return False
        self._ended(place, f"{worker} hung", failed=False, now_s=now_s)
        self._hung[worker] = place
        if len(self._hung) > HUNG_MAX:
            del self._hung[next(iter(self._hung))]
        return True

    def scale(self, workers: int, *, lent: int = 0) -> None:
        """Want so many workers; those without room are stopped first, then the newest.

        Places given up get a new chance.

        Args:
            workers: How many.
            lent: How many more are wanted once servers need their room no more.

        Raises:
            InvalidRequest: That is outside ``least`` to ``most``.
        """
        if not self._policy.least <= workers <= self._policy.most:
            raise InvalidRequest(
                f"{workers} workers: the job has {self._policy.least} to {self._policy.most}"
            )
        self._places = [place for place in self._places if not place.given_up]
        self._lent = lent
        self._set_places(workers)

    def finish(self) -> None:
        """Want no workers any more."""
        self._text = None
        self._finished = True

    @property
    def desired(self) -> int:
        """How many workers are wanted in all."""
        return 0 if self._finished else self._desired

    @property
    def lent(self) -> int:
        """How many more will be wanted once servers need their room no more."""
        return self._lent

    @property
    def failed(self) -> str:
        """Why fewer than ``least`` workers can be kept, which ends the job; else empty.

        With ``least`` 0 that is when none can be kept, though some are wanted.
        """
        given_up = [place for place in self._places if place.given_up]
        left = len(self._places) - len(given_up)
        if not given_up or left >= max(1, self._policy.least):
            return ""
        worst = given_up[-1]
        return (
            f"only {left} of at least {max(1, self._policy.least)} workers can be kept: "
            f"{worst.last}, after {worst.failures} failures in a row (max_relaunches is "
            f"{self._policy.max_relaunches}); see its log"
        )

    def to_json(self) -> str:
        """Return the set as JSON; pauses and times are left out."""
        if self._text is None:
            self._text = self._to_json()
        return self._text

    def _to_json(self) -> str:
        troubled = [place for place in self._places if place.relaunches]
        return _Form(
            self._next_id,
            self._desired,
            self._finished,
            # The record is written with every few tasks, so it is short: most of ten thousand
            # places have no relaunches, and their numbers follow each other.
            tuple(_runs([place.number for place in self._places if not place.relaunches])),
            tuple(
                _TroubledPlace(p.number, p.failures, p.relaunches, int(p.given_up), p.last)
                for p in troubled
            ),
            self._lent,
        ).to_json()

    @classmethod
    def from_json(cls, policy: WorkerPolicy, text: str) -> WorkerSet:
        """Return the set that ``to_json`` wrote, under a policy that may have changed.

        Raises:
            InvalidRequest: It is no such string.
        """
        form = _Form.from_json(text)
        places = []
        for number in _numbers(form.untroubled):
            places.append(_Place())
            places[-1].number = number
        places += [one.place() for one in form.troubled]
        numbers = [place.worker for place in places if place.worker is not None]
        if len(set(numbers)) != len(numbers) or any(n >= form.next_id for n in numbers):
            raise InvalidRequest("worker set: a worker's number is there twice or was never given")
        workers = cls(policy)
        workers._next_id, workers._finished = form.next_id, form.finished
        workers._lent = form.lent
        workers._places = places
        workers._set_places(min(max(form.desired, policy.least), policy.most))
        return workers

    def _ended(self, place: _Place, how: str, *, failed: bool, now_s: float) -> None:
        """Empty a place; its next worker comes after a pause, if there is to be one."""
        self._text = None
        policy = self._policy
        if place.since_s is not None and now_s - place.since_s >= policy.steady_s:
            place.failures = place.relaunches = 0
        del self._by_worker[f"w-{place.worker}"]
        place.worker = place.since_s = None
        place.last = how
        place.relaunches += 1
        if failed:
            place.failures += 1
            place.given_up = place.failures > policy.max_relaunches
        # After the first end that is no failure the next worker comes at once.
        ends = place.relaunches if failed else place.relaunches - 1
        backoff = Backoff(policy.backoff_s, policy.backoff_max_s)
        place.not_before_s = now_s + backoff.pause_s(ends)

    def _fail_late(self, place: _Place, how: str) -> None:
        """Count a failure of a place that has, or waits for, another worker already."""
        self._text = None
        place.failures += 1
        place.last = how
        place.given_up = place.failures > self._policy.max_relaunches
        if place.given_up:
            self._by_worker.pop(f"w-{place.worker}", None)
            place.worker = place.since_s = None

    def _set_places(self, count: int) -> None:
        """Have so many places: new ones last; workers without room go first, then the newest."""
        self._text = None
        self._desired = count
        while len(self._places) < count:
            self._places.append(_Place())
        if len(self._places) > count:
            # Places without a worker go before any with one.
            self._places.sort(key=self._order_to_stay)
            del self._places[count:]
        self._by_worker = {f"w-{p.worker}": p for p in self._places if p.worker is not None}

    def _order_to_stay(self, place: _Place) -> tuple[bool, float]:
        if place.worker is None:
            return True, float("inf")
        return f"w-{place.worker}" in self._waiting, place.worker


# -1 stands for a place that waits for its next worker.
_Number = Annotated[int, Interval(ge=-1, le=NUMBER_MAX)]


class _TroubledPlace(NamedTuple):
    """The JSON form of a place whose workers have ended."""

    number: _Number
    failures: Count
    relaunches: Count
    given_up: Count
    last: str

    def place(self) -> _Place:
        place = _Place()
        place.number, place.failures, place.relaunches = self[:3]
        place.given_up, place.last = bool(self.given_up), self.last
        return place


@dataclass(frozen=True)
class _Form(JsonRecord, what="worker set"):
    """The JSON form of a ``WorkerSet``; ``untroubled`` is what ``_runs`` returns."""

    next_id: Count
    desired: Count
    finished: bool
    untroubled: tuple[tuple[_Number, Count], ...]
    troubled: tuple[_TroubledPlace, ...]
    lent: Count = 0


def _runs(numbers: list[int]) -> list[tuple[int, int]]:
    """Return numbers as (first, how many) that follow each other; those of -1 are all -1."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and number == (-1 if runs[-1][0] == -1 else sum(runs[-1])):
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((number, 1))
    return runs


def _numbers(runs: Iterable[tuple[int, int]]) -> list[int]:
    """Return the numbers that ``_runs`` was given.

    Raises:
        InvalidRequest: They are too many.
    """
    numbers: list[int] = []
    for first, count in runs:
        if len(numbers) + count > PLACES_MAX:
            raise InvalidRequest(f"worker set: more than {PLACES_MAX} places")
        numbers += [-1] * count if first == -1 else range(first, first + count)
    return numbers
