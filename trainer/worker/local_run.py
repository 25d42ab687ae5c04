"""``backstay train --local``: a job's model file in this process, with no master and no workers.

The same schedule, feed, batches, callbacks and metrics as on a cluster with one worker; the
optimizer is the framework's own. A model with layers of backstay opens a session by the factory
that is given, and only then. May import the readers, the adapters by name, and the program; starts
no process itself.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from backstay.data import Reader, open_reader
from backstay.errors import BackstayError, ConfigError, NonFiniteLoss
from backstay.job.callbacks import Callbacks, Evaluation, TaskReport
from backstay.job.metrics import METRICS
from backstay.job.model_definition import (
    Mode,
    ModelDefinition,
    is_users,
    user_traceback,
)
from backstay.job_spec import JobSpec
from backstay.schedule.damaged import DamagedRecords
from backstay.schedule.evaluation import RoundOutputs, TaskOutputs
from backstay.schedule.local import LocalSchedule, LocalTask, RoundOver
from backstay.schedule.rounds import RoundId, RoundKind, data_of
from backstay.schedule.task_table import cut_data, round_table
from backstay.trainer.adapter.session import SessionFactory, opened_session, set_session_factory
from backstay.trainer.model.frameworks import Program, adapter
from backstay.trainer.worker.other_tasks import OtherTasks
from backstay.trainer.worker.task_feed import FeedFailed, TaskFeed, TaskRange

__all__ = ["LocalProgress", "LocalResult", "LocalRun"]

REPORT_S = 0.3
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
        passes: How many there will be at most.
        records_done: Of it.
        records_total: Likewise.
        examples: Trained on since the beginning.
        steps: Batches trained since the beginning.
        loss: Mean over the batches since the last report; None if there was none.
        seconds: Since the beginning.
        metrics: Of the last evaluation.
    """

    round: RoundId
    passes: int
    records_done: int
    records_total: int
    examples: int
    steps: int
    loss: float | None
    seconds: float
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class LocalResult:
    """What came of it.

    Attributes:
        examples: Records trained on, each as often as there were passes.
        steps: Batches trained.
        passes: Passes finished.
        evaluations: Metrics of each evaluation, oldest first.
        predictions: Records predicted.
        bad_records: Damaged records that were skipped, each counted once.
        stopped: Whether it was told to stop.
        reason: Why it ended before the last pass; empty: it did not.
        seconds: How long it took.
    """

    examples: int
    steps: int
    passes: int
    evaluations: tuple[dict[str, float], ...]
    predictions: int
    bad_records: int
    stopped: bool
    reason: str
    seconds: float


@dataclass
class _OpenRound:
    """A round under way.

    Attributes:
        round: Which.
        records_total: Of its data.
        records_done: So far.
        steps: Batches trained on so far.
        outputs: Of an evaluation.
        metrics: Of an evaluation: what to compute from all of them, by name.
    """

    round: RoundId
    records_total: int
    records_done: int = 0
    steps: int = 0
    outputs: RoundOutputs = field(default_factory=RoundOutputs)
    metrics: dict[str, str] = field(default_factory=dict)


