"""The status of a job, its failing tasks and its audit, printed."""

from __future__ import annotations

import click
from rich.console import Console
from rich.markup import escape

from backstay._proto.v1 import job_pb2
from backstay.exit_codes import ExitCode
from backstay.exits import print_json
from backstay.pserver.ctl.showing import grid, print_whole
from backstay.runner.audit import audit_lines, audit_mapping
from backstay.runner.metrics_log import kind_name
from backstay.runner.status_words import lag_text, predictions_text, round_text, summary_lines
from backstay.trainer.worker.audit import RecordsAudit

__all__ = ["print_audit", "print_dead_letter", "print_status"]

MIB = 1024 * 1024


def print_status(status: job_pb2.JobStatus) -> None:
    """Print the figures of a job."""
    for line in summary_lines(status):
        click.echo(line)
    where = f" in {status.checkpoint_url}" if status.checkpoint_url else ""
    click.echo(f"checkpoint {status.checkpoint or 'none'}{where}")
    _print_predictions(status.progressive)
    for change in status.scalings:
        click.echo(f"scaled {change}")
    if status.master_instance:
        _print_work(status)


def _print_predictions(told: job_pb2.ProgressiveStatus) -> None:
    """Print the newest window of predictions before training, and figures of values."""
    if told.windows:
        newest = told.windows[-1]
        click.echo(
            f"window {newest.number}, to step {newest.steps:,}: {newest.window.examples:,.0f} "
            f"records, {predictions_text(newest.window)}"
        )
    for value, figures in sorted(told.by.items()):
        click.echo(f"  {value}: {predictions_text(figures) or '-'}")


def _print_work(status: job_pb2.JobStatus) -> None:
    """Print what only a job master knows: tasks, rates, workers."""
    tasks = status.tasks
    click.echo(
        f"{round_text(status)}: {tasks.done:,} of {tasks.total:,} tasks done, "
        f"{tasks.doing:,} under way, {tasks.todo:,} to do, {tasks.dead_letters:,} dead-lettered"
    )
    if status.stream.HasField("lag_records"):
        stream = status.stream
        click.echo(
            f"lag {lag_text(stream)}; {stream.ahead_records:,} records taken, "
            f"{stream.dropped_records:,} dropped by the source"
        )
    click.echo(f"{status.examples_per_s:,.0f} examples/s")
    if status.trouble:
        click.echo(f"trouble: {status.trouble}")
    table = grid(
        *("worker", "alive", "host", "pid", "tasks", "examples", "examples/s", "loss", "stale"),
        "memory",
    )
    for worker in status.workers:
        table.add_row(
            escape(worker.id),
            "yes" if worker.alive else "no",
            escape(worker.host),
            str(worker.pid),
            " ".join(worker.tasks) or "-",
            f"{worker.examples:,}",
            f"{worker.examples_per_s:,.0f}",
            f"{worker.loss:.4f}" if worker.HasField("loss") else "-",
            f"{worker.staleness:.1f}" if worker.HasField("staleness") else "-",
            f"{worker.resident_bytes / MIB:,.0f} MiB" if worker.resident_bytes else "-",
        )
    click.echo(
        f"{sum(one.alive for one in status.workers)} workers alive of {status.workers_desired} "
        f"wanted ({status.workers_min} to {status.workers_max})"
    )
    print_whole(Console(), table)
    for worker in status.workers:
        if worker.note:
            click.echo(f"{worker.id}: {worker.note}")


def print_audit(job: str, audit: RecordsAudit, *, as_json: bool) -> ExitCode:
    """Print what the counters of records say; return the exit code."""
    if as_json:
        print_json({"job": job, **audit_mapping(audit)})
    else:
        click.echo("\n".join(audit_lines(audit)))
    return ExitCode.OK if audit.records_counted_once else ExitCode.FAILED


def print_dead_letter(one: job_pb2.DeadLetter) -> None:
    """Print a task that failed for good."""
    click.echo(
        f"dead letter: {kind_name(one.kind)} {one.round}, task {one.number}: records {one.start} "
        f"to {one.start + one.count - 1} of {one.shard}, {one.tries} tries, last by {one.worker}"
    )
    for line in one.error.strip().splitlines():
        click.echo(f"  {line}")
    if one.records:
        positions = ", ".join(str(one.start + position) for position in one.records)
        click.echo(f"  records concerned: {positions}")
