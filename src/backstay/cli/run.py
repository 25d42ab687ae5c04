"""``backstay train``, ``evaluate`` and ``predict``: a job file and flags become a job that runs."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console
from rich.logging import RichHandler

from backstay.cli.progress import Display
from backstay.config import ENDPOINT_VARIABLE
from backstay.errors import BackstayError, ConfigError, NeverReached
from backstay.exit_codes import JOB_CODES, ExitCode
from backstay.exits import examples, exit_on_error, print_json
from backstay.job_check.dry_run import DryRun
from backstay.job_check.process import dry_run_apart
from backstay.job_spec import MODES, JobSpec
from backstay.master.job_file import parse_value, to_yaml
from backstay.runner.job_run import RunOptions, job_of, servers_text, supervisor_of
from backstay.runner.local_training import train_here
from backstay.runner.outcome import Outcome
from backstay.runner.place import Place, place_named, place_names
from backstay.runner.servers import chosen_servers
from backstay.runner.status_words import summary_lines
from backstay.runner.stop_signals import StopSignals

__all__ = ["evaluate", "predict", "train"]

CommandT = TypeVar("CommandT", bound=Callable[..., Any])

# Flag -> field of the job. None of them has a default: what is not given does not win over a file.
FIELDS = {
    "name": "name",
    "model": "model",
    "training": "training.paths",
    "validation": "validation.paths",
    "prediction": "prediction.paths",
    "epochs": "epochs",
    "batch_size": "batch_size",
    "records_per_task": "records_per_task",
    "mode": "mode.kind",
    "workers": "workers.initial",
    "output": "output",
    "log_dir": "log_dir",
    "namespace": "kubernetes.namespace",
    "image": "kubernetes.image",
}


class ServerCount(click.ParamType[int]):
    """A number of servers; an address gets the option that is meant."""

    name = "integer"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the number."""
        try:
            return int(value)
        except ValueError:
            self.fail(
                f"{value!r} is not a number of servers to start; those of a cluster that runs are "
                f"named by --endpoint{f' {value}' if ':' in value else ' HOST:PORT'}",
                param,
                ctx,
            )


def _data_option(name: str) -> Callable[[CommandT], CommandT]:
    return click.option(
        f"--{name}",
        multiple=True,
        metavar="PATH",
        help=f"Records of the {name}: a file, folder, pattern or URL; more than once for several.",
    )


def _place_options() -> list[Callable[[CommandT], CommandT]]:
    """Return the options that say where a job runs, if not on this machine."""
    return [
        click.option(
            "--on",
            "where",
            type=click.Choice(place_names()),
            help="Run job master and workers as Pods of the cluster that KUBECONFIG names.",
        ),
        click.option("--namespace", metavar="NAME", help="Namespace of these Pods."),
        click.option("--image", metavar="NAME", help="Image of these Pods."),
        click.option("--detach", is_flag=True, help="With --on: do not wait for the end."),
    ]


def _job_options(*data: str) -> Callable[[CommandT], CommandT]:
    """Return a decorator that adds the options of a job with these data sets."""
    options = [
        click.argument("job_file", required=False, type=click.Path(dir_okay=False, path_type=Path)),
        click.option("--name", metavar="NAME", help="Name of the job."),
        click.option("--model", metavar="FILE", help="The Python file that defines the model."),
        click.option(
            "--param",
            "params",
            multiple=True,
            metavar="NAME=VALUE",
            help="An argument of the file's custom_model; more than once for several.",
        ),
        *(_data_option(name) for name in data),
        click.option("--batch-size", type=int, metavar="N", help="Records in a batch."),
        click.option("--records-per-task", type=int, metavar="N", help="Records in a task."),
        click.option("--workers", type=int, metavar="N", help="Workers to begin with."),
        click.option(
            "--servers",
            type=ServerCount(),
            metavar="N",
            help="Start N servers for this job, on this machine.",
        ),
        click.option(
            "--endpoint",
            metavar="HOST:PORT[,...]",
            help=f"Servers of a cluster that runs. [{ENDPOINT_VARIABLE}]",
        ),
        click.option("--output", metavar="URL", help="Folder for predictions and exports."),
        click.option("--log-dir", metavar="FOLDER", help="Folder for logs and metrics."),
        click.option(
            "--set",
            "others",
            multiple=True,
            metavar="FIELD=VALUE",
            help="Any other field of a job file, such as workers.max=8; the value is YAML.",
        ),
        click.option(
            "--config",
            "config_file",
            type=click.Path(dir_okay=False, path_type=Path),
            help="TOML file with token, certificates and deadlines, section [client]. "
            "[BACKSTAY_CONFIG]",
        ),
        click.option(
            "--first-contact-timeout-ms",
            type=int,
            metavar="N",
            help="How long servers may take to answer a first time (30000). 0: no limit.",
        ),
        *_place_options(),
        click.option("--fresh", is_flag=True, help="Forget what the job has done before."),
        click.option(
            "--dry-run",
            is_flag=True,
            help="Display what would be run; try the model on a few records, and start nothing.",
        ),
        click.option("--json", "as_json", is_flag=True, help="Print the result as a JSON object."),
    ]

    def decorate(command: CommandT) -> CommandT:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