class LocalRun:
    """One run of a job in this process.

    Args:
        spec: The job; workers, servers and checkpoints of it are not used.
        definition: Its model file.
        session_factory: Opens a session, with servers behind it, when a layer asks for one; None:
            such layers are refused.
        report: Called about three times a second while it runs, and after each evaluation.
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
        self._readers: dict[str, Reader] = {}
        self._rounds: dict[RoundId, _OpenRound] = {}
        self._examples = self._predictions = 0
        self._damaged = DamagedRecords()
        self._losses: list[float] = []
        self._evaluations: list[dict[str, float]] = []
        self._begin_s = self._reported_s = 0.0
        self._local: LocalSchedule
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
            framework = adapter(self._definition.framework(self._spec.framework))
            self._program = framework.build(self._definition, None, self._spec)
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
        schedule = self._local.schedule
        return LocalResult(
            self._examples,
            schedule.steps,
            schedule.passes_over,
            tuple(self._evaluations),
            self._predictions,
            self._damaged.total,
            schedule.outcome == "stopped",
            schedule.reason,
            time.monotonic() - self._begin_s,
        )

    def _run(self) -> None:
        spec = self._spec
        tables = {name: cut_data(name, self._reader(name).shards(), spec) for name in spec.data}
        self._local = local = LocalSchedule(spec, tables)
        while (turn := local.next()) is not None:
            if turn.round not in self._rounds:
                records = round_table(tables, turn.round).records
                self._rounds[turn.round] = _OpenRound(turn.round, records)
            opened = self._rounds[turn.round]
            if isinstance(turn, RoundOver):
                # With it go the outputs of an evaluation.
                del self._rounds[turn.round]
                local.schedule.round_over(turn.round, metrics=self._metrics_of(opened))
            else:
                self._do(opened, turn)
            if self._stop.is_set():
                local.schedule.stop("it was told to stop")
        if local.schedule.outcome == "stopped":
            self._others.save_model(self._program)

    def _do(self, opened: _OpenRound, task: LocalTask) -> None:
        kind = task.round.kind
        if kind is RoundKind.TRAIN_END:
            self._others.end_training(self._program, self._callbacks)
            return
        with self._feed(task) as feed:
            if kind is RoundKind.TRAINING:
                self._train(opened, task, feed)
                return
            if kind is RoundKind.EVALUATION:
                self._evaluate(opened, task.number, feed)
            else:
                self._predictions += self._others.predict(
                    feed, task.number, self._program, lambda: None
                )
        self._tell(opened, task.records.count)

    def _train(self, opened: _OpenRound, task: LocalTask, feed: TaskFeed) -> None:
        """Train a task's batches; fewer, if told to stop or if these were the job's last steps."""
        schedule, pass_number = self._local.schedule, task.round.number
        self._callbacks.pass_is(pass_number)
        self._program.pass_begins(pass_number)
        losses: list[float] = []
        examples = 0
        for fed in feed:
            self._callbacks.batch_begins(schedule.steps)
            loss, _ = self._program.train_batch(fed.features, fed.labels)
            losses.append(loss)
            self._losses.append(loss)
            examples += len(fed.places)
            self._examples += len(fed.places)
            opened.steps += 1
            schedule.count_steps(task.round, opened.steps)
            self._tell(opened, len(fed.places))
            if task.round not in schedule.open_rounds or self._stop.is_set():
                break
        mean = float(np.mean(losses)) if losses else None
        self._callbacks.task_ended(
            TaskReport(pass_number, task.number, examples, len(losses), mean)
        )

    def _evaluate(self, opened: _OpenRound, number: int, feed: TaskFeed) -> None:
        outputs = self._others.evaluate(feed, self._program, lambda: None)
        seen = outputs.message(self._definition.metrics)
        opened.metrics.update(seen.metrics)
        opened.outputs.add(
            number, TaskOutputs(seen.records, seen.labels, seen.predictions, seen.values)
        )

    def _metrics_of(self, opened: _OpenRound) -> dict[str, float]:
        """Return the metrics of a round that is over, if it is an evaluation, and tell of them."""
        if opened.round.kind is not RoundKind.EVALUATION:
            return {}
        metrics = opened.outputs.compute(
            {name: METRICS[kind] for name, kind in opened.metrics.items()}
        )
        for name, problem in opened.outputs.problems.items():
            log.warning("metric %s: %s", name, problem)
        self._evaluations.append(metrics)
        self._callbacks.evaluation_is(Evaluation(opened.round.number, metrics))
        self._tell(opened, 0, at_once=True)
        return metrics

    # -- data -----------------------------------------------------------------------------

    def _reader(self, name: str) -> Reader:
        """Return the reader of one of the job's data; opened once."""
        if name not in self._readers:
            data = self._spec.data[name]
            self._readers[name] = open_reader(data, module=self._definition.module)
        return self._readers[name]

    @contextmanager
    def _feed(self, task: LocalTask) -> Iterator[TaskFeed]:
        """Yield a task's batches; the user's errors say where they come from.

        Raises:
            ConfigError: The user's code failed.
            NonFiniteLoss: With the task's records named.
            BackstayError: The data cannot be read.
        """
        kind, records = task.round.kind, task.records
        data, known = data_of(kind), self._damaged
        others = known.of_data(data) - known.of_task(data, task.number)
        feed = TaskFeed(
            lambda: self._reader(data),
            self._definition,
            MODES[kind],
            TaskRange(records.shard, records.start, records.count, task.shuffle_seed),
            batch_size=self._spec.batch_size,
            bad_records_max=max(0, self._spec.max_bad_records - others),
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
        finally:
            # A task of which only a part is read meets less than is known of it.
            if feed.bad.count > known.of_task(data, task.number):
                known.note(data, task.number, feed.bad.count)

    def _tell(self, opened: _OpenRound, records: int, *, at_once: bool = False) -> None:
        opened.records_done += records
        now_s = time.monotonic()
        if self._report is None or (now_s - self._reported_s < REPORT_S and not at_once):
            return
        self._reported_s = now_s
        losses, self._losses = self._losses, []
        self._report(
            LocalProgress(
                opened.round,
                self._spec.epochs,
                opened.records_done,
                opened.records_total,
                self._examples,
                self._local.schedule.steps,
                float(np.mean(losses)) if losses else None,
                now_s - self._begin_s,
                dict(self._evaluations[-1]) if self._evaluations else {},
            )
        )
