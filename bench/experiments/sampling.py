"""Looks at the Pods of a namespace all the time, from a thread: who has how much CPU, and when.

CPU in use is what Pods with a running container ask for, as Kubernetes reckons. Every call has a
limit; a look that fails is left out.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from types import TracebackType

from kubernetes.client import ApiException, CoreV1Api, V1Pod
from urllib3.exceptions import HTTPError

from bench.experiments.place import thousandths

__all__ = ["PodSampler", "cpu_of"]

PAUSE_S = 0.5
CALL_LIMIT_S = 5.0
JOIN_LIMIT_S = 20.0


class PodSampler:
    """Samples while its ``with`` block runs.

    Attributes:
        samples: Time since the beginning in seconds, and CPU in thousandths by group.
    """

    def __init__(self, namespace: str, group: Callable[[V1Pod], str]) -> None:
        """Prepare.

        Args:
            namespace: Whose Pods.
            group: Names what a Pod belongs to; empty: it is left out.
        """
        self.samples: list[tuple[float, Counter[str]]] = []
        self._namespace = namespace
        self._group = group
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pods", daemon=True)
        self._begun_s = time.monotonic()

    def __enter__(self) -> PodSampler:
        self._begun_s = time.monotonic()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._thread.join(JOIN_LIMIT_S)

    def series(self, *groups: str) -> tuple[tuple[float, float], ...]:
        """Return time and CPU of these groups together, in CPUs."""
        return tuple(
            (round(at_s, 2), sum(used[group] for group in groups) / 1000)
            for at_s, used in self.samples
        )

    def _run(self) -> None:
        core = CoreV1Api()
        while not self._ended.wait(PAUSE_S):
            at_s = time.monotonic() - self._begun_s
            try:
                found = core.list_namespaced_pod(self._namespace, _request_timeout=CALL_LIMIT_S)
            except (ApiException, HTTPError, OSError):
                continue
            used: Counter[str] = Counter()
            for one in found.items:
                name = self._group(one)
                if name and one.status.phase == "Running":
                    used[name] += cpu_of(one)
            self.samples.append((at_s, used))


def cpu_of(pod: V1Pod) -> int:
    """Return what a Pod asks for, in thousandths of a CPU."""
    asked = [(one.resources.requests or {}) for one in pod.spec.containers if one.resources]
    return sum(thousandths(one["cpu"]) for one in asked if "cpu" in one)
