"""The parameter servers of a job: some of its own on this machine, or those of a cluster that runs.

The command starts its own servers again when they die. They come back empty, and the other copies
fill them. At first they load the job's newest checkpoint, so that the same command goes on where an
earlier one was.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from backstay.checkpoint.catalogue import Entry, catalogue
from backstay.checkpoint.storage import CheckpointStorage
from backstay.cluster.directory import reach
from backstay.config import ENDPOINT_VARIABLE, ClientConfig, find_endpoints
from backstay.consensus.records.jobs import JOBS_PROGRESS
from backstay.errors import BackstayError, ConfigError, InvalidRequest, JobError
from backstay.job_spec import LOCAL_SERVERS, JobSpec
from backstay.pserver.client.inspection import ClusterInspection
from backstay.pserver.local_cluster import LocalCluster, LocalServer
from backstay.runner.last_status import FILE_NAME as STATUS_FILE_NAME
from backstay.runner.last_status import NewestCheckpoint, checkpoint_folder
from backstay.runner.show import Servers

__all__ = ["JobServers", "chosen_servers", "job_servers"]

RESTARTS_MAX = 20
LOOK_PAUSE_S = 0.25
# A whole cluster is asked, so not often.
COUNT_PAUSE_S = 5.0
REACH_PAUSE_S = 0.05
# In the log folder: the checkpoints that were there when the job was begun anew.
FRESH_MARK = "fresh-after"
JOIN_S = 10.0

log = logging.getLogger(__name__)


class JobServers:
    """The servers of a job, from ``with`` to its end; a thread looks at them.

    Attributes:
        endpoints: Control addresses, those first that there were at the beginning.
        config: Token, certificates and deadlines.
        are_own: Whether they are the job's own, and end with it.
        began_with: The checkpoint that servers of the job's own have begun with.
    """

    are_own: bool

    def __init__(
        self,
        endpoints: Sequence[str],
        config: ClientConfig,
        began_with: NewestCheckpoint | None = None,
    ) -> None:
        """Prepare."""
        self.endpoints = tuple(endpoints)
        self.config = config
        self.began_with = began_with
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="servers", daemon=True)

    def __enter__(self) -> JobServers:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join(JOIN_S)

    def count(self) -> Servers:
        """Return how many serve; answers at once."""
        raise NotImplementedError

    def _watch(self) -> None:
        raise NotImplementedError


class ServerChoice(NamedTuple):
    """Which servers a job is to have.

    Attributes:
        local: So many of its own, or 0.
        endpoints: Those of a cluster that runs.
        source: What says so, for people.
    """

    local: int
    endpoints: tuple[str, ...]
    source: str


def chosen_servers(spec: JobSpec, environment: Mapping[str, str]) -> ServerChoice:
    """Return the servers that the spec names, else the environment, else some of its own."""
    if spec.servers.local:
        return ServerChoice(spec.servers.local, (), "the job")
    # The spec has the endpoints of the command line by now, or else those of the job file. Paddle's
    # variable does not count: other programs set it too, and a job that can start its own servers
    # must not use a cluster by accident.
    found = find_endpoints(environment, file=spec.servers.endpoints, variables=(ENDPOINT_VARIABLE,))
    if found is None:
        return ServerChoice(LOCAL_SERVERS, (), "default")
    return ServerChoice(0, found.endpoints, found.variable or "the job")


@contextmanager
def job_servers(
    spec: JobSpec, client: ClientConfig, *, stopped: Callable[[float], bool], fresh: bool = False
) -> Iterator[JobServers]:
    """Have the servers of a job, from ``with`` to its end.

    Args:
        spec: The job.
        client: Token, certificates and deadlines, for servers that were there before.
        stopped: Waits for so many seconds; returns whether the job is to stop.
        fresh: Begin with empty servers, whatever checkpoints there are.

    Raises:
        ConfigError: A setting is wrong.
        NeverReached: No server answers at the addresses.
        ServerStartError: A server did not start.
        JobError: There is no checkpoint with the model that is to be evaluated.
    """
    chosen = chosen_servers(spec, os.environ)
    if not chosen.local:
        _reach(chosen.endpoints, client, stopped)
        with _OtherServers(chosen.endpoints, client) as others:
            yield others
        return
    log_dir = Path(spec.log_dir)
    # Without a checkpoint there would be no model to evaluate or predict with.
    fresh = fresh and spec.kind == "training"
    url = _folder(spec, fresh=fresh)
    settings: dict[str, Any] = {"replicas": min(spec.servers.replicas, chosen.local)}
    restore = _restore(spec, url, fresh=fresh)
    # Saves of the job hold model and progress together; those by time would hold no progress.
    settings |= {"checkpoint_url": url, "restore": restore, "checkpoint_every_s": 0}
    settings |= spec.servers.settings
    # Records of servers that ran before name addresses that are gone.
    directory = log_dir / "servers" / time.strftime("%Y%m%d-%H%M%S")
    cluster = LocalCluster(chosen.local, directory=directory, settings=settings)
    with (
        cluster,
        cluster.following_plans(),
        _OwnServers(cluster, NewestCheckpoint(restore, url) if restore != "no" else None) as own,
    ):
        yield own


def _reach(
    endpoints: tuple[str, ...], client: ClientConfig, stopped: Callable[[float], bool]
) -> None:
    """Wait until a server has answered once: after that, it is waited for as long as it takes.

    Raises:
        NeverReached: None did.
        JobError: The job is to stop.
    """
    reached: Future[None] = Future()

    def ask() -> None:
        try:
            reach(endpoints, client)
        except Exception as error:  # noqa: BLE001 (raised again by the thread that waits)
            reached.set_exception(error)
        else:
            reached.set_result(None)

    # A thread, so that a call which waits for its deadline does not hold up the end.
    threading.Thread(target=ask, name="first contact", daemon=True).start()
    while not reached.done():
        if stopped(REACH_PAUSE_S):
            raise JobError("stopped before a server had answered")
    reached.result()


def _folder(spec: JobSpec, *, fresh: bool) -> str:
    """Return where the checkpoints of a job's own servers are, and go.

    Raises:
        JobError: The job's newest checkpoint was in another folder, and is gone.
    """
    log_dir = Path(spec.log_dir)
    url = spec.checkpoint.url or str(log_dir / "checkpoints")
    # An evaluation or a prediction has its own log folder, beside that of the training.
    other_use = "" if spec.kind == "training" else f"-{spec.kind}"
    trained = log_dir.with_name(log_dir.name.removesuffix(other_use))
    try:
        last = JobSpec.from_json((trained / "job.json").read_text(encoding="utf-8"))
    except (OSError, InvalidRequest, ConfigError):
        return url
    # A user who names another folder than the last time means it.
    if fresh or url != (last.checkpoint.url or str(trained / "checkpoints")):
        return url
    place = checkpoint_folder(trained, url)
    if place != url:
        log.warning("the newest checkpoint of the job is in %s, not in %s", place, url)
        log.warning("the servers begin with it, and write the next ones there")
    return place


def _restore(spec: JobSpec, url: str, *, fresh: bool) -> str:
    """Return what the servers begin with: ``no``, or the id of a checkpoint.

    Raises:
        ConfigError: The folder cannot be made, or belongs to another job.
        JobError: The newest checkpoint is damaged, or there is none of a model to work with.
    """
    if "://" not in url:
        try:
            Path(url).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            name = "checkpoint.url" if spec.checkpoint.url else "log_dir"
            raise ConfigError(f"{name}: {url} cannot be made: {error.strerror}") from error
    newest = catalogue(CheckpointStorage(url))[-1:]
    if newest and spec.kind == "training":
        _check_owner(spec, url, newest[0])
    if fresh:
        return "no"
    mark = Path(spec.log_dir) / FRESH_MARK
    if newest and spec.kind == "training" and newest[0].id in _forgotten(mark):
        log.warning(
            "the job was begun anew after %s and has written no checkpoint since", newest[0].id
        )
        log.warning("it begins anew; remove %s to go on from %s", mark, newest[0].id)
        return "no"
    if newest and newest[0].problem:
        # What was trained since an older one would be lost without a word.
        raise JobError(
            f"the newest checkpoint in {url}, {newest[0].id}, is damaged: {newest[0].problem}. "
            "Bring it back, or remove its folder to go on from the one before it; `backstay train "
            "--fresh` begins without any"
        )
    if spec.kind != "training" and not newest:
        raise JobError(
            f"there is no checkpoint of a trained model in {url}; train it first, or set "
            "checkpoint.url to the folder of its checkpoints"
        )
    return newest[0].id if newest else "no"


def _forgotten(mark: Path) -> list[str]:
    """Return the checkpoints that were there when the job was begun anew.

    Raises:
        ConfigError: The mark is there and cannot be read.
    """
    try:
        return mark.read_text(encoding="utf-8").split()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigError(f"log_dir: cannot read {mark}: {error.strerror}") from error


def forget_checkpoints(spec: JobSpec) -> None:
    """Note which checkpoints a job leaves behind as it begins anew.

    A later run continues only from a checkpoint that is not among them. None is deleted: they
    belong to the user.

    Raises:
        ConfigError: The log folder cannot be written.
        CheckpointUnavailable: The checkpoints cannot be listed.
    """
    log_dir = Path(spec.log_dir)
    url = _folder(spec, fresh=True)
    mark = log_dir / FRESH_MARK
    part = mark.with_suffix(".part")
    try:
        with part.open("w", encoding="utf-8") as file:
            file.writelines(f"{one}\n" for one in CheckpointStorage(url).ids())
            file.flush()
            os.fsync(file.fileno())
        part.replace(mark)
        # The last status may name a checkpoint in another folder.
        (log_dir / STATUS_FILE_NAME).unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"log_dir: cannot write {mark}: {error.strerror}") from error


def _check_owner(spec: JobSpec, url: str, newest: Entry) -> None:
    """Refuse a folder in which another job keeps its checkpoints.

    Two jobs in one folder would train each other's rows, and delete each other's progress with
    the checkpoints that are too old.

    Raises:
        ConfigError: The newest checkpoint there holds the progress of other jobs only.
    """
    progress = {} if newest.manifest is None else newest.manifest.progress
    owners = sorted(progress.get(JOBS_PROGRESS, {}).get("jobs", {}))
    if owners and spec.name not in owners:
        raise ConfigError(
            f"checkpoint.url: the newest checkpoint in {url}, {newest.id}, is of job "
            f"{', '.join(owners)}, not of {spec.name}: name a folder that no other job has"
        )


def accept_loss(endpoints: Sequence[str], config: ClientConfig) -> str:
    """Let slots of a cluster begin anew that are lost for good, for a job that begins from nothing.

    Where the cluster has a checkpoint, that is its operators' choice: nothing is done.

    Returns:
        What was done, for people; empty if nothing was.

    Raises:
        ServerUnavailable: No node answers, or none reaches the store.
    """
    with ClusterInspection(",".join(endpoints), config) as inspection:
        report = inspection.status()
        if not report["slots_lost"] or report["checkpoint"] is not None:
            return ""
        slots = inspection.accept_loss(report["routing_version"])
    return (
        f"{slots} slots had lost all copies, and there is no checkpoint: they begin anew, empty "
        "(--fresh)"
    )


class _OwnServers(JobServers):
    """Servers of this machine; those that died are started again."""

    are_own = True

    def __init__(self, cluster: LocalCluster, began_with: NewestCheckpoint | None) -> None:
        super().__init__(cluster.endpoints, cluster.client_config(), began_with)
        self._cluster = cluster
        self._restarts = 0

    def count(self) -> Servers:
        """Return how many run."""
        servers = list(self._cluster.servers)
        return Servers(sum(one.is_running for one in servers), len(servers))

    def _watch(self) -> None:
        while not self._stopping.wait(LOOK_PAUSE_S):
            # One that ended by itself with 0 was let go by a resize.
            dead = [one for one in self._cluster.servers if one.process.poll() not in (None, 0)]
            if dead and self._restarts >= RESTARTS_MAX:
                log.error("%s ended, and has been restarted too often", dead[0].node_id)
                return
            if dead:
                self._restart(dead)

    def _restart(self, dead: list[LocalServer]) -> None:
        self._restarts += len(dead)
        names = ", ".join(one.node_id for one in dead)
        log.warning("%s ended and is restarted, empty", names)
        indexes = [self._cluster.servers.index(one) for one in dead]
        for one in dead:
            one.line.close()
        try:
            self._cluster.restart(*indexes)
        except BackstayError as error:
            log.warning("%s did not start again: %s", names, error)


class _OtherServers(JobServers):
    """Servers that were there before; they are asked now and then how many serve."""

    are_own = False

    def __init__(self, endpoints: tuple[str, ...], config: ClientConfig) -> None:
        super().__init__(endpoints, config)
        self._count = Servers()

    def count(self) -> Servers:
        """Return what the last answer said."""
        return self._count

    def _watch(self) -> None:
        with ClusterInspection(",".join(self.endpoints), self.config) as inspection:
            while True:
                try:
                    nodes = inspection.status()["nodes"]
                except BackstayError as error:
                    log.debug("the servers cannot be counted: %s", error)
                    self._count = Servers()
                else:
                    serving = sum(node["status"] == "serving" for node in nodes)
                    self._count = Servers(serving, len(nodes))
                if self._stopping.wait(COUNT_PAUSE_S):
                    return
