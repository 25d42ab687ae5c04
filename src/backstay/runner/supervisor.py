"""One job, from its servers to its summary: what ``backstay train`` does.

This process starts everything and computes nothing: the servers, if they are the job's own; the
job master, again when it dies; the workers that the job master wants. Each of them may be killed at
any time. If this process is killed, all of it ends, and the same command goes on.
"""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from backstay._proto.v1 import job_pb2
from backstay.config import ENDPOINT_VARIABLE, FILE_VARIABLE, ClientConfig
from backstay.consensus.records.jobs import OVER_STATES
from backstay.errors import BackstayError, ConfigError, JobError
from backstay.exit_codes import MASTER_CODES, ExitCode
from backstay.job_check.data_marks import Marks, check_unchanged, write_marks
from backstay.job_check.process import check_job_apart
from backstay.job_engine.launch import ExitReason, WorkerExit
from backstay.job_spec import JobSpec
from backstay.logs import message_of
from backstay.master.job_client import JobClient, find_job
from backstay.master.launcher import PATIENCE, LaunchLoop, WorkerProgram, launcher_class
from backstay.master.status import complete_with_spec
from backstay.runner.audit import audit_job
from backstay.runner.earlier_runs import forget, goes_on, sole_run
from backstay.runner.hooks import run_hooks
from backstay.runner.last_status import NewestCheckpoint, StatusFile, status_before
from backstay.runner.master_process import MasterProcess
from backstay.runner.metrics_log import MetricsLog
from backstay.runner.outcome import Outcome, what_is_not_kept
from backstay.runner.pass_hooks import PassHooks
from backstay.runner.servers import JobServers, accept_loss, forget_checkpoints, job_servers
from backstay.runner.show import Show
from backstay.runner.stop_signals import StopOrder, StopSignals
from backstay.runner.threads import chosen_threads, usable_cores
from backstay.trainer.worker.audit import RecordsAudit

__all__ = ["Supervisor"]

LOOK_PAUSE_S = 0.25
# Fields of a status that records without a job master do not have.
LIVE_FIGURES = ("now_ms", "examples_per_s", "passes", "kind", "round", "checkpoints_failed")
DEAD_LETTERS_SHOWN_MAX = 3
# A call to the job master that runs here; longer, and the display would stand still.
CALL_LIMIT_MS = 2000
# How long workers may take to give back their tasks after Ctrl-C.
STOP_GRACE_S = 30.0
# How long to go on asking a job master that has ended for good.
LAST_LOOK_S = 5.0
# How long workers may take to leave when the job is over.
LEAVE_LIMIT_S = 5.0
# More of them say nothing new; all are in the logs.
FAILURES_SHOWN_MAX = 20


