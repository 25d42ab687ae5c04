"""Which Pods servers of the job's own have: as many as a resize asks for, none on a lost node.

``wanted_replicas`` and ``lost_pods`` decide from values. ``ServerScale`` asks the servers, and
changes the scale of the StatefulSet. A leaving Pod is told to end when it holds nothing. It also
tells how the servers do, for ``job_scale``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from backstay.config import ClientConfig
from backstay.consensus.records.plans import ResizePlan
from backstay.errors import BackstayError
from backstay.kubernetes.api import KubernetesApi
from backstay.kubernetes.names import PSERVER, pserver_name, selector_of
from backstay.kubernetes.owned_job import OwnedJob
from backstay.kubernetes.pod_exit import has_no_room, is_on_lost_node, why_not_running
from backstay.kubernetes.published_status import GrownServers
from backstay.pserver.client.inspection import ClusterInspection
from backstay.pserver.resizing import ClusterResizing

__all__ = ["ServerScale", "ServersSeen", "cpu_share", "lost_pods", "wanted_replicas"]

SCALE = "statefulsets/scale"
LOOK_PAUSE_S = 10.0
# While not all servers serve.
LOOK_PAUSE_SHORT_S = 4.0
# If no server has answered for so long, none still runs on a node that Kubernetes has given up.
SILENT_S = 60.0

log = logging.getLogger(__name__)


def wanted_replicas(
    plan: ResizePlan | None,
    name: str,
    replicas: int,
    *,
    before: int | None = None,
    idle: Collection[str] = (),
) -> int:
    """Return how many Pods a StatefulSet is to have.

    Args:
        plan: The last plan of the servers; None: nothing was ever planned.
        name: Of the StatefulSet.
        replicas: How many it has.
        before: How many it had before it grew for this plan, or in vain for an earlier one; None:
            it did not.
        idle: Pods that do not run, so they hold nothing.
    """
    # At 0 the job is over.
    if plan is None or replicas == 0:
        return replicas
    if before is not None:
        # Nothing waits any more for those that found no room.
        replicas = _without_idle(name, replicas, max(before, _needed(plan)), idle)
    if plan.kind != "resize":
        return replicas
    if plan.state == "waiting_for_nodes":
        return max(replicas, plan.nodes)
    if plan.state == "done":
        empty = {one.node_id for one in plan.leaving}
        # A StatefulSet ends the Pods with the highest numbers; none of them may hold rows.
        while replicas > plan.nodes and f"{name}-{replicas - 1}" in empty:
            replicas -= 1
    return replicas


def _needed(plan: ResizePlan) -> int:
    """Return how many Pods a plan counts on."""
    if plan.kind != "resize":
        return plan.nodes + len(plan.leaving)
    return 0 if plan.state in ("cancelled", "failed") else plan.nodes


def _without_idle(name: str, replicas: int, least: int, idle: Collection[str]) -> int:
    """Return how many Pods are left without the last ones that are idle; no less than ``least``."""
    while replicas > least and f"{name}-{replicas - 1}" in idle:
        replicas -= 1
    return replicas


def lost_pods(pods: Iterable[Mapping[str, Any]], serving: Collection[str]) -> list[str]:
    """Return the Pods to delete at once, so that the StatefulSet makes others of their names.

    A StatefulSet waits until the node of a Pod says that it has ended, which a lost node never
    does. A process that still serves there is left alone.

    Args:
        pods: Of the servers, as the API gives them.
        serving: The nodes that serve.
    """
    names = (one["metadata"]["name"] for one in pods if is_on_lost_node(one))
    return sorted(name for name in names if name not in serving)


class ServersSeen(NamedTuple):
    """How a job's own servers do.

    Attributes:
        wanted: How many Pods they have.
        serving: How many serve.
        waits: What each Pod that does not serve waits for, by name.
        no_room: How many of these wait for room.
        is_planning: Whether they carry out a plan.
        memory_share: Share of their memory for rows that the rows take; None: not known.
        cpu_share: Share of their CPU that they use; None: not known.
    """

    wanted: int = 0
    serving: int = 0
    waits: Mapping[str, str] = MappingProxyType({})
    no_room: int = 0
    is_planning: bool = False
    memory_share: float | None = None
    cpu_share: float | None = None

    @property
    def are_all_away(self) -> bool:
        """Whether each has a Pod, and none of these runs."""
        return 0 < self.wanted == len(self.waits) and all(self.waits.values())


class CpuUse(NamedTuple):
    """What a server's process used since it began, and when that was read."""

    instance: int
    cpu_s: float
    read_s: float