@click.command(
    epilog=examples(
        JOB_CODES,
        "backstay train job.yaml",
        "backstay train job.yaml --workers 4 --epochs 3",
        "backstay train job.yaml --dry-run",
        "backstay train --name census --model model.py --training 'data/*.csv' --servers 1",
        "backstay train job.yaml --local",
    )
)
@_job_options("training", "validation")
@click.option("--epochs", type=int, metavar="N", help="Passes over the training data.")
@click.option("--mode", type=click.Choice(MODES), help="How workers keep step.")
@click.option(
    "--local", "run_local", is_flag=True, help="Train in this process: no workers, no servers."
)
def train(**given: Any) -> None:
    """Train the model of JOB_FILE with workers that may come and go.

    Flags win over the file. Ctrl-C stops the job in good order, and the same command goes on with
    it. Results and logs are in the job's log_dir.
    """
    _command("training", given)


@click.command(
    epilog=examples(
        JOB_CODES,
        "backstay evaluate job.yaml",
        "backstay evaluate job.yaml --validation test.csv --json",
    )
)
@_job_options("validation")
def evaluate(**given: Any) -> None:
    """Evaluate the trained model of JOB_FILE on its validation data.

    A job of its own, NAME-evaluation, with the tables of job NAME, or with its newest checkpoint if
    the servers are started for this.
    """
    _command("evaluation", given)


@click.command(
    epilog=examples(
        JOB_CODES,
        "backstay predict job.yaml --output predictions",
        "backstay predict job.yaml --prediction new.csv --output s3://bucket/predictions",
    )
)
@_job_options("prediction")
def predict(**given: Any) -> None:
    """Predict with the trained model of JOB_FILE for its prediction data.

    A job of its own, NAME-prediction, with the tables of job NAME, or with its newest checkpoint if
    the servers are started for this.
    """
    _command("prediction", given)


def _command(use: str, given: dict[str, Any]) -> None:
    """Do what any of the three commands does."""
    job_file: Path | None = given.pop("job_file")
    dry_run, as_json = given.pop("dry_run"), given.pop("as_json")
    options = RunOptions(
        config_file=given.pop("config_file"),
        first_contact_timeout_ms=given.pop("first_contact_timeout_ms"),
        run_local=given.pop("run_local", False),
        place=given.pop("where"),
        detach=given.pop("detach"),
        fresh=given.pop("fresh"),
    )
    others: dict[type[BackstayError], ExitCode] = {NeverReached: ExitCode.NEVER_REACHED}
    with exit_on_error(ExitCode.FAILED, as_json=as_json, others=others):
        spec = job_of(job_file, _fields(given), options, use=use)
        if options.place is not None and dry_run:
            planned, warnings = place_named(options.place).plan(spec)
            for warning in warnings:
                click.echo(warning, err=True)
            click.echo(planned, nl=False)
            return
        if dry_run:
            found = dry_run_apart(spec, local=options.run_local)
            _show_dry_run(spec, found, as_json=as_json)
            return
        exit_code = _run(spec, options, as_json=as_json)
    sys.exit(exit_code)


