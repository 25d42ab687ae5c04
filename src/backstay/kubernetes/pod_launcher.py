"""Workers as Pods: the launcher that runs in the job master's own Pod.

Two threads join ``WorkerPods``, which decides, to ``KubernetesApi``: one watches the Pods, the
other makes the calls that are due. Pods outlive this process. The next job master adopts them.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Collection
from typing import ClassVar

from backstay.backoff import Backoff
from backstay.errors import ConfigError, KubernetesError
from backstay.job_engine.launch import LauncherReport
from backstay.kubernetes.api import KubernetesApi, PodWatch
from backstay.kubernetes.names import object_name, worker_selector
from backstay.kubernetes.objects import NAMESPACE_VARIABLE, Owner, worker_pod
from backstay.kubernetes.pod_memory import (
    MoreMemory,
    memory_limit,
    quantity_bytes,
    with_memory,
)
from backstay.kubernetes.pod_template import files_of, section
from backstay.kubernetes.refusals import (
    Refusal,
    memory_allowed,
    refusal_of,
    why_refused,
)
from backstay.kubernetes.worker_pods import Forbidden, WorkerPods
from backstay.master.launcher import WorkerProgram

__all__ = ["PodLauncher"]

# Between two tries to list or to watch; doubled each time, up to the last.
RETRY = Backoff(first_s=0.5, longest_s=10.0)
# A watch that ended sooner is followed by a pause.
WATCH_SHORT_S = 1.0
# How long the end of a job waits until the Pods that are left have been told to end.
CLOSE_S = 10.0
# A thread that waits for an answer of the API ends by itself, after the time limit of its call.
JOIN_S = 1.0
TOO_OLD = 410

log = logging.getLogger(__name__)


class PodLauncher:
    """Runs the workers of a job as Pods; see ``Launcher`` for the calls."""

    IN_JOB_MASTER: ClassVar[bool] = True

    def __init__(self, program: WorkerProgram, api: KubernetesApi) -> None:
        """Start the threads.

        Args:
            program: What a worker runs.
            api: The namespace of the job.

        Raises:
            ConfigError: The job has no section ``kubernetes``.
        """
        self._program = program
        self._api = api
        self._owner: Owner | None = None
        self._files = ""
        kubernetes = section(program.spec)
        more_memory = MoreMemory.of(kubernetes.more_memory)
        self._pods = WorkerPods(kubernetes.worker.priority_class, more_memory)
        self._watch_trouble = ""
        self._watching: PodWatch | None = None
        self._stopping = threading.Event()
        # Guards what is above, between the two threads and the caller's.
        self._changed = threading.Condition()
        self._threads = [
            threading.Thread(target=self._watch, name="watch of Pods", daemon=True),
            threading.Thread(target=self._act, name="calls for Pods", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @classmethod
    def for_job(cls, program: WorkerProgram) -> PodLauncher:
        """Return the launcher of a job whose job master is this Pod.

        Raises:
            ConfigError: This is not the job master's Pod.
        """
        namespace = os.environ.get(NAMESPACE_VARIABLE, "")
        if not namespace:
            raise ConfigError(
                "launcher: kubernetes runs in the job master's Pod; --on kubernetes makes it"
            )
        return cls(program, KubernetesApi.in_pod(namespace))

    def reconcile(self, wanted: Collection[str]) -> None:
        """Want these workers; the calls follow."""
        with self._changed:
            self._pods.wish(wanted, time.monotonic())
            self._changed.notify_all()

    def report(self) -> LauncherReport:
        """Return which workers have a Pod that has not ended, and the exits."""
        with self._changed:
            return self._pods.report()

    def acknowledge(self, worker_ids: Collection[str]) -> None:
        """Forget these exits; the Pods go."""
        with self._changed:
            self._pods.acknowledge(worker_ids)
            self._changed.notify_all()

    def trouble(self) -> str:
        """Return why not all workers run."""
        with self._changed:
            return "; ".join(
                filter(None, [self._watch_trouble, self._pods.trouble(time.monotonic())])
            )

    def close(self) -> None:
        """Let go: Pods of workers that are wanted go on, the others were told to end."""
        with self._changed:
            self._changed.wait_for(lambda: not self._pods.is_deleting_all(), CLOSE_S)
            self._stopping.set()
            watching = self._watching
            self._changed.notify_all()
        if watching is not None:
            watching.close()
        for thread in self._threads:
            thread.join(JOIN_S)
        self._api.close()

    # The thread that watches.

    def _watch(self) -> None:
        """Follow the Pods until ``close``."""
        version = ""
        retries = RETRY.begin()
        while not self._stopping.is_set():
            begun_s = time.monotonic()
            try:
                owner = self._find_owner()
                if not version:
                    version = self._list(owner)
                version = self._follow(owner, version)
                is_short = time.monotonic() - begun_s < WATCH_SHORT_S
                if not is_short:
                    retries.reset()
            except KubernetesError as error:
                if error.status:
                    # Also a version that the API does not know: a list tells all.
                    version = ""
                is_short = True
                if error.status == TOO_OLD:
                    log.info("the watch of Pods is too old: %s", error)
                    is_short = time.monotonic() - begun_s < WATCH_SHORT_S
                elif refusal_of(error) is Refusal.FORBIDDEN:
                    self._note_trouble("")
                    self._note_forbidden(Forbidden.SEE, error)
                else:
                    self._note_trouble(str(error))
            except Exception as error:
                # Without this thread nothing would be known of any Pod any more.
                log.exception("what Kubernetes tells of the Pods is not understood")
                version, is_short = "", True
                self._note_trouble(f"{type(error).__name__}: {error}")
            if is_short:
                self._stopping.wait(retries.next_s())

    def _find_owner(self) -> Owner:
        """Return the Deployment of this job master; it owns the Pods."""
        if self._owner is not None:
            return self._owner
        name = object_name(self._program.spec.name)
        found = self._api.get("deployments", name)
        # A Deployment of this name with another uid belongs to another job.
        if found is None or self._program.owner not in ("", found["metadata"]["uid"]):
            raise KubernetesError(
                f"Kubernetes: the Deployment {name} of this job is gone; no worker is started"
            )
        with self._changed:
            self._owner = Owner(name, found["metadata"]["uid"])
            self._files = files_of(found["spec"]["template"])
        return self._owner

    def _list(self, owner: Owner) -> str:
        with self._changed:
            self._pods.list_begins()
        listed = self._api.list_objects("pods", worker_selector(owner.uid))
        with self._changed:
            self._pods.listed(listed.items, time.monotonic())
            self._changed.notify_all()
        self._note_trouble("")
        return listed.version

    def _follow(self, owner: Owner, version: str) -> str:
        """Take in what a watch tells until it ends; return the version to go on from.

        After a watch that broke, too, that is the last one that was seen.
        """
        watch = self._api.watch_pods(worker_selector(owner.uid), version)
        with self._changed:
            self._watching = watch
            if self._stopping.is_set():
                watch.close()
        self._note_trouble("")
        try:
            for event in watch:
                version = event.version
                with self._changed:
                    if event.kind == "DELETED":
                        self._pods.deleted(event.pod)
                    elif event.kind != "BOOKMARK":
                        self._pods.changed(event.pod, time.monotonic())
                    self._changed.notify_all()
        except KubernetesError as error:
            if error.status:
                raise
            log.info("%s", error)
        return version

    def _note_trouble(self, trouble: str) -> None:
        with self._changed:
            if trouble and trouble != self._watch_trouble:
                log.warning("%s", trouble)
            self._watch_trouble = trouble

    def _note_forbidden(self, what: Forbidden, error: KubernetesError) -> None:
        with self._changed:
            if not self._pods.is_forbidden(what):
                log.warning("%s: %s", what.value, error)
            self._pods.forbidden(what, why_refused(error), time.monotonic())
            self._changed.notify_all()

    # The thread that calls.

    def _act(self) -> None:
        """Make the calls that are due, until ``close``."""
        while True:
            with self._changed:
                plan = self._pods.plan(time.monotonic())
                while not (plan.create or plan.delete or self._stopping.is_set()):
                    next_s = self._pods.next_change_s()
                    self._changed.wait(
                        None if next_s is None else max(0.01, next_s - time.monotonic())
                    )
                    plan = self._pods.plan(time.monotonic())
                if self._stopping.is_set():
                    return
                owner = self._owner
            # Pods were listed, so the owner is known.
            assert owner is not None
            for worker_id, name in plan.delete:
                if not self._delete(worker_id, name):
                    break
            for worker_id, priority_class in plan.create:
                if not self._create(owner, worker_id, priority_class, plan.memory):
                    break

    def _create(self, owner: Owner, worker_id: str, priority_class: str, memory: int) -> bool:
        """Make a Pod; return whether to go on with calls."""
        program = self._program
        try:
            given = worker_pod(
                program.spec,
                worker_id,
                owner,
                command=program.arguments(worker_id),
                env=program.env,
                files=self._files,
                priority_class=priority_class,
            )
            pod = with_memory(given, memory)
        except Exception as error:
            # Without this thread no Pod would be made or deleted any more.
            log.exception("worker %s: its Pod cannot be described", worker_id)
            with self._changed:
                self._pods.refused(worker_id, f"{type(error).__name__}: {error}")
            return True
        try:
            made = self._api.create("pods", pod)
        except KubernetesError as error:
            if self._gets_less_memory(error, memory_limit(pod), memory_limit(given)):
                # The next plan makes it.
                return False
            return self._not_created(worker_id, error)
        log.info("worker %s is Pod %s", worker_id, made["metadata"]["name"])
        with self._changed:
            self._pods.created(worker_id, made, time.monotonic())
        return True

    def _gets_less_memory(self, error: KubernetesError, asked: int, given: int) -> bool:
        """Take in why a Pod was refused; return whether that is only its memory.

        Args:
            error: Why.
            asked: Bytes that it would have been allowed to use.
            given: Bytes that the job file says.
        """
        allowed = memory_allowed(error)
        if allowed is None or asked <= given:
            return False
        log.warning("%s", error)
        with self._changed:
            self._pods.memory_refused(asked, given, quantity_bytes(allowed), str(error))
        return True

    def _not_created(self, worker_id: str, error: KubernetesError) -> bool:
        """Take in why a Pod was not made; return whether to go on with calls."""
        refusal = refusal_of(error)
        if refusal is Refusal.FORBIDDEN:
            self._note_forbidden(Forbidden.MAKE, error)
            return False
        with self._changed:
            if error.reason == "AlreadyExists":
                self._pods.created(worker_id, None, time.monotonic())
                return True
            if refusal is Refusal.WRONG:
                self._pods.refused(worker_id, str(error))
                return True
            log.warning("worker %s: %s", worker_id, error)
            self._pods.call_failed(f"no Pod can be made: {error}", time.monotonic())
        return False

    def _delete(self, worker_id: str, name: str) -> bool:
        try:
            self._api.delete("pods", name)
        except KubernetesError as error:
            log.warning("worker %s: %s", worker_id, error)
            with self._changed:
                why = f"no Pod can be deleted: {why_refused(error)}"
                self._pods.call_failed(why, time.monotonic())
            return False
        with self._changed:
            self._pods.told_to_end(worker_id)
            self._changed.notify_all()
        return True
