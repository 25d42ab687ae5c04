"""A Wide & Deep job on census as the experiments run it: submitted, looked at, hurt, asked.

Every wait has a limit.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from kubernetes.client import ApiException, V1Pod
from urllib3.exceptions import HTTPError

from backstay.errors import KubernetesError
from backstay.kubernetes.api import KubernetesApi
from backstay.kubernetes.published_status import PublishedStatus, read_status
from bench.experiments.job_files import (
    CENSUS,
    FIRST_BATCH,
    MODEL,
    JobShape,
    job_settings,
    paced_model,
)
from bench.experiments.place import Place, Room
from bench.experiments.waiting import LOOK_PAUSE_S, Failed, wait_until
from tests.kubernetes.backstay_image import frameworks

__all__ = ["TrainingJob", "component"]

COMMAND_LIMIT_S = 120.0


class TrainingJob:
    """One job: its folder, the commands that run it, and its Pods."""

    def __init__(self, place: Place, room: Room, folder: Path, shape: JobShape) -> None:
        """Write its files; ``submit`` begins it."""
        self.shape = shape
        self.namespace = room.namespace
        self._folder = folder / shape.name
        # Settings of the user's own servers and jobs stay out.
        kept = {name: one for name, one in os.environ.items() if not name.startswith("BACKSTAY_")}
        self._env = {**kept, "KUBECONFIG": str(place.cluster.kubeconfig)}
        self._api = KubernetesApi.of_kubeconfig(room.namespace.name)
        self._folder.mkdir(parents=True)
        self._write(room.etcd)
        self.submitted_s = 0.0
        """By the clock of ``time.time``, as the first batch is."""

    def close(self) -> None:
        """Give back what it holds."""
        self._api.close()

    def submit(self) -> None:
        """Begin the job; returns when its objects are made.

        Raises:
            Failed: The command was refused.
        """
        self.submitted_s = time.time()
        given = ("--on", "kubernetes", "--namespace", self.namespace.name, "--detach")
        self._run("train", "job.yaml", *given)

    def scale(self, workers: int) -> bool:
        """Ask for so many workers; returns whether the job master took it."""
        given = ("--on", "kubernetes", "--namespace", self.namespace.name)
        try:
            self._run("jobs", *given, "scale", self.shape.name, str(workers))
        except Failed:
            # A job master that begins or ends.
            return False
        return True

    def status(self) -> PublishedStatus | None:
        """Return what the job master has published; None: nothing, or the API does not answer."""
        try:
            return read_status(self._api, self.shape.name)
        except KubernetesError:
            return None

    def pods(self, role: str) -> list[V1Pod]:
        """Return the Pods of a role that were not told to end, in order of their names."""
        try:
            found = self.namespace.pods()
        except (ApiException, HTTPError, OSError):
            return []
        kept = [one for one in found if component(one) == role and self._is_own(one)]
        return sorted(kept, key=lambda one: str(one.metadata.name))

    def delete(self, pod: str) -> None:
        """Delete a Pod without grace: its name and address go, its process has two seconds."""
        try:
            self.namespace.core.delete_namespaced_pod(
                pod, self.namespace.name, grace_period_seconds=0
            )
        except ApiException as error:
            # It has gone by itself.
            if error.status != 404:
                raise

    def first_batch_s(self) -> float | None:
        """Return when a worker began its first batch; None: no log that is there tells."""
        found = []
        for one in self.pods("worker"):
            try:
                answer = self.namespace.core.read_namespaced_pod_log(
                    one.metadata.name, self.namespace.name, _preload_content=False
                )
            except (ApiException, HTTPError, OSError):
                continue
            text = answer.data.decode(errors="replace")
            found += re.findall(rf"{FIRST_BATCH}([0-9.]+)", text)
        return min(map(float, found), default=None)

    def wait_for_end(
        self, limit_s: float, look: Callable[[PublishedStatus], None] = lambda _: None
    ) -> PublishedStatus:
        """Wait until the job is over; call ``look`` with each status on the way.

        Raises:
            Failed: It did not end in time, or not well.
        """
        deadline_s = time.monotonic() + limit_s
        published = None
        while time.monotonic() < deadline_s:
            published = self.status() or published
            if published is not None:
                look(published)
                if published.over:
                    break
            time.sleep(LOOK_PAUSE_S)
        if published is None or published.over != "done":
            how = "has not begun" if published is None else published.over or "still runs"
            reason = published.reason if published is not None else ""
            raise Failed(
                f"job {self.shape.name} {how} after {limit_s:.0f} s. {reason}\n{self._pods_text()}"
            )
        return published

    def wait_until_gone(self, limit_s: float) -> None:
        """Wait until the job has no Pod any more.

        Raises:
            Failed: It has still.
        """
        name = self.shape.name
        wait_until(
            f"no Pod of {name}",
            lambda: not any(self._is_own(one, ending=True) for one in self.namespace.pods()),
            limit_s,
        )

    def timeline(self) -> dict[str, float]:
        """Return seconds from the command to what Pods of the job tell of their beginning."""
        found: dict[str, float] = {}
        for one in self.namespace.pods():
            role = component(one)
            if not role or not self._is_own(one, ending=True):
                continue
            for what, at_s in _beginnings(one):
                name = f"{role} {what}"
                found[name] = min(found.get(name, at_s), at_s)
        return {
            name: round(at_s - self.submitted_s, 1)
            for name, at_s in sorted(found.items(), key=lambda item: item[1])
        }

    def _pods_text(self) -> str:
        """Return what its Pods are doing, for people."""
        try:
            found = self.namespace.pods()
        except (ApiException, HTTPError, OSError) as error:
            return str(error)
        return "\n".join(
            f"{one.metadata.name}: {one.status.phase} {one.status.reason or ''}" for one in found
        )

    def _is_own(self, pod: V1Pod, *, ending: bool = False) -> bool:
        labels = pod.metadata.labels or {}
        mine = labels.get("app.kubernetes.io/instance") == f"backstay-{self.shape.name}"
        return mine and (ending or not pod.metadata.deletion_timestamp)

    def _run(self, *words: str) -> None:
        command = [sys.executable, "-m", "backstay.cli", *words]
        try:
            done = subprocess.run(
                command,
                cwd=self._folder,
                env=self._env,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=COMMAND_LIMIT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise Failed(f"{' '.join(words)}: not done after {COMMAND_LIMIT_S:.0f} s") from None
        if done.returncode:
            raise Failed(f"{' '.join(words)}: {done.stderr[-2000:]}")

    def _write(self, etcd: str) -> None:
        (self._folder / MODEL).write_text(paced_model(self.shape.pause_s), encoding="utf-8")
        shutil.copy(CENSUS / "census_features.py", self._folder)
        checkpoints = self._folder / "checkpoints"
        checkpoints.mkdir()
        # The servers' user is another one.
        checkpoints.chmod(0o777)
        settings = job_settings(self.shape, etcd, checkpoints, frameworks())
        # JSON is YAML.
        (self._folder / "job.yaml").write_text(json.dumps(settings), encoding="utf-8")


def component(pod: V1Pod) -> str:
    """Return the role of a job's Pod, as its label names it; empty: it is another Pod."""
    return str((pod.metadata.labels or {}).get("app.kubernetes.io/component", ""))


def _beginnings(pod: V1Pod) -> list[tuple[str, float]]:
    found = [("made", pod.metadata.creation_timestamp.timestamp())]
    found += [
        (one.type, one.last_transition_time.timestamp())
        for one in pod.status.conditions or []
        if one.type in ("PodScheduled", "Ready") and one.status == "True"
    ]
    for status in pod.status.container_statuses or []:
        state = status.state.running or status.state.terminated
        if state is not None and state.started_at:
            found.append(("container began", state.started_at.timestamp()))
    return found
