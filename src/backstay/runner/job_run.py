"""One job, from what the user has said to its end: what the commands and the Python calls share.

Prints nothing, reads no terminal and ends no process. Errors are those of ``backstay.errors``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from backstay.errors import ConfigError
from backstay.job_spec import JobSpec
from backstay.master.job_file import load_job
from backstay.runner.local_training import keeping_model
from backstay.runner.place import place_named, place_names
from backstay.runner.servers import chosen_servers
from backstay.runner.show import Show
from backstay.runner.supervisor import Supervisor

__all__ = ["DATA_OF_USE", "RunOptions", "job_of", "servers_text", "supervisor_of"]

# The data that a use cannot do without.
DATA_OF_USE = {"training": "training", "evaluation": "validation", "prediction": "prediction"}

ON_A_PLACE = " or ".join(f"--on {name}" for name in place_names())


class RunOptions(NamedTuple):
    """How to run a job, not what the job is."""

    config_file: Path | None = None
    first_contact_timeout_ms: int | None = None
    run_local: bool = False
    # Where, if not on this machine: one of ``place_names``.
    place: str | None = None
    detach: bool = False
    fresh: bool = False


def job_of(
    job_file: Path | None,
    fields: Mapping[str, Any],
    options: RunOptions,
    *,
    use: str,
    given_by: str = "the command line",
) -> JobSpec:
    """Return the job that a file and fields describe, as it is to run.

    Args:
        job_file: None: the fields say everything.
        fields: Values by dotted name; they win.
        options: How it is to run.
        use: ``training``, ``evaluation`` or ``prediction``.
        given_by: What has given the fields, for errors.

    Raises:
        ConfigError: A field is wrong or missing, or options contradict each other.
    """
    if job_file is None and "model" not in fields:
        raise ConfigError(
            "no job is given: name a job file, such as job.yaml, or give at least --name, "
            f"--model and --{DATA_OF_USE[use]}"
        )
    _check_place(options)
    given = fields if options.place is None else {**fields, "launcher": options.place}
    spec = load_job(job_file, given, folder=Path.cwd(), use=use, given_by=given_by)
    if spec.schedule is not None and options.place is None:
        raise ConfigError(
            f"schedule: Kubernetes runs jobs by a schedule: give {ON_A_PLACE}; to run the job here "
            "and now, --set schedule=null"
        )
    if spec.autoscale is not None and options.place is None:
        raise ConfigError(
            f"autoscale: changes the number of Pods: give {ON_A_PLACE}, or --set autoscale=null"
        )
    return keeping_model(spec) if options.run_local else spec


def supervisor_of(
    spec: JobSpec, options: RunOptions, show: Show, *, hooks_output: Path | None = None
) -> Supervisor:
    """Return what runs a job with workers of this machine, and say what it is to be."""
    show.say(
        f"{spec.name}: {spec.workers.initial} workers, {servers_text(spec)}; logs in {spec.log_dir}"
    )
    return Supervisor(
        spec,
        show,
        config_file=options.config_file,
        first_contact_timeout_ms=options.first_contact_timeout_ms,
        fresh=options.fresh,
        hooks_output=hooks_output,
    )


def servers_text(spec: JobSpec) -> str:
    """Return which servers the job gets, and what says so."""
    chosen = chosen_servers(spec, os.environ)
    if not chosen.local:
        return f"servers {','.join(chosen.endpoints)} ({chosen.source})"
    return f"{chosen.local} servers of its own ({chosen.source})"


def _check_place(options: RunOptions) -> None:
    """Refuse options that do not go with where the job is to run."""
    if options.place is None:
        if options.detach:
            raise ConfigError(
                f"--detach: goes with {ON_A_PLACE}; other jobs end with their command"
            )
        return
    if options.run_local:
        raise ConfigError("--on and --local: give one of them")
    place_named(options.place).check(options.config_file, fresh=options.fresh)