def _fields(given: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of the job that the flags name, by dotted name.

    Raises:
        ConfigError: A flag is not NAME=VALUE, or contradicts another one.
    """
    fields: dict[str, Any] = {}
    for flag, field in FIELDS.items():
        value = given.get(flag)
        # click gives an empty tuple where a flag that may be repeated is not there at all.
        if value is not None and value != ():
            fields[field] = list(value) if isinstance(value, tuple) else value
    if given["servers"] is not None and given["endpoint"] is not None:
        raise ConfigError("--servers and --endpoint: give one of them")
    if given["servers"] is not None:
        fields |= {"servers.local": given["servers"], "servers.endpoints": []}
    if given["endpoint"] is not None:
        fields |= {"servers.local": 0, "servers.endpoints": given["endpoint"].split(",")}
    fields |= {f"model_params.{name}": value for name, value in _pairs("--param", given["params"])}
    fields |= dict(_pairs("--set", given["others"]))
    return fields


def _pairs(flag: str, texts: Sequence[str]) -> list[tuple[str, Any]]:
    pairs = []
    for text in texts:
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise ConfigError(f"{flag}: {text!r} is not NAME=VALUE")
        pairs.append((name, parse_value(value)))
    return pairs


def _run(spec: JobSpec, options: RunOptions, *, as_json: bool) -> int:
    """Run the job and print what it came to; return the exit code."""
    console = Console(stderr=True)
    handler = RichHandler(console=console, show_path=False, show_time=True)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[handler])
    show = Display(spec.name, console=console)
    if options.place is not None:
        ended = _run_there(place_named(options.place), spec, show, detach=options.detach)
        if ended is None:
            return 0
        outcome = ended
    elif options.run_local:
        outcome = train_here(spec, show)
    else:
        outcome = supervisor_of(spec, options, show).run()
    if as_json:
        print_json(outcome.to_mapping(spec))
    else:
        _print_summary(spec, outcome, options)
    return outcome.exit_code


def _run_there(place: Place, spec: JobSpec, show: Display, *, detach: bool) -> Outcome | None:
    """Begin a job and follow it to its end; None: it goes on without this command."""
    with StopSignals() as stops:
        begun = place.begin(spec, show.say, stops.wait)
        if begun is None:
            return None
        with begun:
            if detach:
                return None
            with show:
                ended = begun.follow(show, stops, lambda: _asks_to_stop(show))
            if ended is None:
                show.say(
                    f"{spec.name} goes on; the same command follows it again, and "
                    f"`{begun.how_to_end}` ends it"
                )
            return ended


def _asks_to_stop(show: Display) -> bool:
    """Ask what a signal is to do; return whether it is to stop the job."""
    if not sys.stdin.isatty():
        return False
    with show.paused():
        answer: str = click.prompt(
            "Stop the job, or detach from it?",
            type=click.Choice(["stop", "detach"]),
            default="detach",
            err=True,
        )
    return answer == "stop"


def _print_summary(spec: JobSpec, outcome: Outcome, options: RunOptions) -> None:
    lines = [f"{spec.name}: {outcome.state}{f' ({outcome.reason})' if outcome.reason else ''}"]
    if outcome.status is not None:
        lines = summary_lines(outcome.status)
        if outcome.status.checkpoint_url:
            lines.append(f"{outcome.status.checkpoint} in {outcome.status.checkpoint_url}")
    if outcome.did_nothing:
        lines.append("nothing was left to train: --epochs adds passes, --fresh begins anew")
    if outcome.audit is not None:
        once = str(outcome.audit.records_counted_once).lower()
        lines.append(f"records_counted_once {once}")
    if spec.output and (outcome.state == "done" or options.run_local):
        lines.append(f"output in {spec.output}")
    logs = f"; logs and metrics in {spec.log_dir}" if options.place is None else ""
    lines.append(f"{outcome.duration_s:.1f} s{logs}")
    for line in lines:
        click.echo(line)


def _show_dry_run(spec: JobSpec, found: DryRun, *, as_json: bool) -> None:
    """Print what would be run."""
    if as_json:
        chosen = chosen_servers(spec, os.environ)
        servers = {"local": chosen.local, "endpoints": list(chosen.endpoints)}
        print_json({"spec": spec.to_mapping(), **found.to_mapping(), "servers": servers})
        return
    click.echo(to_yaml(spec))
    click.echo(f"# the model file loads: {found.framework}, metrics {', '.join(found.metrics)}")
    for plan in found.data:
        click.echo(
            f"# {plan.use}: {plan.records:,} records in {plan.shards:,} shards, "
            f"{plan.tasks:,} tasks; columns {', '.join(plan.columns) or 'none'}"
        )
        click.echo(f"#   tried: {plan.tried}")
    for warning in found.warnings:
        click.echo(f"# warning: {warning}")
    rounds = ", ".join(f"{count} x {kind}" for kind, count in found.rounds.items())
    rounds = "periods without an end" if spec.is_stream else rounds
    click.echo(f"# rounds: {rounds}, by {spec.workers.initial} workers")
    click.echo(f"# {servers_text(spec)}")
