"""``backstay jobs``: the jobs of a cluster, from any machine that reaches one of its servers.

What a job is and how it ended is in its records; figures, orders and failing tasks are asked of
its job master, whose address is in the records as well.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import click
from google.protobuf.json_format import MessageToDict
from rich.console import Console
from rich.markup import escape

from backstay.cli.jobs_there import carry_out
from backstay.cli.status_text import print_audit, print_dead_letter, print_status
from backstay.command_line import given_before
from backstay.config import ENDPOINT_VARIABLES, ClientConfig
from backstay.consensus.records.jobs import OVER_STATES
from backstay.errors import (
    BackstayError,
    ConfigError,
    JobError,
    JobRefused,
    RequestRefused,
    ServerUnavailable,
)
from backstay.exit_codes import JOBS_CODES, ExitCode
from backstay.exits import examples, exit_on_error, print_json
from backstay.job_spec import JobSpec
from backstay.master.job_client import JobClient, JobEntry, list_jobs
from backstay.master.status import complete_with_spec
from backstay.pserver.ctl.asking import (
    ClusterOptions,
    config_option,
    endpoint_option,
    json_option,
    named_endpoints,
)
from backstay.pserver.ctl.showing import grid, print_whole
from backstay.runner.audit import audit_job
from backstay.runner.cluster_jobs import Cluster, without_master
from backstay.runner.last_status import FILE_NAME, LastStatus, default_folder
from backstay.runner.place import place_named, place_names
from backstay.runner.status_words import round_text

__all__ = ["jobs"]

LOG_LINES = 50
LOG_LINES_MAX = 100_000
FOLLOW_PAUSE_S = 0.25
COMPLETION_LIMIT_MS = 1000
MASTER = "master"
REST = f"{__name__}.rest"
# The cluster answers, and does not do it.
REFUSALS: dict[type[BackstayError], ExitCode] = {
    JobRefused: ExitCode.FAILED,
    RequestRefused: ExitCode.FAILED,
}

CommandT = TypeVar("CommandT", bound=Callable[..., Any])


def _complete_job(context: click.Context, _parameter: click.Parameter, begun: str) -> list[str]:
    """Complete the name of a job: of the cluster, and of the jobs that ran in this folder."""
    found = {each.parent.name for each in default_folder("").glob(f"*/{FILE_NAME}")}
    options = ClusterOptions(
        given_before(context, "endpoint"), given_before(context, "config_file")
    )
    if named_endpoints(options) is not None:
        # An error means no suggestions: the user waits for them.
        with suppress(BackstayError):
            cluster = _cluster(options, "")
            soon = replace(cluster.config, deadline_ms=COMPLETION_LIMIT_MS)
            found |= {entry.job for entry in list_jobs(cluster.endpoints, config=soon)}
    return sorted(one for one in found if one.startswith(begun))


job_argument = click.argument("job", shell_complete=_complete_job)


def _folder_option() -> Callable[[CommandT], CommandT]:
    return click.option(
        "--log-dir",
        "folder",
        type=click.Path(file_okay=False, path_type=Path),
        metavar="FOLDER",
        help="Call no server; read the log_dir of the job, on this machine.",
    )


def _folder_without_cluster(options: ClusterOptions, job: str) -> Path | None:
    """Return the log folder of a job that was run from here, if no cluster is named."""
    folder = default_folder(job)
    found = named_endpoints(options) is None and (folder / FILE_NAME).exists()
    return folder if found else None


def _endpoints_of_running(job: str) -> tuple[str, ...] | None:
    """Return the servers of a job that was run by a job file of this folder, if there may be any.

    Raises:
        JobRefused: They have ended with its command.
    """
    folder = default_folder(job)
    if not job or not (folder / FILE_NAME).exists():
        return None
    last = LastStatus.read(folder)
    if last.is_over and last.are_own:
        raise JobRefused(
            f"job {job!r} is {last.status.state}, and its servers have ended with its command; the "
            "same `backstay train` goes on with it"
        )
    return last.endpoints


def _cluster(options: ClusterOptions, job: str) -> Cluster:
    chosen = named_endpoints(options)
    if chosen is None:
        chosen = _endpoints_of_running(job)
    if chosen is None:
        raise ConfigError(
            f"endpoint: give --endpoint HOST:PORT or set {' or '.join(ENDPOINT_VARIABLES)}; to "
            "read the log_dir of an ended job, give `show` or `logs` --log-dir FOLDER"
        )
    return Cluster.at(chosen, ClientConfig.load(file=options.config_file))


@contextmanager
def _asking(options: ClusterOptions, *, as_json: bool = False, job: str = "") -> Iterator[Cluster]:
    """Have the cluster; an error of the block ends the process with its code and a sentence.

    Args:
        options: The group's own options.
        as_json: Print an error as a JSON object, too.
        job: One that may have left its status and logs on this machine, and the cluster's address.
    """
    with exit_on_error(ExitCode.NO_ANSWER, as_json=as_json):
        cluster = _cluster(options, job)
    with exit_on_error(ExitCode.NO_ANSWER, as_json=as_json, others=REFUSALS):
        try:
            yield cluster
        except ServerUnavailable as error:
            if not job:
                raise
            raise ServerUnavailable(
                f"{error}. If they were the job's own servers, they have ended with its command: "
                f"--log-dir FOLDER reads its log_dir (backstay-jobs/{job} beside the job file, "
                "unless the job file names another)"
            ) from error


class _JobsGroup(click.Group):
    """Keeps the words after the group's own options, for a command that runs elsewhere."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the group's options."""
        rest = [*super().parse_args(ctx, args)]
        # Without the subcommand's name, as click gives them to the subcommand.
        ctx.meta[REST] = rest
        return rest


@click.group(
    cls=_JobsGroup,
    epilog=examples(
        JOBS_CODES,
        "backstay jobs --endpoint 127.0.0.1:7000 list",
        "BACKSTAY_ENDPOINT=ps-0:7000,ps-1:7000 backstay jobs show census",
        "backstay jobs --on kubernetes show census",
    ),
)
@endpoint_option()
@config_option()
@click.option(
    "--on",
    "where",
    type=click.Choice(place_names()),
    help="The jobs on Kubernetes, in the cluster that KUBECONFIG names; needs no server.",
)
@click.option("--namespace", metavar="NAME", default="", help="With --on: their namespace.")
@click.pass_context
def jobs(
    context: click.Context,
    endpoint: str | None,
    config_file: Path | None,
    where: str | None,
    namespace: str,
) -> None:
    """Look after the jobs of a cluster, from any machine that reaches its servers."""
    context.obj = ClusterOptions(endpoint, config_file)
    if where is None or context.invoked_subcommand is None:
        return
    words = context.meta[REST]
    # As the command itself would take them: --help, a missing argument and a wrong option, too.
    command = jobs.commands[context.invoked_subcommand]
    given = command.make_context(context.invoked_subcommand, list(words), parent=context).params
    with exit_on_error(ExitCode.NO_ANSWER, as_json=bool(given.get("as_json")), others=REFUSALS):
        if endpoint is not None or given.get("folder") is not None or given.get("follow"):
            raise ConfigError(
                "--on kubernetes: asks the API of Kubernetes; leave out --endpoint, --log-dir "
                "and --follow"
            )
        with place_named(where).jobs(namespace) as there:
            code = carry_out(there, context.invoked_subcommand, given, words)
    context.exit(code)


@jobs.command("list", epilog=examples(JOBS_CODES, "backstay jobs list"))
@json_option()
@click.pass_obj
def list_command(options: ClusterOptions, as_json: bool) -> None:
    """List the jobs, ended ones included."""
    with _asking(options, as_json=as_json) as cluster:
        entries = cluster.entries()
    if as_json:
        print_json({"jobs": [_entry_mapping(entry) for entry in entries]})
        return
    table = grid("job", "state", "progress", "master", "begun")
    for entry in entries:
        begun = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.created_ms / 1000))
        master = entry.master_address or "-"
        table.add_row(escape(entry.job), entry.state, escape(entry.progress), master, begun)
    print_whole(Console(), table)


def _entry_mapping(entry: JobEntry) -> dict[str, Any]:
    return {
        "job": entry.job,
        "uid": entry.uid,
        "state": entry.state,
        "reason": entry.reason,
        "progress": entry.progress,
        "master": entry.master_address or None,
        "created_ms": entry.created_ms,
    }


@jobs.command(
    epilog=examples(
        JOBS_CODES,
        "backstay jobs show census",
        "backstay jobs show census --log-dir backstay-jobs/census",
    )
)
@json_option()
@_folder_option()
@job_argument
@click.pass_obj
def show(options: ClusterOptions, job: str, folder: Path | None, as_json: bool) -> None:
    """Show how JOB goes: its figures, workers and failing tasks; of one that is over, its end.

    Servers of a job's own end with its command: what it left in its log_dir is shown then, with
    --log-dir, or of backstay-jobs/JOB here if no --endpoint is given.
    """
    folder = folder or _folder_without_cluster(options, job)
    if folder is not None:
        _show_last(folder, as_json=as_json)
        return
    with _asking(options, as_json=as_json, job=job) as cluster:
        entry = cluster.entry(job)
        document = _entry_mapping(entry)
        client = JobClient(cluster.endpoints, job, config=cluster.config)
        try:
            silent = not entry.master_address and entry.state not in OVER_STATES
            status = None if silent else client.status()
            if status is not None:
                complete_with_spec(status, JobSpec.from_json(entry.spec_json))
            dead_letters = () if silent else client.dead_letters()
        finally:
            client.close()
    if as_json:
        plain = status and MessageToDict(status, preserving_proto_field_name=True)
        tasks = [MessageToDict(one, preserving_proto_field_name=True) for one in dead_letters]
        print_json({**document, "status": plain, "dead_letters": tasks})
        return
    if status is None:
        click.echo(f"{job}: {entry.progress}; {without_master(entry)}")
    else:
        print_status(status)
    for one in dead_letters:
        print_dead_letter(one)


def _show_last(folder: Path, *, as_json: bool) -> None:
    """Show what a job's command left in its log folder."""
    with exit_on_error(ExitCode.NO_ANSWER, as_json=as_json):
        last = LastStatus.read(folder)
    status = last.status
    if as_json:
        progress = f"{status.steps} steps" if last.is_over else round_text(status)
        known = {"job": status.job, "uid": status.uid, "state": status.state}
        more = {"reason": status.reason, "progress": progress, "master": None}
        print_json({**known, **more, "created_ms": status.started_ms, **last.to_mapping()})
        return
    print_status(status)
    for one in last.dead_letters:
        print_dead_letter(one)
    click.echo(last.origin(folder))


