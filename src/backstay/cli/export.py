"""``backstay export``: a trained model as a folder of files, for programs without a cluster.

The command reads a checkpoint. It runs the model file to know which tensors the tables hold.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Literal, NamedTuple

import click

from backstay.checkpoint import remote
from backstay.checkpoint.export import export as write_export
from backstay.checkpoint.export_reader import Export
from backstay.checkpoint.storage import CheckpointStorage
from backstay.checkpoint.trained import CheckpointTables, find_checkpoint
from backstay.cluster.directory import Directory
from backstay.config import ClientConfig
from backstay.errors import (
    BackstayError,
    JobError,
    ServerUnavailable,
    UnknownJob,
)
from backstay.exit_codes import JOBS_CODES, ExitCode
from backstay.exits import examples, exit_on_error, print_json
from backstay.job.asked_model import asked_model
from backstay.job.model_definition import load
from backstay.job_spec import JobSpec
from backstay.listing import listed
from backstay.master.job_client import find_job
from backstay.pserver.ctl.asking import (
    ClusterOptions,
    config_option,
    endpoint_option,
    json_option,
    named_endpoints,
)
from backstay.runner.last_status import checkpoint_folder, default_folder
from backstay.trainer.adapter.offline import job_of
from backstay.trainer.model.inference import model_part
from backstay.trainer.model.program import framework_of

__all__ = ["export"]

JOB_FILE = "job.json"
REPORT_PAUSE_S = 1.0


class _Found(NamedTuple):
    """What is to be exported: a checkpoint, and the file of its model if that is known."""

    storage: CheckpointStorage
    checkpoint: str
    model: Path | None
    spec: JobSpec | None = None


@click.command(
    epilog=examples(
        JOBS_CODES,
        "backstay export census model",
        "backstay export census model --endpoint ps-0:7000 --format parquet",
        "backstay export s3://bucket/checkpoints model --model model.py",
        "backstay export /shared/ckpt tables --checkpoint ckpt-000007-3fa9c1",
    )
)
@click.argument("source")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "--model",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="The model file, or the job.json of a log_dir. A job needs none.",
)
@click.option("--job", metavar="NAME", help="The job to export, if the checkpoint has several.")
@click.option("--checkpoint", metavar="ID", help="Checkpoint to export. Default: the newest.")
@click.option(
    "--format",
    "kind",
    type=click.Choice(["safetensors", "parquet"]),
    default="safetensors",
    show_default=True,
    help="Format of the embeddings' files.",
)
@click.option(
    "--log-dir",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="The log_dir of the job. Default: backstay-jobs/NAME.",
)
@endpoint_option()
@config_option()
@json_option()
def export(
    source: str,
    folder: Path,
    model: Path | None,
    job: str | None,
    checkpoint: str | None,
    kind: Literal["safetensors", "parquet"],
    as_json: bool,
    **where: Any,
) -> None:
    """Write the trained model of SOURCE to a new FOLDER.

    SOURCE is the name of a job, or a folder or URL of checkpoints. With its model file, the folder
    has the model: each tensor under its name in state_dict(), and the rows of each embedding. The
    function load_for_inference of Paddle's or PyTorch's adapter loads it. Without the model file,
    the folder has all tables as they are.
    """
    others: dict[type[BackstayError], ExitCode] = {
        ServerUnavailable: ExitCode.NO_ANSWER,
        UnknownJob: ExitCode.NO_ANSWER,
    }
    with exit_on_error(ExitCode.FAILED, as_json=as_json, others=others):
        found = _found(source, checkpoint, model, **where)
        part: Any = None
        untrained: list[str] = []
        if found.model is not None or found.spec is not None:
            part, untrained = _model_part(found, job)
        progress = _Progress()
        made = write_export(
            found.storage, found.checkpoint, folder, kind, model=part, progress=progress
        )
        _show(Export.open(made), untrained, as_json=as_json)


def _found(
    source: str,
    checkpoint: str | None,
    model: Path | None,
    *,
    log_dir: Path | None,
    endpoint: str | None,
    config_file: Path | None,
) -> _Found:
    """Return what SOURCE means.

    Raises:
        JobError: There is no such job here.
        UnknownJob: The cluster has none.
        CheckpointNotFound: It has no checkpoint.
    """
    is_place = "/" in source or Path(source).is_dir()
    if endpoint is None and log_dir is None and is_place:
        return _Found(*find_checkpoint(source, checkpoint), model)
    chosen = named_endpoints(ClusterOptions(endpoint, config_file))
    if chosen is not None and log_dir is None:
        spec, url = _of_cluster(source, chosen, config_file)
        return _Found(*find_checkpoint(url, checkpoint), model, None if model else spec)
    logs = log_dir or default_folder(source)
    try:
        spec = JobSpec.from_json((logs / JOB_FILE).read_text(encoding="utf-8"))
    except OSError as error:
        raise JobError(
            f"no job {source!r} has left its {JOB_FILE} in {logs.absolute()} ({error.strerror}); "
            "give --log-dir, or --endpoint if a cluster has it, or a folder or URL of checkpoints"
        ) from error
    url = checkpoint_folder(logs, spec.checkpoint.url or str(logs / "checkpoints"))
    return _Found(*find_checkpoint(url, checkpoint), model, None if model else spec)


def _of_cluster(
    job: str, endpoints: tuple[str, ...], config_file: Path | None
) -> tuple[JobSpec, str]:
    """Return a job of a cluster and where the cluster's checkpoints are."""
    config = ClientConfig.load(file=config_file)
    entry = find_job(endpoints, job, config=config)
    if entry is None:
        raise UnknownJob(f"the cluster has no job {job!r}")
    directory = Directory(endpoints, config)
    try:
        listed = directory.call(
            lambda channel, timeout_s: remote.list_checkpoints(channel, timeout_s=timeout_s)
        )
    finally:
        directory.close()
    return JobSpec.from_json(entry.spec_json), listed.url


