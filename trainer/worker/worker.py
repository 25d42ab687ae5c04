"""A worker of a job: takes tasks from the job master until none is left, whatever happens.

One thread trains; others read ahead, renew the leases (``master_link``) and close the streams of
done tasks. The worker never decides which task comes next, and never counts a batch as done that is
not acknowledged everywhere. docs/internals/worker.md has the order of events. This module may
import the link, the readers and the adapters by name.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from backstay.addresses import parse_endpoints
from backstay.backoff import Backoff
from backstay.config import ClientConfig
from backstay.errors import (
    BackstayError,
    DataUnavailable,
    JobRefused,
    NotMaster,
    StateLost,
    Stopping,
    TaskLeaseLost,
    TransportError,
    Unauthenticated,
    WorkerReplaced,
)
from backstay.job.callbacks import Callbacks, TaskReport
from backstay.job.messages import Ended, EvaluationOutputs, JobTerms, Task, Wait
from backstay.job.model_definition import ModelDefinition, load
from backstay.job_spec import JobSpec
from backstay.schedule.takes import part_and_offset
from backstay.trainer.task_stream import TaskStream
from backstay.trainer.worker.connection import Connection, connect
from backstay.trainer.worker.figures import Figures
from backstay.trainer.worker.leased_work import LeasedWork
from backstay.trainer.worker.master_link import MasterLink
from backstay.trainer.worker.other_tasks import OtherTasks
from backstay.trainer.worker.pace import Pace, Participant
from backstay.trainer.worker.scoring import Scorer
from backstay.trainer.worker.sync_pace import pace_of
from backstay.trainer.worker.task_ends import (
    ENDING_MAX,
    StreamCloser,
    TaskEnds,
    bad_records_of,
    failure_report,
)
from backstay.trainer.worker.task_feed import (
    FeedFailed,
    ReadyBatch,
    TaskFeed,
    TaskFeeds,
    with_following,
)
from backstay.trainer.worker.task_source import TaskSource

__all__ = ["Worker"]

# Nothing this process does will change that.
FATAL = (WorkerReplaced, JobRefused, Unauthenticated)
# After an attempt at a task that failed for passing reasons.
ATTEMPTS = Backoff(first_s=0.1, longest_s=5.0)
# After a call that nobody answered, which was repeated for some time already.
CALLS = Backoff(first_s=0.1, longest_s=1.0)

T = TypeVar("T")

# Neither the task nor the user's code is at fault: another attempt will do.
PASSING = (TransportError, Stopping, NotMaster)
# A job master may be moved to another machine meanwhile.
PATIENCE_S = 600.0

_LOG = logging.getLogger(__name__)


def until_answered(call: Callable[[], T], stop: threading.Event) -> T:
    """Make a call to the job master or the servers, again and again while there is none.

    Args:
        call: May be repeated.
        stop: Set: the next failure is the last.

    Raises:
        ServerUnavailable: There was none for ten minutes, or ``stop`` was set.
    """
    retries = CALLS.begin(until_s=time.monotonic() + PATIENCE_S)
    while True:
        try:
            return call()
        except PASSING as error:
            pause_s = retries.next_s()
            if retries.is_over(time.monotonic()) or stop.is_set():
                raise
            _LOG.warning("no answer: %s", error)
            stop.wait(pause_s)


class Stopped(Exception):
    """This worker was told to end, between two batches."""


class Worker:
    """One worker process.

    Args:
        endpoints: Control addresses of pservers, "host:port".
        job: Name of the job.
        worker_id: Name of this worker, unique in the job.
        config: Token, TLS and timeouts; default: from the ``BACKSTAY_*`` names.
    """

    def __init__(
        self,
        endpoints: str | Sequence[str],
        job: str,
        worker_id: str,
        *,
        config: ClientConfig | None = None,
    ) -> None:
        self._endpoints = parse_endpoints(endpoints)
        self._config = config
        self._id = worker_id
        self._link = MasterLink(endpoints, job, worker_id, config=config)
        self._stop = threading.Event()
        self._stop_reason = ""
        self._source: TaskSource | None = None
        self._closer = StreamCloser(self._link)
        self._ends = TaskEnds(lambda work, loss: self._complete(work, loss=loss), self._closer)
        self._figures = Figures(self._link)
        self._attempts = ATTEMPTS.begin()
        self._terms: JobTerms
        self._spec: JobSpec
        self._definition: ModelDefinition
        self._callbacks: Callbacks
        self._pace = Pace()
        self._scorer: Scorer | None = None
        self._feeds: TaskFeeds
        self._connection: Connection | None = None
        self._other_incarnation = False
        self._others: OtherTasks

    def stop(self, reason: str) -> None:
        """Have ``run`` give back its tasks after the batch under way, and return."""
        self._stop_reason = self._stop_reason or reason
        self._stop.set()

    def run(self) -> str:
        """Work until the job has no more tasks, or until told to stop.

        Returns:
            Why it ended.

        Raises:
            ConfigError: The model file is wrong.
            BackstayError: The job master refuses this worker, or cannot be reached.
        """
        reason = "failed"
        try:
            self._terms = self._link.join()
            self._spec = JobSpec.from_json(self._terms.spec_json)
            self._definition = load(
                self._spec.model,
                model_params=self._spec.model_params,
                callback_params=self._spec.callback_params,
            )
            config = self._config or ClientConfig.load()
            self._pace = pace_of(
                self._spec, self._link, self._endpoints, config, self._told_to_stop
            )
            self._feeds = TaskFeeds(self._spec, self._definition)
            if self._spec.progressive is not None:
                self._scorer = Scorer(self._spec.progressive, self._definition.metrics)
            self._source = TaskSource(self._link, self._feeds, self._pace, self._told, self._scorer)
            self._others = OtherTasks(self._definition, self._spec, self._id)
            self._callbacks = Callbacks(
                self._definition.make_callbacks(),
                lambda rate: self._ready().program.set_learning_rate(rate),
            )
            self._ready()
            reason = self._work()
        except BaseException as error:
            reason = f"{type(error).__name__}: {error}"
            raise
        finally:
            self._end(reason)
        return reason

    # -- the loop -------------------------------------------------------------------------

    def _work(self) -> str:
        while True:
            answer = self._next()
            if isinstance(answer, Ended):
                return f"the job is {answer.state}: {answer.reason}"
            if isinstance(answer, Task):
                self._follow(answer)
                continue
            with contextlib.closing(answer):
                try:
                    self._attempt(answer)
                except Stopped:
                    return self._told_to_stop() or "stopped"

    def _next(self) -> LeasedWork | Task | Ended:
        """Return the next task once there is one."""
        while True:
            reason = self._told_to_stop()
            if reason:
                return Ended("left", reason)
            connection = self._connected()
            self._closer.close_for_others(
                connection.client, self._terms.stream_job, connection.incarnation
            )
            assert self._source is not None
            answer = self._source.next(connection.incarnation)
            if not isinstance(answer, Wait):
                return answer
            self._other_incarnation = answer.other_incarnation
            if self._ends.are_pending:
                # There may be no task because one that ends here is not recorded yet, or failed.
                self._all_ended_well()
            else:
                self._stop.wait(answer.wait_s)

    def _ask_ahead(self, work: LeasedWork) -> TaskSource:
        """Ask for the next tasks once the last batches of this one are made."""
        assert self._source is not None
        if work.feed is not None and work.feed.all_made and not self._told_to_stop():
            self._source.ask_ahead(work.incarnation)
        return self._source

    def _told_to_stop(self) -> str:
        if not self._stop.is_set():
            reason = self._link.stop_reason
            if reason is not None:
                self.stop(reason)
        return self._stop_reason if self._stop.is_set() else ""

    # -- one task -------------------------------------------------------------------------

    def _attempt(self, work: LeasedWork) -> None:
        """Do a task and tell the job master how it went.

        Raises:
            Stopped: This worker is to end; the task was given back.
            BackstayError: This worker cannot go on.
        """
        try:
            self._all_ended_well(left=ENDING_MAX - 1 if work.task.kind == "training" else 0)
            work.check()
            connection = self._ready()
            if work.incarnation != connection.incarnation:
                self._give_back(
                    work, "it was asked for on a connection of an older state incarnation"
                )
                return
            self._callbacks.evaluation_is(work.task.evaluation)
            if work.task.kind == "training":
                self._train(work, connection)
            else:
                self._do_other(work, connection)
            self._attempts.reset()
        except Stopped:
            self._give_back(work, self._stop_reason)
            raise
        except Exception as error:  # noqa: BLE001 (the user's code may raise anything)
            # With steps in flight, what fails here may be a push of the task before.
            if self._all_ended_well() or work.is_revoked:
                self._went_wrong(work, error)
            else:
                self._give_back(work, f"a task before it failed at its end: {error}")

    def _all_ended_well(self, left: int = 0) -> bool:
        """Wait until at most so many tasks are ending; see to failed ones."""
        failed = self._ends.collect(left)
        for work, error in failed:
            self._went_wrong(work, error)
        return not failed

    def _went_wrong(self, work: LeasedWork, error: Exception) -> None:
        """Do what an attempt's error asks for.

        Raises:
            BackstayError: This worker cannot go on.
        """
        if isinstance(error, TaskLeaseLost):
            _LOG.info("%s: dropped: %s", work, error)
            self._abandon()
        elif isinstance(error, FATAL):
            raise error
        elif isinstance(error, StateLost):
            _LOG.warning("%s: the servers have lost state or were restored: %s", work, error)
            self._give_back(work, str(error))
            self._disconnect()
        elif (passing := self._passing(error)) is not None:
            _LOG.warning("%s: given back: %s", work, passing)
            self._abandon()
            self._give_back(work, str(passing))
            self._back_off()
        else:
            self._abandon()
            self._fail(work, error)

    def _passing(self, error: Exception) -> BaseException | None:
        """Return what is wrong if another attempt will do; None: it may not."""
        if isinstance(error, PASSING):
            return error
        # The source of data without an end will be back, and then others can read them.
        is_away = isinstance(error, FeedFailed) and isinstance(error.__cause__, DataUnavailable)
        return error.__cause__ if is_away and self._spec.is_stream else None

    def _train(self, work: LeasedWork, connection: Connection) -> None:
        task, feed = work.task, work.feed
        assert feed is not None
        self._callbacks.pass_is(task.round)
        connection.program.pass_begins(task.round)
        stream = connection.client.task_stream(
            self._terms.stream_job,
            task.round,
            task.number,
            connection.tables,
            # Rounded up: a task that was acknowledged to its end has no batch left.
            first_batch=-(-task.first_batch // work.batches_per_push),
        )
        work.attach(stream)
        self._pace.begin_task(work)
        try:
            losses = self._train_batches(work, connection, stream, feed)
            # What was on its way when this worker was told to end counts as acknowledged.
            if task.first_batch + work.batches < feed.batches:
                stream.flush()
                raise Stopped
        finally:
            self._pace.end_task()
        loss = losses / work.batches if work.batches else None
        self._callbacks.task_ended(
            TaskReport(task.round, task.number, work.examples, work.batches, loss)
        )
        self._ends.begin(work, stream, loss)
        if not self._pace.overlaps_tasks:
            self._all_ended_well()

    def _follow(self, task: Task) -> None:
        """Take part in the steps of a task that another worker leads."""
        ways = Participant(
            lambda number: self._feeds.of(task, number),
            lambda: self._callbacks.batch_begins(self._figures.job_steps()),
            lambda: bool(self._told_to_stop()),
        )
        try:
            self._callbacks.evaluation_is(task.evaluation)
            self._callbacks.pass_is(task.round)
            connection = self._ready()
            connection.program.pass_begins(task.round)
            if self._pace.follow(task, connection.program, ways):
                self._attempts.reset()
            else:
                # The leader is gone, and the job master does not know it yet.
                self._back_off()
        except FATAL:
            raise
        except StateLost as error:
            _LOG.warning("the servers have lost state or were restored: %s", error)
            self._disconnect()
        except Exception as error:  # noqa: BLE001 (the user's code may raise anything)
            # The leader does the piece itself, and reports what is wrong with it.
            _LOG.warning("a step of task %d-%d failed: %s", task.round, task.number, error)
            self._back_off()
        finally:
            self._abandon()

    def _do_other(self, work: LeasedWork, connection: Connection) -> None:
        """Evaluate, predict, or end the training."""

        def check() -> None:
            work.check()
            self._check_stop()
            self._ask_ahead(work)

        outputs: EvaluationOutputs | None = None
        if work.feed is None:
            self._others.end_training(connection.program, self._callbacks)
        elif work.task.kind == "evaluation":
            seen = self._others.evaluate(work.feed, connection.program, check)
            outputs = seen.message(self._definition.metrics)
            work.examples = outputs.records
        else:
            number = work.task.number
            work.examples = self._others.predict(work.feed, number, connection.program, check)
        self._complete(work, outputs=outputs)

    def _complete(
        self,
        work: LeasedWork,
        *,
        loss: float | None = None,
        outputs: EvaluationOutputs | None = None,
    ) -> bool:
        """Tell that a task is done; return whether this attempt was the first."""
        feed = work.feed
        # Of training all records of the task, in whichever attempt: attempts that were cut short
        # have told of their batches, and no other call tells of their records.
        is_training = work.task.kind == "training" and feed is not None
        return self._told(
            lambda: self._link.complete(
                work.task,
                batches=0 if feed is None else feed.batches,
                examples=feed.records if is_training and feed else work.examples,
                loss=loss,
                outputs=outputs,
                bad_record_count=0 if feed is None else feed.bad.count,
                scores=work.all_scores(),
            )
        )

    def _told(self, call: Callable[[], T]) -> T:
        """Make a call until it is answered; see ``until_answered``."""
        return until_answered(call, self._stop)

    def _train_batches(
        self, work: LeasedWork, connection: Connection, stream: TaskStream, feed: TaskFeed
    ) -> float:
        """Train to the end, or until told to stop; return the sum of the losses.

        Where several batches are sent together, a part of them is never sent: it would count for
        all of them, and the rest would be skipped when the task is tried again.
        """
        losses = 0.0
        together = work.batches_per_push
        unsent: list[NDArray[np.int64]] = []
        with stream:
            for fed, following in with_following(feed):
                source = self._ask_ahead(work)
                if fed.number % together == 0:
                    stream.begin_batch(fed.number // together)
                losses += self._train_batch(
                    work, connection, fed, following or source.first_ready()
                )
                unsent.append(fed.places)
                if (fed.number + 1) % together == 0 or fed.number + 1 == feed.batches:
                    self._pace.send()
                    if connection.counter is not None:
                        task, places = work.task, np.concatenate(unsent)
                        shard, start = self._counted_as(task)
                        connection.counter.count(shard, start, places)
                    unsent = []
                if self._told_to_stop():
                    if unsent:  # leaving by an error, these do not count as ended
                        raise Stopped
                    break
        return losses

    def _counted_as(self, task: Task) -> tuple[str, int]:
        """Return the shard and the first record under which an audit counts a task.

        Of data without an end an offset is one record, whichever take it is in.
        """
        if not self._spec.is_stream:
            return task.shard, task.start
        part, first = part_and_offset(task.shard)
        return part, first + task.start

    def _train_batch(
        self,
        work: LeasedWork,
        connection: Connection,
        fed: ReadyBatch,
        following: ReadyBatch | None,
    ) -> float:
        self._pace.begin_batch()
        connection.client.push_steps.done = self._figures.job_steps()
        self._callbacks.batch_begins(connection.client.push_steps.done)
        if following is not None:
            connection.program.prefetch(following.features)
        try:
            loss, predictions = self._pace.step(connection.program, fed)
            if self._scorer is not None and work.scores is not None:
                work.scores.add(self._scorer.of(predictions, fed.labels, fed.groups))
        except TaskLeaseLost:
            raise
        except Exception as error:
            # For the report: with steps in flight, a failed push may be of a batch before.
            error.backstay_places = fed.places  # type: ignore[attr-defined]
            raise
        work.batches += 1
        work.examples += len(fed.places)
        self._figures.trained(len(fed.places), loss, connection.client.stats())
        return loss

    # -- how a task ends ------------------------------------------------------------------

    def _give_back(self, work: LeasedWork, reason: str) -> None:
        told = work.told()
        self._told(
            lambda: self._link.give_back(
                work.task, acknowledged_batches=told.batches, reason=reason, scores=told.scores
            )
        )

    def _fail(self, work: LeasedWork, error: Exception) -> None:
        text, places = failure_report(work, error, self._definition)
        _LOG.error("%s failed: %s", work, text)
        # What was acknowledged before stays acknowledged: the next attempt skips it on the servers.
        bad = bad_records_of(work.feed)
        told = work.told()
        self._told(
            lambda: self._link.fail(
                work.task,
                text,
                acknowledged_batches=told.batches,
                records=places,
                bad_records=bad,
                scores=told.scores,
            )
        )

    # -- the program ----------------------------------------------------------------------

    def _ready(self) -> Connection:
        """Return the connection with the program on it; made if there is none."""
        if self._connection is None:
            connection = connect(
                self._spec,
                self._definition,
                self._endpoints,
                self._config,
                self._pace,
                self._terms,
                self._id,
            )
            self._connection = connection
            names = [table.name for table in connection.tables]
            self._link.declare_tables(names, connection.client.table_notes)
        return self._connection

    def _connected(self) -> Connection:
        """Return a connection to the rows that the job is about; made anew after a restore."""
        while True:
            try:
                connection = self._told(self._ready)
                if not self._other_incarnation or self._told(connection.has_current_incarnation):
                    return connection
            except StateLost as error:
                _LOG.warning("the servers were restored: %s", error)
            self._all_ended_well()
            self._disconnect()
            self._other_incarnation = False

    def _abandon(self) -> None:
        """Let the program begin anew with the next batch."""
        if self._connection is not None:
            self._connection.program.abandon()
            self._pace.abandon()

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        self._closer.wait()
        if connection is not None:
            connection.close()

    def _end(self, reason: str) -> None:
        """Give back what was asked for ahead, say good-bye, end the threads without waiting."""
        self.stop(reason)
        for work, error in self._ends.collect():
            _LOG.warning("%s was not recorded as done: %s", work, error)
            with contextlib.suppress(BackstayError):
                self._give_back(work, str(error))
        for ahead in [] if self._source is None else self._source.shutdown():
            ahead.close()
            with contextlib.suppress(BackstayError):
                self._give_back(ahead, reason)
        self._disconnect()
        with contextlib.suppress(BackstayError):
            self._link.leave(reason)
        self._link.close()
        self._pace.close()
        self._ends.shutdown()
        self._closer.shutdown()

    def _back_off(self) -> None:
        self._stop.wait(self._attempts.next_s())

    def _check_stop(self) -> None:
        if self._told_to_stop():
            raise Stopped