@jobs.command(epilog=examples(JOBS_CODES, "backstay jobs scale census 4"))
@json_option()
@job_argument
@click.argument("workers", type=click.IntRange(0))
@click.pass_obj
def scale(options: ClusterOptions, job: str, workers: int, as_json: bool) -> None:
    """Change the number of workers of JOB to WORKERS; the other workers do not pause."""
    with _asking(options, as_json=as_json, job=job) as cluster, cluster.master(job) as master:
        before = master.scale(workers)
    if as_json:
        print_json({"job": job, "before": before, "workers": workers})
    else:
        click.echo(f"{job}: {workers} workers wanted, {before} before")


@jobs.command(
    epilog=examples(
        JOBS_CODES,
        "backstay jobs stop census",
        "backstay jobs stop census --reason 'the cluster is needed'",
    )
)
@json_option()
@click.option("--reason", default="jobs stop", metavar="TEXT", help="Reason to show with the job.")
@click.option("--discard", is_flag=True, help="End the job for good: no command can continue it.")
@click.option("--now", is_flag=True, help="Do not wait for what a job with periods has taken.")
@job_argument
@click.pass_obj
def stop(
    options: ClusterOptions, job: str, reason: str, discard: bool, now: bool, as_json: bool
) -> None:
    """Stop JOB in good order; the same `backstay train` goes on with it later.

    A job with periods takes nothing more, and stops when what it has taken is done.
    """
    with _asking(options, as_json=as_json, job=job) as cluster, cluster.master(job) as master:
        when_done = not (now or discard)
        left = master.stop(reason, keep_state=not discard, when_done=when_done)
    if as_json:
        print_json({"job": job, "stopping": True, "records_left": left})
    else:
        after = f" after {left:,} records that it has taken (--now: at once)" if left else ""
        click.echo(f"{job}: stopping{after}")


