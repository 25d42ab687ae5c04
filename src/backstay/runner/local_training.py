"""``backstay train --local``: a job in this process, shown and logged like one with workers.

A model with layers of backstay gets one server of its own, started when the first of them is made.
The model is kept in ``output``, else in the job's log folder.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from backstay._proto.v1 import job_pb2
from backstay.consensus.records.jobs import JobStateRecord
from backstay.errors import BackstayError
from backstay.job_check.check import check_data, check_folders, load_definition
from backstay.job_spec import JobSpec
from backstay.master.status import MESSAGE_OF_KIND, recorded_status
from backstay.pserver.local_cluster import LocalCluster
from backstay.runner.earlier_runs import sole_run
from backstay.runner.hooks import run_hooks
from backstay.runner.last_status import StatusFile
from backstay.runner.metrics_log import MetricsLog
from backstay.runner.outcome import Outcome
from backstay.runner.show import Servers, Show
from backstay.runner.stop_signals import StopSignals
from backstay.runner.threads import chosen_threads, usable_cores
from backstay.trainer.adapter.session import Session, init
from backstay.trainer.worker.local_run import LocalProgress, LocalResult, LocalRun

__all__ = ["keeping_model", "train_here"]

# Folder in the log folder, for the model of a job without output.
MODEL_FOLDER = "model"
# Folder in the output, for a checkpoint of the rows of layers of backstay.
ROWS_FOLDER = "rows"


def keeping_model(spec: JobSpec) -> JobSpec:
    """Return a job of one process with an output: nothing else would keep its model."""
    return spec if spec.output else replace(spec, output=str(Path(spec.log_dir) / MODEL_FOLDER))


def train_here(spec: JobSpec, show: Show) -> Outcome:
    """Run a job in this process.

    Args:
        spec: The job, with an ``output``; see ``keeping_model``.
        show: Where its progress is shown.

    Raises:
        ConfigError: The model file, a field of the job or the data is wrong.
        BackstayError: Data cannot be read, the loss is not finite, or the server or a hook failed.
    """
    check_folders(spec)
    # They are set before the model file imports its framework, which reads them.
    threads = chosen_threads(spec, os.environ, processes=1, cores=usable_cores())
    os.environ.update(threads.environment)
    show.say(f"{spec.name}: {threads.text}")
    definition = load_definition(spec)
    with ExitStack() as stack:
        stack.enter_context(sole_run(Path(spec.log_dir), spec.name))
        metrics = stack.enter_context(MetricsLog(Path(spec.log_dir), tensorboard=spec.tensorboard))
        local_status = _LocalStatus(spec, show, metrics)
        run = LocalRun(
            spec,
            definition,
            session_factory=partial(_session, spec, stack, local_status),
            report=local_status.report,
        )
        stops = stack.enter_context(StopSignals(run.stop))
        stack.enter_context(show)
        with _between_hooks(spec, stops, local_status):
            for warning in check_data(spec, definition):
                show.say(warning)
            left = StatusFile(Path(spec.log_dir), (), are_own=True)
            show.say(f"{spec.name}: in this process; the model will be in {spec.output}")
            if unused := _unused(spec):
                show.say(f"{spec.name}: --local does nothing with {', '.join(unused)}")
            try:
                outcome = local_status.outcome(run.run())
            except BackstayError as error:
                left.ended(local_status.status, (), state="failed", reason=str(error))
                raise
            left.ended(local_status.status, (), state=outcome.state, reason=outcome.reason)
            return outcome


def _unused(spec: JobSpec) -> list[str]:
    """Return the fields of a job that need a job master, as far as they are given."""
    given = {
        "exports": spec.exports is not None,
        "hooks.each_pass": bool(spec.hooks.each_pass),
        "prometheus": bool(spec.prometheus),
    }
    return [name for name, is_given in given.items() if is_given]


@contextmanager
def _between_hooks(spec: JobSpec, stops: StopSignals, local_status: _LocalStatus) -> Iterator[None]:
    """Run the job's commands around the body, as they run around a job with workers."""
    env, limit_s = {"BACKSTAY_JOB": spec.name}, spec.hooks.timeout_s
    result = {"BACKSTAY_JOB_RESULT": "failed", "BACKSTAY_JOB_REASON": ""}
    try:
        run_hooks(spec.hooks.before, env, timeout_s=limit_s, stopped=lambda: stops.asked)
        yield
        result["BACKSTAY_JOB_RESULT"] = local_status.status.state
        result["BACKSTAY_JOB_REASON"] = local_status.status.reason
    except BackstayError as error:
        result["BACKSTAY_JOB_REASON"] = str(error)
        raise
    finally:
        run_hooks(spec.hooks.after, env | result, timeout_s=limit_s, stopped=lambda: False)


def _session(spec: JobSpec, stack: ExitStack, local_status: _LocalStatus) -> Session:
    """Start a server and connect to it."""
    settings = {"checkpoint_url": f"{spec.output.rstrip('/')}/{ROWS_FOLDER}"}
    local_status.server = stack.enter_context(LocalCluster(1, settings=settings))
    config = local_status.server.client_config()
    return init(
        local_status.server.endpoints, trainer_id=0, trainers_num=1, job=spec.name, config=config
    )


class _LocalStatus:
    """How far the run is, as the status of a job."""

    def __init__(self, spec: JobSpec, show: Show, metrics: MetricsLog) -> None:
        self._spec = spec
        self._show = show
        self._metrics = metrics
        self.server: LocalCluster | None = None
        self.status = job_pb2.JobStatus(job=spec.name, state="running")
        if spec.is_stream:
            self.status.stream.SetInParent()
        else:
            self.status.passes = spec.epochs

    def report(self, progress: LocalProgress) -> None:
        """Take note of how far it is, and show it."""
        status, size = self.status, self._spec.records_per_task
        status.kind = MESSAGE_OF_KIND[progress.round.kind]
        status.round = progress.round.number
        status.tasks.done = progress.records_done // size
        status.tasks.total = -(-progress.records_total // size)
        status.records_done, status.records_total = progress.records_done, progress.records_total
        self._take(progress.record, progress.examples, progress.seconds)
        if progress.loss is not None:
            status.loss = progress.loss
        if progress.lag_records is not None:
            status.stream.lag_records = progress.lag_records
        self._metrics.write(status)
        running = None if self.server is None else 1
        self._show.update(status, Servers(running, running))

    def outcome(self, result: LocalResult) -> Outcome:
        """Return how it ended."""
        self._take(result.record, result.examples, result.seconds)
        self._metrics.write(self.status)
        return Outcome(self.status, self.status.state, result.reason, result.seconds)

    def _take(self, record: JobStateRecord, examples: int, seconds: float) -> None:
        """Take over where the job stands; what is known within a task is added."""
        del self.status.evaluations[:]
        self.status.ClearField("progressive")
        self.status.MergeFrom(recorded_status(self._spec.name, record))
        self.status.examples = examples
        self.status.examples_per_s = examples / seconds if seconds else 0.0
        self.status.now_ms = int(time.time() * 1000)
