"""``python -m backstay.kubernetes.master``: the job master in its Pod.

A Deployment starts the process again whenever it ends. So the process writes how the job ended,
scales servers of the job's own and then the Deployment to 0, and waits to be ended. After that
write no process serves the job.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import click

from backstay._proto.v1 import job_pb2
from backstay.addresses import parse_endpoints
from backstay.cluster.directory import reach
from backstay.config import ENDPOINT_VARIABLE, ClientConfig
from backstay.consensus.records.jobs import RUN_STATES, RunState
from backstay.errors import (
    BackstayError,
    KubernetesError,
    NeverReached,
    NotJobMaster,
)
from backstay.exit_codes import ExitCode
from backstay.exits import exit_on_error
from backstay.job_engine.scaling import ScalingPolicy
from backstay.job_spec import JobSpec, ServerCounts
from backstay.kubernetes.api import KubernetesApi
from backstay.kubernetes.job_scale import JobScale
from backstay.kubernetes.objects import NAMESPACE_VARIABLE
from backstay.kubernetes.owned_job import OwnedJob
from backstay.kubernetes.pserver_objects import cores_of_server
from backstay.kubernetes.published_status import status_data
from backstay.kubernetes.refusals import Refusal, refusal_of, why_refused
from backstay.kubernetes.server_scale import ServerScale
from backstay.logs import set_up_logging
from backstay.master.config import MasterConfig
from backstay.master.host import FINAL_ERRORS, MasterHost
from backstay.master.hosted_launcher import ExitsSeen
from backstay.runner.audit import audit_job, audit_mapping
from backstay.tasks import end_tasks

__all__ = ["main"]

PUBLISH_S = 2.0
PLAN_PAUSE_S = 2.0
RETRY_S = 2.0
# The end of a job is written, and then the Deployment is scaled, in so many tries each.
TRIES_MAX = 150
# Fewer if a right is missing: the command tells what a process that has ended says. Not one, as an
# API that has just begun may not know the rights yet.
FORBIDDEN_TRIES_MAX = 10
# How long the Deployment may take to end this process; then the container starts anew.
END_LIMIT_S = 300.0
# Of a job without servers of its own.
NO_SERVERS = ServerCounts(0, 0, 0)

# The objects of the job were deleted.
NOT_FOUND = 404

ResultT = TypeVar("ResultT")

log = logging.getLogger(__name__)


@click.command()
@click.argument("spec_file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--endpoint", "endpoints", envvar=ENDPOINT_VARIABLE, required=True)
@click.option("--listen", required=True)
@click.option("--advertise-host", required=True)
@click.option("--servers-end", is_flag=True)
@click.option("--run", default="")
@click.option("--insecure", is_flag=True)
def main(
    spec_file: Path,
    endpoints: str,
    listen: str,
    advertise_host: str,
    servers_end: bool,
    run: str,
    insecure: bool,
) -> None:
    """Run the job master of the job in SPEC_FILE, and its launcher, until the job is over."""
    with exit_on_error(ExitCode.FAILED, others={NotJobMaster: ExitCode.REPLACED}):
        spec = JobSpec.from_json(spec_file.read_text(encoding="utf-8"))
        set_up_logging("info", "text", f"job master of {spec.name}")
        api = KubernetesApi.in_pod(os.environ.get(NAMESPACE_VARIABLE, ""))
        objects = _find(api, spec.name)
        over = asyncio.run(_repeat(objects.read)).over
        if over:
            log.info("the job is over already: %s", over)
        else:

            def configure() -> MasterConfig:
                return MasterConfig(
                    endpoints=tuple(parse_endpoints(endpoints)),
                    client=ClientConfig.load(),
                    listen_control=listen,
                    advertise_host=advertise_host,
                    servers_end=servers_end,
                    run=run,
                    owner=objects.owner.uid,
                    insecure=insecure,
                )

            over = _serve(configure, spec, api, objects)
            if over == "running":
                return
    # Servers of a job that is not saved have the only copy of its rows.
    _leave(objects, servers_end=servers_end and over != "unsaved")


def _find(api: KubernetesApi, job: str) -> OwnedJob:
    """Return the objects of the job; wait for an API that is away."""
    return asyncio.run(_repeat(lambda: OwnedJob.find(api, job)))


def _serve(
    configure: Callable[[], MasterConfig], spec: JobSpec, api: KubernetesApi, objects: OwnedJob
) -> str:
    """Serve the job; return how it ended, ``running`` if this process was told to end before."""
    try:
        config = configure()
        # Signals are not handled yet, so a signal ends this wait at once.
        servers = _own_servers(config, spec, api, objects) if config.servers_end else None
        _reach(config, servers)
        return asyncio.run(_run(config, spec, objects, servers))
    except FINAL_ERRORS as error:
        if asyncio.run(_repeat(objects.read)).status is not None:
            # The job has begun: another process may serve it, and this setting can be mended.
            raise
        log.error("%s", error)
        end = {"over": "failed", "reason": str(error)}
        asyncio.run(_repeat(lambda: objects.publish(end)))
        return "failed"


def _reach(config: MasterConfig, servers: ServerScale | None) -> None:
    """Wait until a server has answered: one of the job's own for as long as it has no room.

    Servers of the job's own that are on lost nodes make room for others meanwhile.

    Raises:
        NeverReached: None of a cluster that runs has.
    """
    while True:
        try:
            return reach(config.endpoints, config.client)
        except NeverReached as error:
            if servers is None:
                raise
            log.warning("%s", error)
            try:
                servers.look()
            except KubernetesError as failure:
                log.warning("%s", failure)


async def _run(
    config: MasterConfig, spec: JobSpec, objects: OwnedJob, servers: ServerScale | None
) -> str:
    host = MasterHost(
        config,
        spec,
        end_record=PublishedEnd(objects, spec, config),
        exits=ExitsSeen(objects.events.note_exit),
    )
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, host.stop)
    counts = NO_SERVERS if servers is None else spec.servers.counts(len(config.endpoints))
    policy = ScalingPolicy.of(spec.autoscale, spec.workers, counts)
    events = objects.events
    scale = JobScale(host, policy, servers, events.note)
    background = [
        asyncio.create_task(_publish(objects, host)),
        asyncio.create_task(_keep_numbers(servers, scale, host)),
        asyncio.create_task(events.run()),
    ]
    try:
        return await host.run()
    finally:
        await end_tasks(*background)
        await asyncio.to_thread(events.write_rest)


class PublishedEnd:
    """The published status as the record that the job is over."""

    def __init__(self, objects: OwnedJob, spec: JobSpec, config: MasterConfig) -> None:
        """Prepare."""
        self._objects = objects
        self._spec = spec
        self._config = config

    async def read(self) -> RunState | None:
        """Return how the job has ended: an earlier job master may have led until now."""
        over = (await _repeat(self._objects.read)).over
        return next((one for one in RUN_STATES if one == over), None)

    async def write(
        self, end: RunState, reason: str, status: job_pb2.JobStatus | None, exits: ExitsSeen
    ) -> None:
        """Write the end, and how the job went if it was open."""
        data = {} if status is None else status_data(status, exits)
        if self._spec.audit and status is not None and end != "stopped":
            # Servers of the job's own are gone after this.
            data["audit"] = await asyncio.to_thread(_audit, self._config, self._spec.name)
        data |= {"over": end, "reason": reason}
        await _repeat(lambda: self._objects.publish(data))
        text = f"the job is {end}" + (f": {reason}" if reason else "")
        log.info("%s", text)
        is_bad = end in ("failed", "unsaved")
        self._objects.events.note(f"Job{end.capitalize()}", text, is_warning=is_bad, once=text)


def _own_servers(
    config: MasterConfig, spec: JobSpec, api: KubernetesApi, objects: OwnedJob
) -> ServerScale:
    follows_load = spec.autoscale is not None and spec.autoscale.servers == "load"
    return ServerScale(
        api,
        spec.name,
        config.endpoints,
        config.client,
        objects,
        follows_load=follows_load,
        cores=cores_of_server(spec),
    )


async def _keep_numbers(servers: ServerScale | None, scale: JobScale, host: MasterHost) -> None:
    """Have as many servers as their plans ask for, and workers as the rules say; never returns."""
    said: dict[str, str] = {}
    while True:
        await asyncio.sleep(PLAN_PAUSE_S)
        if servers is not None:
            follow = asyncio.to_thread(servers.follow)
            await _try("the resize of the servers is not carried out", follow, said, host)
        look = scale.look()
        await _try("the numbers of workers and servers cannot be changed", look, said, host)


async def _try(what: str, call: Awaitable[None], said: dict[str, str], host: MasterHost) -> None:
    """Await a call that may fail for a while; say each new reason, and show a missing right."""
    forbidden = ""
    try:
        await call
    except Exception as error:
        if isinstance(error, KubernetesError) and refusal_of(error) is Refusal.FORBIDDEN:
            forbidden = f"{what}: {why_refused(error)}"
        if not isinstance(error, BackstayError):
            # A fault of ours must not end what keeps the numbers, either.
            log.exception("%s", what)
        if str(error) != said.get(what):
            said[what] = str(error)
            log.warning("%s: %s", what, error)
    _tell(host, what, forbidden)


def _audit(config: MasterConfig, job: str) -> str:
    """Return what the counters of records say, as JSON; empty: they say nothing."""
    try:
        return json.dumps(audit_mapping(audit_job(job, config.endpoints, config.client)))
    except BackstayError as error:
        log.error("the records are not counted: %s", error)
        return ""


async def _publish(objects: OwnedJob, host: MasterHost) -> None:
    """Write how the job goes whenever it has changed, until a later word is there."""
    told: dict[str, str] = {}
    said = ""
    while True:
        await asyncio.sleep(PUBLISH_S)
        status = host.status()
        if status is None:
            continue
        # The time of day would be a change each time.
        status.now_ms = 0
        data = status_data(status, host.exits)
        if data == told:
            continue
        try:
            if not await asyncio.to_thread(objects.publish, data):
                return
        except KubernetesError as error:
            if str(error) != said:
                said = str(error)
                log.warning("the status is not written: %s", error)
                _tell(host, "status", f"the status is not written: {why_refused(error)}")
        else:
            told, said = data, ""
            _tell(host, "status", "")


def _tell(host: MasterHost, what: str, trouble: str) -> None:
    """Show people what is wrong with something; empty: nothing any more."""
    if host.job is not None:
        host.job.note_trouble(what, trouble)


def _leave(objects: OwnedJob, *, servers_end: bool) -> None:
    """Scale the Deployment to 0, and wait for the signal that this brings."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    with exit_on_error(ExitCode.FAILED):
        asyncio.run(_end_objects(objects, servers_end=servers_end))
    signal.sigtimedwait({signal.SIGTERM, signal.SIGINT}, END_LIMIT_S)


async def _end_objects(objects: OwnedJob, *, servers_end: bool) -> None:
    # The launcher has done so, unless the job ended before it could be opened.
    await _repeat(objects.delete_workers)
    if servers_end:
        await _repeat(objects.end_servers)
    await _repeat(objects.scale_to_zero)


async def _repeat(call: Callable[[], ResultT]) -> ResultT:
    """Make a call of the API until it succeeds, a limited number of times.

    Raises:
        KubernetesError: It never did.
    """
    forbidden = 0
    for _ in range(TRIES_MAX):
        try:
            return await asyncio.to_thread(call)
        except KubernetesError as error:
            if error.status == NOT_FOUND:
                raise
            log.warning("%s", error)
            failure = error
            forbidden = forbidden + 1 if refusal_of(error) is Refusal.FORBIDDEN else 0
            if forbidden == FORBIDDEN_TRIES_MAX:
                break
            await asyncio.sleep(RETRY_S)
    raise KubernetesError(why_refused(failure), status=failure.status, reason=failure.reason)


if __name__ == "__main__":
    main()