def _model_part(found: _Found, job: str | None) -> tuple[Any, list[str]]:
    with CheckpointTables(found.storage, found.checkpoint) as tables:
        if found.spec is not None:
            spec = found.spec
            definition = load(
                spec.model, model_params=spec.model_params, callback_params=spec.callback_params
            )
        else:
            assert found.model is not None
            definition, spec, _ = asked_model(found.model, job=job, only_job=lambda: job_of(tables))
        framework = framework_of(definition.framework(spec.framework))
        return model_part(framework, definition, spec, tables)


class _Progress:
    """Tells on standard error how many rows are written, about once a second."""

    def __init__(self) -> None:
        self._told_s = time.monotonic()

    def __call__(self, table: str, rows: int) -> None:
        if time.monotonic() - self._told_s >= REPORT_PAUSE_S:
            self._told_s = time.monotonic()
            click.echo(f"{table}: {rows:,} rows written", err=True)


def _show(made: Export, untrained: list[str], *, as_json: bool) -> None:
    part = made.model
    rows = {spec.name: len(made.table(spec.name)) for spec in made.sparse}
    shapes = {spec.name: list(made.dense(spec.name).shape) for spec in made.dense_tables}
    if part is not None:
        shapes = {name: list(value.shape) for name, value in part.state.items()}
    if untrained:
        click.echo(
            f"warning: {listed(untrained)}: neither on the servers nor in the "
            "job's output; exported as the model file initializes them",
            err=True,
        )
    if as_json:
        print_json(
            {
                "folder": str(made.directory),
                "checkpoint": made.checkpoint,
                "framework": None if part is None else part.framework,
                "layers": {} if part is None else {one.path: one.table for one in part.layers},
                "tables": rows,
                "tensors": shapes,
                "untrained": untrained,
            }
        )
        return
    for name, count in rows.items():
        click.echo(f"{name}  {count:,} rows")
    for name, shape in shapes.items():
        click.echo(f"{name}  {shape}")
    click.echo(f"{made.checkpoint} exported to {made.directory}")
    if part is None:
        click.echo("It has the tables only; give --model FILE to export the model.", err=True)