class Supervisor:
    """Runs one job to its end."""

    def __init__(
        self,
        spec: JobSpec,
        show: Show,
        *,
        config_file: Path | None = None,
        first_contact_timeout_ms: int | None = None,
        fresh: bool = False,
        hooks_output: Path | None = None,
    ) -> None:
        """Prepare.

        Args:
            spec: The job, with absolute paths.
            show: Where its progress is shown.
            config_file: TOML file with token, certificates and deadlines.
            first_contact_timeout_ms: Wins over the file's.
            fresh: Forget what the job has done before.
            hooks_output: The file that takes what hooks print; None: standard error.

        Raises:
            ConfigError: A setting is wrong.
        """
        self._spec = spec
        self._show = show
        self._config_file = config_file
        self._config = ClientConfig.load(
            file=config_file, explicit={"first_contact_timeout_ms": first_contact_timeout_ms}
        )
        self._fresh = fresh
        self._hooks_output = hooks_output
        self._endpoints: tuple[str, ...] = ()
        self._log_dir = Path(spec.log_dir)
        self._said_notes: set[str] = set()
        self._status: job_pb2.JobStatus | None = None
        self._before = job_pb2.JobStatus()
        self._dead_letters: tuple[job_pb2.DeadLetter, ...] = ()
        self._file: StatusFile | None = None
        self._passes: PassHooks | None = None
        self._marks: Marks = {}
        self._newest: NewestCheckpoint | None = None
        self._has_own_servers = False

    @property
    def status(self) -> job_pb2.JobStatus | None:
        """How the job goes, as it was told last; None: not yet. Other threads may read it."""
        return self._status

    @property
    def endpoints(self) -> tuple[str, ...]:
        """Control addresses of the job's servers; empty: they do not serve yet."""
        return self._endpoints

    @property
    def config(self) -> ClientConfig:
        """Token, certificates and deadlines."""
        return self._config

    def run(self, stops: StopOrder | None = None) -> Outcome:
        """Run the job and what belongs around it.

        Args:
            stops: Gives the order to stop; None: signals do, and this is the main thread.

        Raises:
            JobRefused: Another process runs the job.
            ConfigError: A setting, the model file or the data is wrong.
            DataError: The data cannot be read.
            NeverReached: No server of the cluster answers.
            BackstayError: The servers or the job master do not start, or a hook failed.
        """
        begun_s = time.monotonic()
        with ExitStack() as stack:
            if stops is None:
                stops = stack.enter_context(StopSignals(last_words=self._last_words))
            try:
                stack.enter_context(sole_run(self._log_dir, self._spec.name))
                # Commands before the job may fetch its data, or even write its model file.
                if not self._spec.hooks.before:
                    self._check(stops)
                servers = stack.enter_context(
                    job_servers(self._spec, self._config, stopped=stops.wait, fresh=self._fresh)
                )
            except BackstayError:
                if not stops.asked:
                    raise
                return Outcome(None, "stopped", stops.reason, time.monotonic() - begun_s)
            stack.enter_context(self._show)
            self._newest, self._has_own_servers = servers.began_with, servers.are_own
            self._config, self._endpoints = servers.config, servers.endpoints
            env = self._environment(servers)
            self._show.say(f"export {ENDPOINT_VARIABLE}={env[ENDPOINT_VARIABLE]}")
            if warning := what_is_not_kept(self._spec, are_own=servers.are_own):
                self._show.say(f"warning: {warning}")
            state, reason, audit, is_finished = "failed", "", None, False
            try:
                self._hooks(self._spec.hooks.before, env, stops)
                if self._spec.hooks.before:
                    self._check(stops)
                state, reason = self._run_job(servers, env, stops)
                if state != "stopped":
                    audit, is_finished = self._judge(servers)
            except BackstayError as error:
                state, reason = ("stopped", stops.reason) if stops.asked else ("failed", str(error))
                if not stops.asked:
                    raise
            finally:
                if self._file is not None:
                    self._file.ended(self._status, self._dead_letters, state=state, reason=reason)
                result = {"BACKSTAY_JOB_RESULT": state, "BACKSTAY_JOB_REASON": reason}
                self._hooks(self._spec.hooks.after, {**env, **result}, None)
        seconds = time.monotonic() - begun_s
        nothing = state == "done" and self._was_done()
        return Outcome(self._status, state, reason, seconds, audit, is_finished, nothing)

    def _check(self, stops: StopOrder) -> None:
        """Refuse a job whose model file or data cannot be right, before anything works on it."""
        checked = check_job_apart(self._spec, lambda: stops.asked)
        for warning in checked.warnings:
            self._show.say(warning)
        self._marks = checked.marks

    def _environment(self, servers: JobServers) -> dict[str, str]:
        env = {ENDPOINT_VARIABLE: ",".join(servers.endpoints)}
        if self._config_file is not None:
            env[FILE_VARIABLE] = str(self._config_file.absolute())
        return env

    def _hooks(self, commands: Sequence[str], env: dict[str, str], stops: StopOrder | None) -> None:
        run_hooks(
            commands,
            {**env, "BACKSTAY_JOB": self._spec.name},
            timeout_s=self._spec.hooks.timeout_s,
            stopped=lambda: stops is not None and stops.asked,
            output=self._hooks_output,
        )

    def _run_job(
        self, servers: JobServers, env: dict[str, str], stops: StopOrder
    ) -> tuple[str, str]:
        """Return the state in which the job ended, and why."""
        spec = self._spec
        if self._fresh:
            if said := accept_loss(servers.endpoints, servers.config):
                self._show.say(said)
            forget(servers, spec.name, stops.wait)
            if servers.are_own and spec.kind == "training":
                forget_checkpoints(spec)
        spec_path = self._log_dir / "job.json"
        is_known = not self._fresh and goes_on(servers, spec.name, stops.wait)
        if spec.kind == "training":
            if is_known:
                check_unchanged(self._log_dir, spec.name, self._marks)
            write_marks(self._log_dir, self._marks)
        spec_path.write_text(spec.to_json(), encoding="utf-8")
        if is_known:
            self._before = status_before(self._log_dir)
        self._file = StatusFile(self._log_dir, servers.endpoints, are_own=servers.are_own)
        with ExitStack() as stack:
            # Left in the opposite order: first the workers go, then the job master.
            metrics = stack.enter_context(MetricsLog(self._log_dir, tensorboard=spec.tensorboard))
            master = stack.enter_context(self._master(spec_path, env, servers_end=servers.are_own))
            client = self._client(servers)
            stack.callback(client.close)
            follower = self._follow(stack, servers, env)
            self._passes = PassHooks(
                spec, env, self._show.say, self._hooks_output, is_new=not is_known
            )
            stack.callback(self._passes.stop)
            end = self._watch(client, servers, master, metrics, stops)
            if not stops.asked:
                self._passes.end(self._status)
            self._keep_figures()
            if follower is not None:
                follower.let_leave(LEAVE_LIMIT_S)
            self._tell_what_is_left(client, end[0], servers)
            return end

    def _follow(
        self, stack: ExitStack, servers: JobServers, env: Mapping[str, str]
    ) -> LaunchLoop | None:
        """Run the job's launcher until the stack is left; None: the job master runs it."""
        spec = self._spec
        kind = launcher_class(spec.launcher)
        if kind.IN_JOB_MASTER:
            return None
        threads = chosen_threads(
            spec, os.environ, processes=max(1, spec.workers.initial), cores=usable_cores()
        )
        self._show.say(f"{spec.name}: {threads.text}")
        launcher = kind.for_job(
            WorkerProgram(spec, {**env, **threads.environment, **spec.workers.env})
        )
        client = self._client(servers)
        stack.callback(client.close)
        follower = LaunchLoop(launcher, client.launch, on_exit=_ExitPrinter(self._show.say))
        return stack.enter_context(follower)

    def _say_new_notes(self, status: job_pb2.JobStatus) -> None:
        for note in status.table_notes:
            if note not in self._said_notes:
                self._said_notes.add(note)
                self._show.say(note)

    def _was_done(self) -> bool:
        """Whether the training was done before this command, and is no longer than it was."""
        status, before = self._status, self._before
        if status is None or self._spec.kind != "training":
            return False
        return before.state == "done" and status.examples == before.examples

    def _keep_figures(self) -> None:
        """Where nothing was left to train, the loss and the metrics are those of before."""
        status, before = self._status, self._before
        if status is None or not self._was_done():
            return
        if before.HasField("loss") and not status.HasField("loss"):
            status.loss = before.loss
        # The newest checkpoint may be from before the last evaluation, which is made again then.
        of_round = {one.round: one for one in (*before.evaluations, *status.evaluations)}
        del status.evaluations[:]
        status.evaluations.extend(of_round.values())

    def _tell_what_is_left(self, client: JobClient, state: str, servers: JobServers) -> None:
        """Say what failed for good, and where a stopped job goes on; its servers may end soon."""
        status = self._status
        if status is not None and status.dead_letters:
            try:
                self._dead_letters = client.dead_letters()
            except BackstayError as error:
                self._show.say(f"what failed cannot be read: {error}")
                return
            for one in self._dead_letters[:DEAD_LETTERS_SHOWN_MAX]:
                self._show.say(f"task {one.round}-{one.number} failed for good: {one.error}")
        if state == "stopped" and servers.are_own:
            self._show.say(self._where_it_goes_on())

    def _where_it_goes_on(self) -> str:
        if not self._has_own_servers:
            without = " without --fresh" if self._fresh else ""
            return f"the same command{without} goes on with the job"
        if self._spec.kind != "training":
            return "the servers end with this command: the same command begins anew"
        newest = self._newest.checkpoint if self._newest is not None else ""
        if newest:
            return f"the servers end with this command: the job goes on from checkpoint {newest}"
        return (
            "the servers end with this command, and no checkpoint was written yet: the job begins "
            "anew (checkpoint.every_tasks writes checkpoints more often)"
        )

    def _last_words(self) -> str:
        """Return what a second Ctrl-C says before it ends everything at once."""
        return f"ended at once; {self._where_it_goes_on()}"

    def _client(self, servers: JobServers) -> JobClient:
        config: ClientConfig = replace(servers.config, deadline_ms=CALL_LIMIT_MS)
        return JobClient(servers.endpoints, self._spec.name, config=config)

    def _master(self, spec_path: Path, env: dict[str, str], *, servers_end: bool) -> MasterProcess:
        def command(instance: int, replaces: int) -> list[str]:
            words = [sys.executable, "-m", "backstay.master.serve_cli", str(spec_path)]
            words += ["--servers-end"] if servers_end else []
            words += ["--instance", str(instance), "--replaces", str(replaces), *PATIENCE]
            # Also the progress that a restored cluster has; a job master started again goes on.
            return [*words, "--fresh"] if self._fresh and not replaces else words

        return MasterProcess(
            command,
            self._log_dir / "master.log",
            env=env,
            # The job is over, or another process would end in the same way.
            final_codes=frozenset({*MASTER_CODES} - {ExitCode.FAILED, ExitCode.CANNOT_LISTEN}),
            new_instance=lambda: secrets.randbits(63) | 1,
            on_restart=lambda code: self._show.say(
                f"the job master ended with {code} and is started again"
            ),
        )

    def _watch(
        self,
        client: JobClient,
        servers: JobServers,
        master: MasterProcess,
        metrics: MetricsLog,
        stops: StopOrder,
    ) -> tuple[str, str]:
        """Look on until the job is over; return its state and the reason."""
        give_up_s: float | None = None
        saves = _SaveFailurePrinter(self._spec, servers, self._show.say)
        while True:
            trouble = ""
            try:
                status = client.status()
                # Again, if a new job master has not heard of it.
                if stops.asked and (status.state not in OVER_STATES or status.state == "unsaved"):
                    client.stop(stops.reason, keep_state=True)
            except BackstayError as error:
                trouble = str(error)
            else:
                # What records say of a job without a job master is the past until ours has ended.
                if master.exit_code in (ExitCode.WRONG_SETTING, ExitCode.REPLACED):
                    raise _master_error(master)
                if status.master_instance or master.exit_code is not None:
                    self._take(status, metrics)
                    saves.look(status)
                    if status.state in OVER_STATES and not status.saving:
                        return status.state, status.reason
            if self._status is not None:
                self._show.update(self._status, servers.count(), trouble)
            now_s = time.monotonic()
            if give_up_s is None and stops.asked:
                self._show.say(self._stop_text(stops, servers))
                give_up_s = now_s + STOP_GRACE_S
                if servers.are_own:
                    give_up_s += self._spec.checkpoint.stop_wait_s
            if master.exit_code is not None:
                give_up_s = min(give_up_s or now_s + LAST_LOOK_S, now_s + LAST_LOOK_S)
            if give_up_s is not None and now_s >= give_up_s:
                break
            if stops.asked:
                master.wait(LOOK_PAUSE_S)
            else:
                stops.wait(LOOK_PAUSE_S)
        if stops.asked:
            return "stopped", stops.reason
        raise _master_error(master)

    def _stop_text(self, stops: StopOrder, servers: JobServers) -> str:
        text = f"{stops.reason}: the workers give back their tasks"
        checkpoint = self._spec.checkpoint
        if servers.are_own and checkpoint.is_wanted and checkpoint.stop_wait_s:
            text += (
                f", and a checkpoint is written within {checkpoint.stop_wait_s} s; a second "
                "Ctrl-C ends everything at once"
            )
        return text

    def _take(self, status: job_pb2.JobStatus, metrics: MetricsLog) -> None:
        """Keep and log a status; records without a job master lack what was seen before."""
        if self._status is None:
            metrics.seen(status)
        elif not status.master_instance:
            for name in LIVE_FIGURES:
                setattr(status, name, getattr(self._status, name))
            if self._status.HasField("loss"):
                status.loss = self._status.loss
            status.tasks.CopyFrom(self._status.tasks)
            if self._status.HasField("stream"):
                status.stream.CopyFrom(self._status.stream)
        if status.checkpoint_url:
            self._newest = NewestCheckpoint(status.checkpoint, status.checkpoint_url)
        elif self._newest is not None:
            # None was written since the servers began.
            status.checkpoint, status.checkpoint_url = self._newest
        complete_with_spec(status, self._spec)
        self._status = status
        # A short job may be over at the first look.
        self._say_new_notes(status)
        metrics.write(status)
        if self._passes is not None:
            self._passes.look(status)
        if self._file is not None:
            self._file.seen(status)

    def _judge(self, servers: JobServers) -> tuple[RecordsAudit | None, bool]:
        """Return what the counters of records say, and whether there is nothing left to do.

        All workers have ended.
        """
        spec, status = self._spec, self._status
        entry = find_job(servers.endpoints, spec.name, config=servers.config)
        if entry is None or not entry.is_finished or status is None:
            return None, False
        if not spec.audit:
            return None, True
        return audit_job(spec.name, servers.endpoints, servers.config), True


