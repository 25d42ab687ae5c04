"""``backstay train --local``: a job's model file in this process, with no master and no workers.

The same feed, batches, callbacks and metrics as on a cluster; the optimizer is the framework's own.
A model with layers of backstay opens a session by the factory that is given, and only then. May
import the readers, the adapters by name, and the program; starts no process itself.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from backstay.errors import BackstayError, ConfigError, NonFiniteLoss
from backstay.job_spec import DataSpec, EarlyStop, JobSpec
from backstay.trainer.adapter.session import SessionFactory, current_session, set_session_factory
from backstay.trainer.callbacks import Callbacks, TaskReport
from backstay.trainer.metrics import compute
from backstay.trainer.model.frameworks import Program, adapter
from backstay.trainer.model.model_definition import (
    Mode,
    ModelDefinition,
    is_users,
    user_traceback,
)
from backstay.trainer.readers import Reader, Shard, open_reader
from backstay.trainer.worker.evaluation import Outputs
from backstay.trainer.worker.other_tasks import OtherTasks
from backstay.trainer.worker.task_feed import FeedFailed, TaskFeed, TaskRange

__all__ = ["LocalProgress", "LocalResult", "LocalRun"]

REPORT_S = 0.3
# A 63-bit number from which each pass and task draws its order.
SEED_MAX = (1 << 63) - 1


@dataclass(frozen=True)
class LocalProgress:
    """How far it is.

    Attributes:
        mode: What is done now.
        pass_number: From 1; of training.
        passes: How many there will be at most.
        records_done: Of this pass, evaluation or prediction.
        records_total: Likewise.
        examples: Trained on since the beginning.
        steps: Batches trained since the beginning.
        loss: Mean over the batches since the last report; None if there was none.
        seconds: Since the beginning.
        metrics: Of the last evaluation.
    """

    mode: Mode
    pass_number: int
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
        bad_records: Damaged records that were skipped, each time that they were met.
        stopped: Why it ended before the last pass; empty: it did not.
        seconds: How long it took.
    """

    examples: int
    steps: int
    passes: int
    evaluations: tuple[dict[str, float], ...]
    predictions: int
    bad_records: int
    stopped: str
    seconds: float


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
        self._stopped = ""
        self._others = OtherTasks(definition, spec, "local")
        self._readers: dict[str, Reader] = {}
        self._examples = self._steps = self._bad = self._predictions = self._passes = 0
        self._evaluated_at = 0
        self._losses: list[float] = []
        self._evaluations: list[dict[str, float]] = []
        self._begin_s = self._reported_s = 0.0
        self._place = ("training", 1, 0, 0)
        self._program: Program
        self._callbacks: Callbacks

    def stop(self) -> None:
        """Have ``run`` end after the batch under way; from a signal handler, say."""
        self._stop.set()

    def run(self) -> LocalResult:
        """Train, evaluate and predict as the job says.

        Raises:
            ConfigError: The model file is wrong.
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
        finally:
            # Nothing below asks for a session that is not open.
            set_session_factory(None)
            session = current_session()
            set_session_factory(before)
            if session is not None and self._factory is not None:
                session.close()
        return LocalResult(
            self._examples,
            self._steps,
            self._passes,
            tuple(self._evaluations),
            self._predictions,
            self._bad,
            self._stopped,
            time.monotonic() - self._begin_s,
        )

    def _run(self) -> None:
        spec = self._spec
        if spec.training is not None:
            stopper = Stopper(spec.early_stop)
            for number in range(1, spec.epochs + 1):
                self._train_pass(number, spec.training, stopper)
                if self._stopped:
                    break
            if not self._stop.is_set():
                self._others.end_training(self._program, self._callbacks)
        elif spec.validation is not None:
            self._evaluate()
        else:
            self._predict()

    def _train_pass(self, number: int, data: DataSpec, stopper: Stopper) -> None:
        spec = self._spec
        self._callbacks.pass_is(number)
        self._program.pass_begins(number)
        for task, part in self._tasks("training", data, number):
            with self._feed("training", data, part) as feed:
                self._train_task(number, task, feed)
            if self._evaluation_is_due():
                self._evaluate()
                self._stopped = self._stopped or stopper.verdict(self._evaluations)
            if self._stop.is_set():
                self._stopped = "it was told to stop"
            if self._stopped:
                return
        self._passes = number
        if spec.validation is not None and not spec.evaluation_every_steps:
            self._evaluate()
            self._stopped = stopper.verdict(self._evaluations)

    def _evaluation_is_due(self) -> bool:
        every = self._spec.evaluation_every_steps
        if not every or self._steps // every <= self._evaluated_at:
            return False
        self._evaluated_at = self._steps // every
        return True

    def _train_task(self, pass_number: int, task: int, feed: TaskFeed) -> None:
        losses: list[float] = []
        examples = 0
        for fed in feed:
            self._callbacks.batch_begins(self._steps)
            loss, _ = self._program.train_batch(fed.features, fed.labels)
            losses.append(loss)
            examples += len(fed.places)
            self._steps += 1
            self._examples += len(fed.places)
            self._losses.append(loss)
            self._tell(len(fed.places))
            if self._spec.max_steps and self._steps >= self._spec.max_steps:
                self._stopped = f"max_steps ({self._spec.max_steps}) is reached"
            if self._stopped or self._stop.is_set():
                break
        mean = float(np.mean(losses)) if losses else None
        self._callbacks.task_ended(TaskReport(pass_number, task, examples, len(losses), mean))

    def _evaluate(self) -> None:
        data = self._spec.validation
        if data is None:
            return
        whole = Outputs()
        place = self._place
        for _, part in self._tasks("evaluation", data, 1):
            with self._feed("evaluation", data, part) as feed:
                whole.extend(self._others.evaluate(feed, self._program, lambda: None))
            self._tell(part.count)
            if self._stop.is_set():
                return
        labels, predictions = whole.arrays()
        metrics = compute(self._definition.metrics, labels, predictions)
        self._evaluations.append(metrics)
        self._callbacks.evaluated(metrics)
        self._tell(0, at_once=True)
        self._place = place

    def _predict(self) -> None:
        data = self._spec.prediction
        assert data is not None
        for task, part in self._tasks("prediction", data, 1):
            with self._feed("prediction", data, part) as feed:
                self._predictions += self._others.predict(feed, task, self._program, lambda: None)
            self._tell(part.count)
            if self._stop.is_set():
                self._stopped = "it was told to stop"
                return

    # -- data -----------------------------------------------------------------------------

    def _reader(self, mode: Mode, data: DataSpec) -> Reader:
        if mode not in self._readers:
            self._readers[mode] = open_reader(data, module=self._definition.module)
        return self._readers[mode]

    def _tasks(self, mode: Mode, data: DataSpec, number: int) -> Iterator[tuple[int, TaskRange]]:
        """Yield the tasks of a pass, in its order, with their numbers."""
        spec = self._spec
        shards: list[Shard] = list(self._reader(mode, data).shards())
        size = spec.records_per_task
        parts = [
            (shard.name, first, min(size, shard.records - first))
            for shard in shards
            for first in range(0, shard.records, size)
        ]
        self._place = (mode, number, 0, sum(count for _, _, count in parts))
        shuffled = mode == "training" and spec.shuffle != "none"
        generator = np.random.Generator(np.random.PCG64([spec.seed, number]))
        order = generator.permutation(len(parts)) if shuffled else np.arange(len(parts))
        seeds = generator.integers(1, SEED_MAX, len(parts))
        within = mode == "training" and spec.shuffle == "tasks_and_records"
        for task in order.tolist():
            shard, first, count = parts[task]
            yield task, TaskRange(shard, first, count, int(seeds[task]) if within else 0)

    @contextmanager
    def _feed(self, mode: Mode, data: DataSpec, part: TaskRange) -> Iterator[TaskFeed]:
        """Yield a task's batches; the user's errors say where they come from.

        Raises:
            ConfigError: The user's code failed.
            NonFiniteLoss: With the task's records named.
            BackstayError: The data cannot be read.
        """
        feed = TaskFeed(
            lambda: self._reader(mode, data),
            self._definition,
            mode,
            part,
            batch_size=self._spec.batch_size,
            bad_records_max=max(0, self._spec.max_bad_records - self._bad),
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
            raise ConfigError(f"feed failed on {part.shard}:\n{text}") from cause
        except NonFiniteLoss as error:
            last = part.start + part.count - 1
            where = f"records {part.start} to {last} of {part.shard}"
            raise NonFiniteLoss(f"{error}\n{where}") from error
        except BackstayError:
            raise
        except Exception as error:
            text = user_traceback(error, self._definition.path)
            raise ConfigError(f"the model failed on {part.shard}:\n{text}") from error
        finally:
            self._bad += feed.bad.count

    def _tell(self, records: int, *, at_once: bool = False) -> None:
        mode, number, done, total = self._place
        self._place = (mode, number, done + records, total)
        now_s = time.monotonic()
        if self._report is None or (now_s - self._reported_s < REPORT_S and not at_once):
            return
        self._reported_s = now_s
        losses, self._losses = self._losses, []
        self._report(
            LocalProgress(
                mode,  # type: ignore[arg-type]
                number,
                self._spec.epochs,
                done + records,
                total,
                self._examples,
                self._steps,
                float(np.mean(losses)) if losses else None,
                now_s - self._begin_s,
                dict(self._evaluations[-1]) if self._evaluations else {},
            )
        )


class Stopper:
    """Decides on an early stop, by the evaluations so far.

    Args:
        rule: Of the job; None: never.
    """

    def __init__(self, rule: EarlyStop | None) -> None:
        self._rule = rule

    def verdict(self, evaluations: list[dict[str, float]]) -> str:
        """Return why to stop, or an empty text.

        Raises:
            ConfigError: The metric is none of the model file's.
        """
        rule = self._rule
        if rule is None or not evaluations:
            return ""
        if rule.metric not in evaluations[-1]:
            raise ConfigError(
                f"early_stop.metric: {rule.metric!r} is none of the model file's eval_metrics "
                f"({', '.join(evaluations[-1])})"
            )
        sign = 1.0 if rule.mode == "max" else -1.0
        best, waited = -np.inf, 0
        for metrics in evaluations:
            value = sign * metrics[rule.metric]
            if value > best + rule.min_delta:
                best, waited = value, 0
            else:
                waited += 1
        if waited < rule.patience:
            return ""
        return f"{rule.metric} has not got better for {waited} evaluations"
