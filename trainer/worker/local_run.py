"""``backstay train --local``: a job's model file in this process, without job master and workers.

The engine of the job is the job master's, over memory, with one worker. Feed, batches, callbacks
and metrics are a worker's; the optimizer is the framework's own. A model with layers of backstay
opens a session by the factory that is given, and only then. May import the engine, the readers, the
adapters by name, and the program; starts no process itself.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from backstay.cluster.upkeep import EndedPass, end_pass, keeps_rows_of
from backstay.consensus.records.jobs import JobSpecRecord, JobStateRecord
from backstay.consensus.records.keys import JobKeys
from backstay.data import Reader, open_reader
from backstay.data.opening import open_source
from backstay.errors import BackstayError, ConfigError, DataUnavailable, JobError, NonFiniteLoss
from backstay.job.callbacks import Callbacks, Evaluation, TaskReport
from backstay.job.model_definition import (
    Mode,
    ModelDefinition,
    is_users,
    user_traceback,
)
from backstay.job_engine.engine import JobEngine
from backstay.job_engine.open_round import Assignment, OpenRound
from backstay.job_engine.opening import new_job
from backstay.job_engine.records import MemoryRecords
from backstay.job_engine.values import LeasedTask
from backstay.job_spec import JobSpec
from backstay.schedule.evaluation import TaskOutputs
from backstay.schedule.orders import record_order_seed
from backstay.schedule.rounds import RoundId, RoundKind, data_of
from backstay.schedule.task_table import TaskTable, cut_data
from backstay.trainer.adapter.session import SessionFactory, opened_session, set_session_factory
from backstay.trainer.model.program import Program, build, framework_of
from backstay.trainer.worker.evaluation import Outputs
from backstay.trainer.worker.other_tasks import OtherTasks, save
from backstay.trainer.worker.scoring import AttemptScores, Scorer
from backstay.trainer.worker.task_feed import FeedFailed, TaskFeed, TaskRange, groups_by

if TYPE_CHECKING:
    from backstay.data.source import Source

__all__ = ["LocalProgress", "LocalResult", "LocalRun"]

REPORT_S = 0.3
# Between two questions of what has come of data without an end.
ASK_S = 1.0
# Folder in the log folder, for a model that cannot be saved to the job's output.
SPARE_FOLDER = "model-not-in-output"
# The only worker.
WORKER = "local"
MODES: dict[RoundKind, Mode] = {
    RoundKind.TRAINING: "training",
    RoundKind.EVALUATION: "evaluation",
    RoundKind.PREDICTION: "prediction",
}

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LocalProgress:
    """How far it is.

    Attributes:
        round: Which pass, evaluation or prediction is under way.
        records_done: Of it.
        records_total: Likewise.
        examples: Trained on since the beginning.
        loss: Mean over the batches since the last report; None if there was none.
        seconds: Since the beginning.
        record: Where the job stands, as its engine has it.
        lag_records: Of training data without an end: records that are there and not done; None: not
            known.
    """

    round: RoundId
    records_done: int
    records_total: int
    examples: int
    loss: float | None
    seconds: float
    record: JobStateRecord
    lag_records: int | None = None

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the last evaluation."""
        return (_evaluations(self.record) or ({},))[-1]


@dataclass(frozen=True)
class LocalResult:
    """What came of it.

    Attributes:
        examples: Records trained on, each as often as there were passes.
        passes: Passes finished.
        predictions: Records predicted.
        seconds: How long it took.
        record: Where the job stands, as its engine has it.
    """

    examples: int
    passes: int
    predictions: int
    seconds: float
    record: JobStateRecord

    @property
    def steps(self) -> int:
        """Batches trained."""
        return self.record.figures["steps"]

    @property
    def evaluations(self) -> tuple[dict[str, float], ...]:
        """Metrics of each evaluation, oldest first."""
        return _evaluations(self.record)

    @property
    def bad_records(self) -> int:
        """Damaged records that were skipped, each counted once."""
        return self.record.figures.get("bad_records", 0)

    @property
    def stopped(self) -> bool:
        """Whether it was told to stop."""
        return self.record.state == "stopped"

    @property
    def reason(self) -> str:
        """Why it ended before the last pass; empty: it did not."""
        return self.record.reason