def _master_error(master: MasterProcess) -> BackstayError:
    """Return why the job master has ended for good: its own sentence, or the end of its log."""
    words = master.last_words()
    _, sign, sentence = words.rpartition("Error: ")
    if sign and master.exit_code == ExitCode.WRONG_SETTING:
        return ConfigError(sentence)
    if sign and master.exit_code == ExitCode.REPLACED:
        return JobError(f"another process runs this job: {sentence}")
    return JobError(
        f"the job master has ended with exit code {master.exit_code}; its log ends with:\n{words}"
    )


class _SaveFailurePrinter:
    """Says each time that a checkpoint could not be written, and once what can be done."""

    def __init__(self, spec: JobSpec, servers: JobServers, say: Callable[[str], None]) -> None:
        self._spec = spec
        self._servers = servers
        self._say = say
        self._failed = 0
        self._is_told = False

    def look(self, status: job_pb2.JobStatus) -> None:
        if status.checkpoints_failed > self._failed:
            why = status.trouble or status.reason or "its job master's log says why"
            self._say(f"warning: {why}")
        # A new job master begins to count anew.
        self._failed = status.checkpoints_failed
        if status.state == "unsaved" and status.saving and not self._is_told:
            self._is_told = True
            name, endpoints = self._spec.name, ",".join(self._servers.endpoints)
            kept = (
                "The servers are kept, and it is tried again"
                if self._servers.are_own
                else "The rows stay on the servers; it is tried again"
            )
            self._say(
                f"{name}: all tasks are done, but the last checkpoint is not written. {kept}. Make "
                f"room, or name another folder (pserverctl --endpoint {endpoints} config set "
                "checkpoint_url=...). Then it is written within 30 s, or at once by `backstay jobs "
                f"--endpoint {endpoints} retry {name}`. `backstay jobs stop` or Ctrl-C ends "
                "the job without it"
            )


class _ExitPrinter:
    """Shows people the first exits of workers that failed."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._said: set[str] = set()

    def __call__(self, end: WorkerExit) -> None:
        is_news = end.worker_id not in self._said and len(self._said) < FAILURES_SHOWN_MAX
        if end.reason is ExitReason.FINISHED or not is_news:
            return
        self._said.add(end.worker_id)
        # A worker that was killed had no last words about it.
        last = "" if end.code < 0 else message_of(end.last_words.rpartition("\n")[2])
        self._say(f"worker {end.worker_id} {end.how}{f': {last}' if last else ''}")
