"""How a job ended: its exit code, the result that ``--json`` prints, and what is not kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from backstay._proto.v1 import job_pb2
from backstay.exit_codes import ExitCode
from backstay.job_spec import JobSpec
from backstay.runner.audit import audit_mapping
from backstay.runner.metrics_log import evaluations_of, figures_of
from backstay.trainer.worker.audit import RecordsAudit

__all__ = ["Outcome", "what_is_not_kept"]


@dataclass(frozen=True)
class Outcome:
    """How a job ended.

    Attributes:
        status: What the job master told last; None: it never answered.
        state: ``done``, ``stopped``, ``failed`` or ``unsaved``.
        reason: Why, if it is not done.
        duration_s: From the first server's start to now.
        audit: What the counters of records say, if the job has ``audit``.
        is_finished: Nothing is left to do, but for tasks that failed too often.
        did_nothing: Whether earlier commands had trained all of it.
    """

    status: job_pb2.JobStatus | None
    state: str
    reason: str
    duration_s: float
    audit: RecordsAudit | None = None
    is_finished: bool = False
    did_nothing: bool = False

    @property
    def exit_code(self) -> int:
        """The command's exit code."""
        if self.state == "done":
            # What an audit finds missing or doubled is a failure, whatever the job master says.
            right = self.audit is None or self.audit.records_counted_once
            return 0 if right else ExitCode.FAILED
        if self.state == "unsaved":
            return ExitCode.UNSAVED
        if self.is_finished and self.status is not None and self.status.dead_letters:
            return ExitCode.DEAD_LETTERS
        return ExitCode.STOPPED if self.state == "stopped" else ExitCode.FAILED

    def to_mapping(self, spec: JobSpec) -> dict[str, Any]:
        """Return what ``--json`` prints."""
        status = self.status or job_pb2.JobStatus(job=spec.name)
        figures = figures_of(status)
        kept = ("examples", "loss", "dead_letters", "bad_records")
        document: dict[str, Any] = {
            "job": spec.name,
            "state": self.state,
            "reason": self.reason,
            "exit_code": self.exit_code,
            "steps": figures["step"],
            **{name: figures[name] for name in kept},
            "evaluations": evaluations_of(status),
            "master_starts": status.master_starts,
            "checkpoint": status.checkpoint or None,
            "checkpoint_url": status.checkpoint_url or None,
            "checkpoints_failed": status.checkpoints_failed,
            "inexact": status.inexact or None,
            "went_back": status.went_back,
            "duration_s": round(self.duration_s, 3),
            "log_dir": spec.log_dir,
            "output": spec.output or None,
        }
        if "progressive" in figures:
            document["progressive"] = figures["progressive"]
        for name in ("lag_records", "lag_s", "dropped_records"):
            if name in figures:
                document[name] = figures[name]
        if self.audit is not None:
            document["audit"] = audit_mapping(self.audit)
            document["records_counted_once"] = self.audit.records_counted_once
        return document


def what_is_not_kept(spec: JobSpec, *, are_own: bool) -> str:
    """Return what is gone when a job ends, though all of it went well; empty: nothing is.

    Args:
        spec: The job.
        are_own: Whether its servers end with it.
    """
    if spec.kind != "training" or not are_own or spec.checkpoint.is_wanted:
        return ""
    what = "no embedding on the servers" if spec.output else "no model"
    return (
        f"checkpoint.every is none, and the servers end with this command: {what} will be kept "
        "(--set checkpoint.every=pass keeps it)"
    )
