"""What ``--on kubernetes`` makes of a job file: the objects, their YAML, and what to warn of.

Reads the model file and the environment. Reaches no cluster.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from backstay.errors import ConfigError
from backstay.job_spec import JobSpec
from backstay.kubernetes.objects import (
    JobObjects,
    Owner,
    OwnServers,
    ScheduleObjects,
    job_objects,
    schedule_objects,
    spec_in_pods,
)
from backstay.kubernetes.pod_template import section
from backstay.kubernetes.pserver_objects import (
    check_no_servers,
    pserver_endpoints,
    server_settings,
)
from backstay.runner.servers import ServerChoice, chosen_servers

__all__ = ["objects_of", "paths_outside", "schedule_of", "to_manifest"]

PYTHON_FILES_MAX = 200
# What tells the records of one run of a job's own servers from another's.
RUN_BYTES = 4


def objects_of(spec: JobSpec, run: str = "", owner: Owner | None = None) -> JobObjects:
    """Return what the command makes for a job without a schedule.

    Args:
        spec: The job.
        run: Which run of a schedule it is; empty: of none.
        owner: The CronJob of the schedule.

    Raises:
        ConfigError: The job cannot run on Kubernetes as it is.
    """
    if spec.hooks.before or spec.hooks.after:
        raise ConfigError(
            "hooks: on Kubernetes only a job with a schedule runs them; leave them out"
        )
    files, chosen, settings = _parts(spec)
    if settings is None:
        in_pods = spec_in_pods(spec, chosen.endpoints)
        return job_objects(in_pods, files, run=run, owner=owner)
    own = OwnServers(settings, secrets.token_hex(RUN_BYTES))
    in_pods = spec_in_pods(spec, pserver_endpoints(spec.name, chosen.local))
    return job_objects(in_pods, files, own, run=run, owner=owner)


def schedule_of(spec: JobSpec) -> ScheduleObjects:
    """Return what the command makes for a job with a schedule.

    Raises:
        ConfigError: The job cannot run on Kubernetes as it is.
    """
    # Each run makes servers of its own anew; what is wrong with them is said now.
    files, chosen, _ = _parts(spec)
    return schedule_objects(spec_in_pods(spec, chosen.endpoints, local=chosen.local), files)


def _parts(spec: JobSpec) -> tuple[dict[str, str], ServerChoice, dict[str, Any] | None]:
    """Return the files of a job, its servers, and the settings of servers of its own."""
    if spec.hooks.each_pass:
        raise ConfigError(
            "hooks.each_pass: no command runs beside a job on Kubernetes; leave it out"
        )
    files = {} if section(spec).model_folder else _model_files(Path(spec.model))
    chosen = chosen_servers(spec, os.environ)
    if chosen.local:
        return files, chosen, server_settings(spec, chosen.local)
    check_no_servers(spec)
    return files, chosen, None


def to_manifest(objects: JobObjects | ScheduleObjects, namespace: str) -> str:
    """Return the objects as YAML, with their namespace if the job names one."""
    made = [objects.deployment, *objects.owned] if isinstance(objects, JobObjects) else [*objects]
    place = {"namespace": namespace} if namespace else {}
    placed = [_plain({**one, "metadata": {**one["metadata"], **place}}) for one in made]
    text: str = yaml.safe_dump_all(placed, sort_keys=False, allow_unicode=True)
    return text


def paths_outside(spec: JobSpec) -> list[str]:
    """Return a warning for each path that a Pod has in no volume.

    The job master scans the data, and the workers read it. Workers write the output. Servers of the
    job's own keep its checkpoints.
    """
    kubernetes = section(spec)
    both = {"the job master": kubernetes.master, "the workers": kubernetes.worker}
    mounted = {
        whose: [one["mount_path"] for one in (*kubernetes.volumes, *pod.volumes)]
        for whose, pod in both.items()
    }
    named = [
        (f"{name}.paths", path, whose)
        for name, data in spec.data.items()
        for path in data.paths
        for whose in both
    ]
    named += [("output", spec.output, "the workers")] if spec.output else []
    warnings = [
        f"warning: {field}: {path} is in no volume of {whose}: name it in kubernetes.volumes, "
        "unless the image has it"
        for field, path, whose in named
        if path.startswith("/") and not any(_is_below(path, one) for one in mounted[whose])
    ]
    kept = [one["mount_path"] for one in (*kubernetes.volumes, *kubernetes.pserver.volumes)]
    url = spec.checkpoint.url
    is_own = chosen_servers(spec, os.environ).local and url.startswith("/")
    if is_own and not any(_is_below(url, one) for one in kept):
        warnings.append(
            f"warning: checkpoint.url: {url} is in no volume of kubernetes.pserver.volumes: all "
            "servers must have it as one folder"
        )
    return warnings


def _model_files(model: Path) -> dict[str, str]:
    """Return the model file and the Python files beside it, by name.

    Raises:
        ConfigError: One cannot be read, or they are too many.
    """
    paths = sorted({model, *model.parent.glob("*.py")})
    if len(paths) > PYTHON_FILES_MAX:
        raise ConfigError(
            f"model: {len(paths)} Python files are beside it, and the command carries "
            f"{PYTHON_FILES_MAX} at most. Put the model file into a folder of its own"
        )
    try:
        return {path.name: path.read_text(encoding="utf-8") for path in paths}
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"model: cannot be read: {error}") from error


def _plain(one: Mapping[str, Any]) -> Any:
    """Return a copy without shared parts, which YAML would write as aliases."""
    return json.loads(json.dumps(one))


def _is_below(path: str, folder: Any) -> bool:
    return Path(path).is_relative_to(str(folder))
