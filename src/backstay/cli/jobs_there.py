"""``backstay jobs --on PLACE``: asks the place, and prints what it tells.

Of a job that is over, ``show`` and ``audit`` print what its job master has written last. What only
a job master or the servers know is asked by the same command, run beside the job master.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click
from google.protobuf.json_format import MessageToDict
from rich.console import Console
from rich.markup import escape

from backstay.cli.status_text import print_audit, print_status
from backstay.exits import print_json
from backstay.pserver.ctl.showing import grid, print_whole
from backstay.runner.audit import audit_lines, audit_of_mapping
from backstay.runner.place import JobsThere, JobThere, Published
from backstay.runner.status_words import round_text

__all__ = ["carry_out"]


def carry_out(
    there: JobsThere, command: str, given: Mapping[str, Any], words: Sequence[str]
) -> int:
    """Carry out one of the commands of ``backstay jobs``; return its exit code.

    Args:
        there: The jobs of the place.
        command: Its name.
        given: Its arguments and options, by the names of its parameters.
        words: The same, as they were typed.

    Raises:
        UnknownJob: There is no such job.
        JobRefused: The job has no job master now, and the command needs it.
    """
    if command == "list":
        _print_list(there.jobs(), as_json=given["as_json"])
        return 0
    job = there.job(given["job"])
    if command == "logs":
        _print_log(there, job, given["worker"], given["lines"])
        return 0
    as_json = bool(given.get("as_json"))
    if job.schedule and command in ("show", "stop"):
        click.echo(job.schedule_text, err=as_json)
    if command == "show" and _shown(there, job, as_json=as_json):
        return 0
    if command == "audit" and job.published.over and job.published.audit is not None:
        return print_audit(job.name, audit_of_mapping(job.published.audit), as_json=as_json)
    ran = there.run(job, command, words)
    click.echo(ran.output, nl=False)
    click.echo(ran.errors, nl=False, err=True)
    if command == "show" and ran.exit_code == 0 and not as_json:
        _print_exits(job.published)
    return ran.exit_code


def _shown(there: JobsThere, job: JobThere, *, as_json: bool) -> bool:
    """Show a job that no job master runs now; return whether that is so."""
    if not job.uid:
        if as_json:
            _print_end(job, as_json=True)
    elif job.state == "starting":
        _print_start(job, there.waits_for(job), as_json=as_json)
    elif job.published.over:
        _print_end(job, as_json=as_json)
    else:
        return False
    return True


def _print_list(found: Mapping[str, JobThere], *, as_json: bool) -> None:
    jobs = [found[name] for name in sorted(found)]
    if as_json:
        print_json({"jobs": [_mapping(job) for job in jobs]})
        return
    table = grid("job", "state", "progress", "workers", "schedule")
    for job in jobs:
        status = job.published.status
        workers = "" if status is None else f"{len(status.workers)}/{status.workers_desired}"
        progress = escape(_progress(job))
        table.add_row(escape(job.name), job.state, progress, workers, escape(job.schedule))
    print_whole(Console(), table)


def _progress(job: JobThere) -> str:
    return "" if job.published.status is None else round_text(job.published.status)


def _mapping(job: JobThere) -> dict[str, Any]:
    return {
        "job": job.name,
        "uid": job.uid,
        "state": job.state,
        "reason": job.published.reason,
        "progress": _progress(job),
        "schedule": job.schedule,
    }


def _print_start(job: JobThere, trouble: str, *, as_json: bool) -> None:
    """Print what a job waits for that its job master has not begun yet."""
    if as_json:
        print_json({**_mapping(job), "status": None, "trouble": trouble})
    else:
        click.echo(f"{job.name}: {job.state}")
        click.echo(f"trouble: {trouble}" if trouble else "it begins as soon as its servers serve")


def _print_end(job: JobThere, *, as_json: bool) -> None:
    """Print what the job master of an ended job has written last."""
    published = job.published
    if as_json:
        status = published.status
        plain = status and MessageToDict(status, preserving_proto_field_name=True)
        exits = [one._asdict() for one in published.exits]
        print_json({**_mapping(job), "status": plain, "exits": exits, "audit": published.audit})
        return
    if published.status is None:
        click.echo(f"{job.name}: {published.over}: {published.reason}")
    else:
        # Nothing works any more.
        published.status.master_instance = 0
        print_status(published.status)
    if published.audit is not None:
        click.echo("\n".join(audit_lines(audit_of_mapping(published.audit))))
    _print_exits(published)


def _print_exits(published: Published) -> None:
    """Print how workers ended, and the newest ends with the last lines of their logs."""
    if published.counts:
        counts = ", ".join(f"{kind} {count}" for kind, count in sorted(published.counts.items()))
        click.echo(f"workers that ended: {counts}")
    for worker, how, words in published.exits:
        click.echo(f"worker {worker} {how}")
        for line in words.strip().splitlines():
            click.echo(f"  {line}")


def _print_log(there: JobsThere, job: JobThere, worker: str | None, lines: int) -> None:
    """Print the end of a log, or what has one."""
    if worker is not None:
        click.echo(there.log(job, worker, lines), nl=False)
        return
    for each, where in sorted(there.logs(job).items()):
        click.echo(f"{each}  {where}")