def _evaluations(record: JobStateRecord) -> tuple[dict[str, float], ...]:
    return tuple(
        {name: float(value) for name, value in one["metrics"].items()} for one in record.evaluations
    )


class LocalRun:
    """One run of a job in this process.

    Args:
        spec: The job; workers, servers and checkpoints of it are not used.
        definition: Its model file.
        session_factory: Opens a session, with servers behind it, when a layer asks for one; None:
            such layers are refused.
        report: Called about three times a second while it runs, and after each evaluation.

    Raises:
        ConfigError: The job has progressive metrics, and it is not known what the model answers.
    """

    def __init__(
        self,
        spec: JobSpec,
        definition: ModelDefinition,
        *,
        session_factory: SessionFactory | None = None,
        report: Callable[[LocalProgress], None] | None = None,
    ) -> None:
        self._spec = spec
        self._definition = definition
        self._factory = session_factory
        self._report = report
        self._stop = threading.Event()
        self._others = OtherTasks(definition, spec, "local")
        self._scorer: Scorer | None = None
        if spec.progressive is not None:
            self._scorer = Scorer(spec.progressive, definition.metrics)
        self._readers: dict[str, Reader] = {}
        self._records_done: Counter[RoundId] = Counter()
        self._examples = self._predictions = 0
        self._losses: list[float] = []
        self._begin_s = self._reported_s = 0.0
        self._source: Source | None = None
        self._source_trouble = ""
        self._ask_s = 0.0
        self._job: JobEngine
        self._program: Program
        self._callbacks: Callbacks

    def stop(self) -> None:
        """Have ``run`` end after the batch under way; from a signal handler, say."""
        self._stop.set()

    def run(self) -> LocalResult:
        """Train, evaluate and predict as the job says.

        Raises:
            ConfigError: The model file is wrong, or there are no records.
            BackstayError: Data cannot be read, the loss is not finite, or a server failed.
        """
        self._begin_s = self._reported_s = time.monotonic()
        before = set_session_factory(self._factory)
        try:
            framework = framework_of(self._definition.framework(self._spec.framework))
            self._program = build(framework, self._definition, None, self._spec)
            self._callbacks = Callbacks(
                self._definition.make_callbacks(), self._program.set_learning_rate
            )
            self._run()
            session = opened_session()
            if session is not None and self._factory is not None and self._spec.output:
                # The rows of these layers are on a server that ends with this process.
                session.client.checkpoints.save()
        finally:
            set_session_factory(before)
            session = opened_session()
            if session is not None and self._factory is not None:
                session.close()
        job = self._job
        state, reason = job.ended or ("running", "")
        if state == "failed":
            raise JobError(reason)
        return LocalResult(
            self._examples,
            job.schedule.passes_over,
            self._predictions,
            time.monotonic() - self._begin_s,
            job.record(),
        )

    def _run(self) -> None:
        spec = self._spec
        tables = {name: self._table(name) for name in spec.data}
        identity = JobSpecRecord(WORKER, time.time_ns() // 1_000_000, spec.to_json())
        self._job = job = JobEngine(
            new_job(spec, tables, identity), JobKeys(spec.name), MemoryRecords(), time.monotonic
        )
        job.keep_rows(time.time)
        self._advance()
        while not job.is_over:
            self._look_for_records()
            given = job.assign(WORKER)
            if given is not None:
                self._do(given)
            else:
                # With one worker, every other open round has a task to do.
                assert spec.is_stream
                self._stop.wait(ASK_S)
            self._end_if_told()
            # Metrics and callbacks of an evaluation take time, in which it may be told to stop.
            self._advance()
            self._end_if_told()
        if job.state.state == "stopped":
            with self._saved_somewhere():
                self._others.save_model(self._program)

    def _table(self, name: str) -> TaskTable:
        """Return the tasks of one of the job's data; none if these have no end."""
        spec = self._spec
        if spec.is_stream and name == "training":
            return TaskTable((), (), spec.records_per_task)
        return cut_data(name, self._reader(name).shards(), spec)

    def _look_for_records(self) -> None:
        """Take what has come of training data without an end; asks at most once a second.

        Raises:
            DataUnavailable: Their source does not answer.
            ConfigError: An option is wrong.
        """
        job, training = self._job, self._spec.training
        if not self._spec.is_stream or training is None or time.monotonic() < self._ask_s:
            return
        self._ask_s = time.monotonic() + ASK_S
        if self._source is None:
            self._source = open_source(training)
        if job.wants_start:
            job.begin_stream(self._source.start())
        look = self._source.look(job.stream.positions)
        if look.trouble != self._source_trouble:
            self._source_trouble = look.trouble
            log.warning("%s", look.trouble or "the training data are as they should be again")
        planned = job.plan_take(look.ends, time.time(), look.folders)
        if planned is not None:
            job.take(planned)

    @contextmanager
    def _saved_somewhere(self) -> Iterator[None]:
        """Save the model to the log folder if it cannot be saved to ``output``: it is only here.

        Raises:
            DataUnavailable: It could not be saved to ``output``; the message says where it is.
        """
        try:
            yield
        except DataUnavailable as error:
            spare = Path(self._spec.log_dir) / SPARE_FOLDER
            if not self._spec.log_dir:
                raise
            save(self._program, str(spare))
            raise DataUnavailable(f"{error}. The model is in {spare} instead") from error

    def _end_if_told(self) -> None:
        if self._stop.is_set() and not self._job.is_over:
            self._job.end("stopped", "it was told to stop")

    def _advance(self) -> None:
        """Open and end rounds as the schedule says, evaluations with their metrics."""
        self._end_rounds()
        while self._job.upkeeps.due is not None:
            self._see_to_rows()
            self._end_rounds()

    def _end_rounds(self) -> None:
        while due := self._job.advance():
            for opened in due:
                metrics = opened.compute()
                self._callbacks.evaluation_is(Evaluation(opened.id.number, metrics))
                self._job.evaluated(opened, metrics)
                self._tell(opened, 0, at_once=True)

    def _see_to_rows(self) -> None:
        """Decay and expire rows at the end of a pass, if layers of the model have servers."""
        due = self._job.upkeeps.due
        assert due is not None
        session, done = opened_session(), EndedPass(0, False)
        if session is not None:
            specs = keeps_rows_of(session.job, session.client.tables())
            since_s = due.unseen_since_s
            done = end_pass(session.client, specs, period=due.period, unseen_since_s=since_s)
        self._job.note_upkeep(due, expired=done.expired, changed=done.changed)
        if trouble := done.trouble(due.pass_number, is_first_try=True):
            log.warning("%s", trouble)

    def _do(self, given: Assignment) -> None:
        """Do a task. It stays undone if the run is to stop, or if its round ends before it."""
        job, opened, lease = self._job, given.round, given.lease
        kind, count = opened.id.kind, opened.table[lease.task].count
        outputs, damaged, is_whole = None, 0, True
        scores: AttemptScores | None = None
        if kind is RoundKind.TRAIN_END:
            with self._saved_somewhere():
                self._others.end_training(self._program, self._callbacks)
        else:
            with self._feed(opened, lease.task) as feed:
                if kind is RoundKind.TRAINING:
                    if self._scorer is not None:
                        scores = self._scorer.begin(0, job.scored_values)
                    lease, is_whole = self._train(opened, lease, feed, scores)
                elif kind is RoundKind.EVALUATION:
                    outputs = self._others.evaluate(feed, self._program, lambda: None)
                else:
                    self._predictions += self._others.predict(
                        feed, lease.task, self._program, lambda: None
                    )
            damaged = feed.bad.count
            if kind is not RoundKind.TRAINING:
                self._tell(opened, count)
        if not is_whole:
            why = "the run is to stop" if self._stop.is_set() else "the training is over"
            job.give_back(WORKER, opened.id, lease, why, damaged=damaged)
            return
        brought, metrics = self._brought(outputs)
        job.complete(
            WORKER,
            opened.id,
            lease,
            batches=lease.acknowledged,
            examples=count,
            damaged=damaged,
            outputs=brought,
            metrics=metrics,
            scores=None if scores is None else scores.all(),
        )
        if kind is RoundKind.TRAINING:
            # No server has a stream of it.
            job.closed([(opened.id.number, lease.task)])

    def _brought(self, outputs: Outputs | None) -> tuple[TaskOutputs | None, Mapping[str, str]]:
        """Return what a task of an evaluation brought, and what to compute from it."""
        if outputs is None:
            return None, {}
        seen = outputs.message(self._definition.metrics)
        return TaskOutputs(seen.records, seen.labels, seen.predictions, seen.values), seen.metrics

    def _train(
        self, opened: OpenRound, lease: LeasedTask, feed: TaskFeed, scores: AttemptScores | None
    ) -> tuple[LeasedTask, bool]:
        """Train a task's batches; fewer, if told to stop or if these were the job's last steps.

        Returns:
            The lease with the batches that were trained, and whether it is done.
        """
        job, pass_number = self._job, opened.id.number
        self._callbacks.pass_is(pass_number)
        self._program.pass_begins(pass_number)
        losses: list[float] = []
        examples, is_whole = 0, True
        for fed in feed:
            self._callbacks.batch_begins(job.schedule.steps)
            loss, predictions = self._program.train_batch(fed.features, fed.labels)
            if scores is not None and self._scorer is not None:
                scores.add(self._scorer.of(predictions, fed.labels, fed.groups))
            losses.append(loss)
            self._losses.append(loss)
            examples += len(fed.places)
            self._examples += len(fed.places)
            lease = lease._replace(acknowledged=len(losses))
            job.renew(WORKER, [(opened.id, lease)])
            self._tell(opened, len(fed.places))
            if opened.id not in job.schedule.open_rounds or self._stop.is_set():
                is_whole = False
                break
        mean = float(np.mean(losses)) if losses else None
        self._callbacks.task_ended(TaskReport(pass_number, lease.task, examples, len(losses), mean))
        return lease, is_whole

    # -- data -----------------------------------------------------------------------------

    def _reader(self, name: str) -> Reader:
        """Return the reader of one of the job's data; opened once."""
        if name not in self._readers:
            data = self._spec.data[name]
            self._readers[name] = open_reader(
                data, module=self._definition.module, grows=self._spec.grows(name)
            )
        return self._readers[name]

    @contextmanager
    def _feed(self, opened: OpenRound, task: int) -> Iterator[TaskFeed]:
        """Yield a task's batches; the user's errors say where they come from.

        Raises:
            ConfigError: The user's code failed.
            NonFiniteLoss: With the task's records named.
            BackstayError: The data cannot be read.
        """
        kind, records = opened.id.kind, opened.table[task]
        seed = record_order_seed(self._spec, opened.id, task)
        data = data_of(kind)
        feed = TaskFeed(
            lambda: self._reader(data),
            self._definition,
            MODES[kind],
            TaskRange(records.shard, records.start, records.count, seed),
            batch_size=self._spec.batch_size,
            bad_records_max=self._job.damaged_left(opened.id, task),
            groups_by=groups_by(self._spec, MODES[kind]),
        )
        try:
            with feed:
                yield feed
        except FeedFailed as error:
            cause = error.__cause__
            assert isinstance(cause, Exception)
            if isinstance(cause, BackstayError) and not is_users(cause, self._definition.path):
                raise cause from error
            text = user_traceback(cause, self._definition.path)
            raise ConfigError(f"feed failed on {records.shard}:\n{text}") from cause
        except NonFiniteLoss as error:
            last = records.start + records.count - 1
            where = f"records {records.start} to {last} of {records.shard}"
            raise NonFiniteLoss(f"{error}\n{where}") from error
        except BackstayError:
            raise
        except Exception as error:
            text = user_traceback(error, self._definition.path)
            raise ConfigError(f"the model failed on {records.shard}:\n{text}") from error

    def _tell(self, opened: OpenRound, records: int, *, at_once: bool = False) -> None:
        self._records_done[opened.id] += records
        now_s = time.monotonic()
        if self._report is None or (now_s - self._reported_s < REPORT_S and not at_once):
            return
        self._reported_s = now_s
        losses, self._losses = self._losses, []
        self._report(
            LocalProgress(
                opened.id,
                self._records_done[opened.id],
                opened.table.records,
                self._examples,
                float(np.mean(losses)) if losses else None,
                now_s - self._begin_s,
                self._job.record(),
                None if self._job.stream.lag is None else self._job.stream.lag.records,
            )
        )