def cpu_share(
    before: Mapping[str, CpuUse], now: Mapping[str, CpuUse], cores: float
) -> float | None:
    """Return which share of their CPU servers use; None: no two readings of one process.

    Args:
        before: By node.
        now: The same later.
        cores: What each of them may use; 0: not known.
    """
    used = [
        (one.cpu_s - before[name].cpu_s) / (one.read_s - before[name].read_s)
        for name, one in now.items()
        if name in before
        and before[name].instance == one.instance
        and one.read_s > before[name].read_s
    ]
    return sum(used) / len(used) / cores if used and cores else None


class ServerScale:
    """Follows the plans of a job's own servers; not thread-safe."""

    def __init__(
        self,
        api: KubernetesApi,
        job: str,
        endpoints: Sequence[str],
        config: ClientConfig,
        objects: OwnedJob,
        *,
        follows_load: bool = False,
        cores: float = 0.0,
    ) -> None:
        """Prepare.

        Args:
            api: The namespace of the job.
            job: Its name.
            endpoints: Control addresses of its servers.
            config: Deadlines, token and certificates.
            objects: Those of the job, which tell the next job master of a growth.
            follows_load: Whether to read their memory and CPU.
            cores: CPU that each may use; 0: not known.
        """
        self._api = api
        self._job = job
        self._name = pserver_name(job)
        self._endpoints = tuple(endpoints)
        self._config = config
        self._objects = objects
        self._follows_load = follows_load
        self._cores = cores
        # What was done already, so that a plan costs few calls of the API.
        self._followed: tuple[str, str] | None = None
        self._replicas: int | None = None
        self._silent_since_s: float | None = None
        self._is_planning = False
        self._next_look_s = 0.0
        # Nodes that served, and have a Pod.
        self._served: set[str] = set()
        self._cpu: dict[str, CpuUse] = {}
        self._seen = ServersSeen()

    def look(self) -> ServersSeen:
        """Return how the servers do, as a look every few seconds shows. Blocks."""
        if time.monotonic() < self._next_look_s:
            return self._seen._replace(is_planning=self._is_planning)
        if self._replicas is None:
            self._replicas = _replicas_of(self._read_scale())
        serving: set[str] = set()
        answered = True
        shares: tuple[float | None, float | None] = (None, None)
        try:
            with ClusterInspection(",".join(self._endpoints), self._config) as inspection:
                _, routing = inspection.cluster()
                serving = {one.node_id for one in routing.nodes if one.status == "serving"}
                if self._follows_load:
                    shares = self._shares(inspection.status()["nodes"])
        except BackstayError as error:
            # Too few have come for the first routing, or none answers.
            log.debug("%s", error)
            answered = False
        self._note_answer(answered=answered)
        self._served |= serving
        waiting: list[Mapping[str, Any]] = []
        if len(serving) < self._replicas or self._served != serving:
            pods = self._pods()
            if answered or self._are_silent():
                self._remove_lost(pods, serving)
            waiting = [
                one
                for one in pods
                if one["metadata"]["name"] not in serving
                and "deletionTimestamp" not in one["metadata"]
            ]
        waits = {one["metadata"]["name"]: why_not_running(one, PSERVER) for one in waiting}
        no_room = sum(map(has_no_room, waiting))
        self._seen = ServersSeen(
            self._replicas, len(serving), waits, no_room, self._is_planning, *shares
        )
        pause_s = LOOK_PAUSE_SHORT_S if len(serving) < self._replicas else LOOK_PAUSE_S
        self._next_look_s = time.monotonic() + pause_s
        return self._seen

    def resize(self, servers: int) -> None:
        """Ask for another number of servers; the plan that is made is followed. Blocks.

        Raises:
            BackstayError: The servers refuse it, or none answers.
        """
        with ClusterResizing(self._endpoints, self._config) as resizing:
            resizing.resize(servers)
        self._is_planning = True

    def follow(self) -> None:
        """Have as many Pods as the plan of the servers asks for. Blocks.

        Raises:
            BackstayError: No server answers.
        """
        with ClusterResizing(self._endpoints, self._config) as resizing:
            plan = resizing.plan()
        self._is_planning = plan is not None and plan.is_under_way
        if plan is None or (plan.plan_id, plan.state) == self._followed:
            return
        found = self._read_scale()
        replicas = _replicas_of(found)
        grown = self._objects.read().grown
        before, idle = self._before_growth(plan, grown, replicas)
        wanted = wanted_replicas(plan, self._name, replicas, before=before, idle=idle)
        is_resizing = plan.kind == "resize" and plan.is_under_way
        if is_resizing and (wanted > replicas or before is not None):
            # Comes first: if this process dies after the growth, the next one can undo it.
            noted = GrownServers(plan.plan_id, replicas if before is None else before)
            self._objects.note_growth(noted)
        if wanted != replicas:
            self._scale(found, replicas, wanted, plan)
        if grown is not None and not is_resizing:
            # A Pod that comes back later is none that came in vain.
            self._objects.forget_growth(grown)
        self._replicas = wanted
        self._followed = (plan.plan_id, plan.state)

    def _before_growth(
        self, plan: ResizePlan, grown: GrownServers | None, replicas: int
    ) -> tuple[int | None, set[str]]:
        """Return how many Pods there were before a growth that is not undone, and the idle ones.

        A plan may have been given up, and another one made, before this process saw that. Pods of
        the first one that run by now have not come in vain.
        """
        if grown is None:
            return None, set()
        idle = self._idle() if replicas > grown.before else set()
        if grown.plan_id == plan.plan_id:
            return grown.before, idle
        return _without_idle(self._name, replicas, grown.before, idle), idle

    def _scale(
        self, found: Mapping[str, Any], replicas: int, wanted: int, plan: ResizePlan
    ) -> None:
        """Have another number of Pods."""
        log.info("%s: %d servers wanted, %d before", self._name, wanted, replicas)
        change = {"metadata": {"uid": found["metadata"]["uid"]}, "spec": {"replicas": wanted}}
        self._api.patch(SCALE, self._name, change)
        why = "a resize has emptied the others" if plan.state == "done" else "a resize was given up"
        if wanted > replicas:
            why = "a resize waits for more"
        told = f"{wanted} servers wanted, {replicas} before: {why}"
        self._objects.events.note("ServersScaled", told)

    def _idle(self) -> set[str]:
        return {one["metadata"]["name"] for one in self._pods() if why_not_running(one, PSERVER)}

    def _note_answer(self, *, answered: bool) -> None:
        if answered:
            self._silent_since_s = None
        elif self._silent_since_s is None:
            self._silent_since_s = time.monotonic()

    def _are_silent(self) -> bool:
        since_s = self._silent_since_s
        return since_s is not None and time.monotonic() - since_s >= SILENT_S

    def _read_scale(self) -> Mapping[str, Any]:
        return self._api.get(SCALE, self._name) or {}

    def _pods(self) -> list[Mapping[str, Any]]:
        return list(self._api.list_objects("pods", selector_of(self._job, PSERVER)).items)

    def _remove_lost(self, pods: Sequence[Mapping[str, Any]], serving: Collection[str]) -> None:
        uids = {one["metadata"]["name"]: one["metadata"]["uid"] for one in pods}
        self._served &= uids.keys()
        for name in lost_pods(pods, serving):
            log.warning("the node of Pod %s is lost: another Pod takes its place", name)
            self._api.delete("pods", name, at_once=True, uid=uids[name])
            told = f"the node of server {name} is lost: another Pod takes its place"
            self._objects.events.note("ServerLost", told, is_warning=True)

    def _shares(self, nodes: Sequence[Mapping[str, Any]]) -> tuple[float | None, float | None]:
        """Return the shares of memory and CPU that the servers use, as far as they are known."""
        told = [one for one in nodes if one["control"] is not None and one["stats"] is not None]
        now_s = time.monotonic()
        cpu = {
            one["node_id"]: CpuUse(one["instance"], one["control"].get("cpu_s", 0.0), now_s)
            for one in told
        }
        rows = sum(one["stats"]["row_bytes"] for one in told)
        limits = [one["control"]["memory_limit_bytes"] for one in told]
        processes = sum(one["stats"]["memory"]["process"] for one in told)
        room = max(sum(limits) - processes, 1)
        memory = rows / room if limits and all(limits) else None
        before, self._cpu = self._cpu, cpu
        return memory, cpu_share(before, cpu, self._cores)


def _replicas_of(scale: Mapping[str, Any]) -> int:
    """Return how many Pods a StatefulSet has; 0: there is none."""
    return int(scale.get("spec", {}).get("replicas", 0))
