"""Where a job stands: what its state record says, and what goes into it from the job's parts.

``Basis`` does not change while the job is open. ``Standing`` owns the recorded state, the schedule,
the sums and the worker processes that are wanted. Parts and events read it, change it by name, and
have it staged. May import ``job_engine``, ``schedule`` and the records of jobs; does no I/O.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from backstay.consensus.records.jobs import JobSpecRecord, JobStateRecord, RunState, StreamRecord
from backstay.consensus.records.keys import JobKeys
from backstay.job_engine.opening import OpenedJob, StateIncarnation
from backstay.job_engine.progressive import Progressive
from backstay.job_engine.records import Records
from backstay.job_spec import JobSpec
from backstay.schedule.rounds import RoundId, RoundKind
from backstay.schedule.task_table import TaskTable

__all__ = ["Basis", "Standing"]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Basis:
    """What does not change while a job is open.

    Attributes:
        spec: What the job is.
        identity: Its spec record: uid, time of creation, spec.
        tables: The tasks of its training, validation and prediction data.
        keys: The keys of its records.
        records: Where changes of the records are staged.
        now: The clock: monotonic seconds.
        notify: Says that there may be something new: tasks, rounds, the end.
    """

    spec: JobSpec
    identity: JobSpecRecord
    tables: Mapping[str, TaskTable]
    keys: JobKeys
    records: Records
    now: Callable[[], float]
    notify: Callable[[], None]


class Standing:
    """Where one job stands.

    Attributes:
        state: As recorded last; ``record`` adds what is kept elsewhere.
        schedule: Which rounds are open, and which come next.
        workers: Which worker processes should run.
        figures: Sums over the job's life, such as of examples.
        progressive: Metrics of predictions before training; None: the job has none.
        trouble: What is wrong, for people, by subject; an empty string: nothing any more.
        saves_when_stopped: Whether a job that is stopped is saved once more.
        saves_still: Whether the job is over but for a checkpoint that is being written.
    """

    def __init__(self, basis: Basis, opened: OpenedJob, progressive: Progressive | None) -> None:
        """Begin as the records say."""
        self._basis = basis
        digests = {name: table.digest() for name, table in opened.tables.items()}
        ttl_ms = max(opened.spec.task_lease_ttl_ms, opened.state.task_lease_ttl_ms)
        self.state = replace(opened.state, data=digests, task_lease_ttl_ms=ttl_ms)
        self.schedule = opened.schedule
        self.workers = opened.workers
        self.figures = Counter(opened.state.figures)
        self.progressive = progressive
        self.trouble: dict[str, str] = {}
        self.saves_when_stopped = False
        self.saves_still = False

    # What is recorded.

    def change(self, **fields: Any) -> None:
        """Change fields of the state; ``stage`` has them written."""
        self.state = replace(self.state, **fields)

    def stage(self) -> None:
        """Have the journal write where the job stands."""
        self._basis.records.stage(self._basis.keys.state, self.text)

    def text(self) -> str:
        """Return the record as it is written."""
        return self.record().to_json()

    def record(self) -> JobStateRecord:
        """Return where the job stands, as it is recorded."""
        return replace(
            self.state,
            schedule=self.schedule.to_json(),
            workers=self.workers.to_json(),
            figures={**self.figures, "steps": self.schedule.steps},
            progressive={} if self.progressive is None else self.progressive.shown(),
        )

    @property
    def incarnation(self) -> StateIncarnation:
        """The state incarnation that the progress belongs to."""
        return StateIncarnation(self.state.restore_version, self.state.generation)

    def note_trouble(self, what: str, trouble: str) -> None:
        """Show people what is wrong with something; empty: nothing any more."""
        self.trouble[what] = trouble

    # Training data without an end.

    @property
    def stream_record(self) -> StreamRecord:
        """How far the job is in such data, as recorded."""
        return self.state.stream or StreamRecord()

    def is_period(self, round_id: RoundId) -> bool:
        """Whether a round is a period of training data without an end."""
        return self._basis.spec.is_stream and round_id.kind is RoundKind.TRAINING

    def is_sealed(self, round_id: RoundId) -> bool:
        """Whether a round gets no more tasks than it has."""
        return not self.is_period(round_id) or round_id.number <= self.stream_record.sealed

    # How the job ends.

    @property
    def is_over(self) -> bool:
        """Whether no more tasks will be given out."""
        return self.state.state != "running"

    @property
    def ended(self) -> tuple[str, str] | None:
        """How the job ended, and why; None: it is not over."""
        return (self.state.state, self.state.reason) if self.is_over else None

    @property
    def has_unsaved_steps(self) -> bool:
        """Whether steps were made since the newest checkpoint of a job that saves its model."""
        spec = self._basis.spec
        saves = spec.training is not None and spec.checkpoint.is_wanted
        done = self.schedule.steps, self.figures["upkeeps"]
        return saves and done != (self.figures["saved_steps"], self.figures["saved_upkeeps"])

    def end(self, state: RunState, reason: str) -> None:
        """End the job, unless it has ended; workers hear of it with their next call."""
        if self.is_over:
            return
        log.info("the job is %s%s", state, f": {reason}" if reason else "")
        saves = self.saves_when_stopped and self.has_unsaved_steps
        self.saves_still = state == "stopped" and saves
        stream = self.state.stream
        if stream is not None:
            # The same command goes on with what there is then.
            stream = replace(stream, stopping="")
        self.change(state=state, reason=reason, stream=stream)
        self.workers.finish()
        self.stage()
        self._basis.notify()

    def end_unsaved(self, why: str) -> None:
        """End a job that is all done without its last checkpoint."""
        dead_letters = f"; {self.dead_letters_text()}" if self.schedule.dead_letters else ""
        self.end("unsaved", f"the last checkpoint was not written: {why}{dead_letters}")

    def dead_letters_text(self) -> str:
        """Return how many tasks failed for good, and what to do, for people."""
        failed = f"{sum(self.schedule.dead_letters.values())} tasks failed for good"
        how = "`backstay jobs show` tells why, and the same command tries them again"
        return f"{failed}; {how}"

    def look_at_scores(self) -> None:
        """End a window of progressive metrics that is full or whose time is over.

        It comes after the tasks that are counted are staged as done. An alert may stop the job,
        unless all of it is trained.
        """
        if self.progressive is None or self.is_over or self.schedule.outcome is not None:
            return
        window = self.progressive.window
        why_stop = self.progressive.look(self.schedule.steps, self._basis.now())
        if self.progressive.window != window:
            self.stage()
        if why_stop:
            self.end("stopped", why_stop)