@jobs.command(
    epilog=examples(
        JOBS_CODES, "backstay jobs retry census", "backstay jobs retry census --task 17"
    )
)
@json_option()
@click.option("--task", "tasks", type=int, multiple=True, metavar="N", help="Only this one.")
@job_argument
@click.pass_obj
def retry(options: ClusterOptions, job: str, tasks: tuple[int, ...], as_json: bool) -> None:
    """Give the tasks of JOB that failed too often their tries again, in the round under way.

    A last checkpoint that could not be written is tried at once.
    """
    with _asking(options, as_json=as_json, job=job) as cluster, cluster.master(job) as master:
        count, saves = master.retry_dead_letters(tasks)
    if as_json:
        print_json({"job": job, "tasks": count, "saves": saves})
        return
    if saves:
        click.echo(f"{job}: the last checkpoint is tried again")
    if count or not saves:
        click.echo(f"{job}: {count} tasks are tried again")


@jobs.command(
    epilog=examples(
        JOBS_CODES,
        "backstay jobs logs census",
        "backstay jobs logs census --worker w-3 --follow",
        "backstay jobs logs census --worker master -n 200",
        "backstay jobs logs census --log-dir backstay-jobs/census --worker w-3",
    )
)
@_folder_option()
@click.option("--worker", metavar="ID", help="A worker, or `master`. Default: list the logs.")
@click.option(
    "-n",
    "--lines",
    type=click.IntRange(1, LOG_LINES_MAX),
    default=LOG_LINES,
    show_default=True,
    help="Number of newest lines.",
)
@click.option("--follow", is_flag=True, help="Print new lines as they come, until Ctrl-C.")
@job_argument
@click.pass_obj
def logs(
    options: ClusterOptions,
    job: str,
    folder: Path | None,
    worker: str | None,
    lines: int,
    follow: bool,
) -> None:
    """Print the log of a worker of JOB, if it was written on this machine.

    Without --endpoint and --log-dir, those of backstay-jobs/JOB here.
    """
    folder = folder or _folder_without_cluster(options, job)
    if folder is None:
        with _asking(options, job=job) as cluster:
            folder = Path(JobSpec.from_json(cluster.entry(job).spec_json).log_dir)
    with exit_on_error(ExitCode.FAILED):
        if not folder.is_dir():
            raise JobError(
                f"the logs of {job!r} are in {folder} on the machine where its `backstay train` "
                "runs, and that folder is not here"
            )
        # The path is not made of the given name, which could lead to another folder.
        known = {path.stem: path for path in (folder / "workers").glob("*.log")}
        known[MASTER] = folder / "master.log"
        if worker is not None and (worker not in known or not known[worker].exists()):
            raise JobError(
                f"there is no log of {worker!r} in {folder}; without --worker all are listed"
            )
    if worker is not None:
        _print_end(known[worker], lines, follow=follow)
        return
    for name, path in sorted(known.items()):
        click.echo(f"{name}  {path}")


def _print_end(path: Path, lines: int, *, follow: bool) -> None:
    with path.open(encoding="utf-8", errors="replace") as file:
        kept = file.readlines()[-lines:]
        click.echo("".join(kept), nl=False)
        try:
            while follow:
                text = file.read()
                if text:
                    click.echo(text, nl=False)
                else:
                    time.sleep(FOLLOW_PAUSE_S)
        except KeyboardInterrupt:
            # How one ends it.
            return


@jobs.command(epilog=examples(JOBS_CODES, "backstay jobs audit census"))
@json_option()
@job_argument
@click.pass_obj
def audit(options: ClusterOptions, job: str, as_json: bool) -> None:
    """Check that each record counts once in each pass of JOB, which had `audit` set and is over.

    In a pass that was cut short, and of tasks that are dead-lettered, at most once. Exit code 1:
    not so.
    """
    with _asking(options, as_json=as_json, job=job) as cluster:
        entry = cluster.entry(job)
        if entry.master_address:
            raise JobRefused(f"job {job!r} still runs; its counters are read when it is over")
        found = audit_job(job, cluster.endpoints, cluster.config)
    raise click.exceptions.Exit(print_audit(job, found, as_json=as_json))
